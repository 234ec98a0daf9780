"""The content of a file of `torch.save` or `pickle.dump` is decoded without running it, unless the user trusts it."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.importers.safe_files import parse_torch


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


ITEM = {
    "latents": torch.randn(16, 8, 8).bfloat16(),
    "caption": ["x" * 300, ""],
}


def test_bytes_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for raw in (saved(ITEM), gzip.compress(saved(ITEM))):
        assert_same(ITEM, parse_torch(raw, False))
    with pytest.raises(tc.UnsafeSkeletonError, match="--trust"):
        parse_torch(saved(Gadget()), False)
    assert not Path("hacked").exists()
    parse_torch(saved(Gadget()), True)
    assert Path("hacked").exists()
    with pytest.raises(tc.FormatError, match="cannot be decoded"):
        parse_torch(b"hello", True)


def test_old_torch_files_need_trust_and_pickles_do_not() -> None:
    old = io.BytesIO()
    torch.save(ITEM, old, _use_new_zipfile_serialization=False)
    with pytest.raises(tc.FormatError, match="--trust"):
        parse_torch(old.getvalue(), False)
    assert_same(ITEM, parse_torch(old.getvalue(), True))
    assert_same(ITEM, parse_torch(pickle.dumps(ITEM), False))
