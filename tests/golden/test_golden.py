"""Members that version 1 wrote are read for ever, and the same members are written for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.interop.other_python import describe, read_folder, tensor_samples

MEMBERS = read_folder(Path(__file__).parent / "v1")


def test_all_are_there() -> None:
    assert MEMBERS.keys() == tensor_samples().keys()


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_version_1(name: str) -> None:
    sample = tensor_samples()[name]
    assert describe(tc.decode_sample(*MEMBERS[name], lazy=False, verify=True)) == describe(sample)
    assert tc.encode_sample(sample) == MEMBERS[name]
