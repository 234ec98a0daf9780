"""Folders of samples that are told apart by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.training.loaders import COUNT, write_numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("loader"), range(COUNT), max_samples=5)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("other"), range(100, 109))


@pytest.fixture
def more(other: str) -> Iterator[Any]:
    with tc.open(other) as opened:
        yield opened
