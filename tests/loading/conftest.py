"""Folders of small samples, which are gathered from maps, of large ones, which are not, and of numbers for loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.loading.batches import LARGE, SMALL, write
from tests.loading.loaders import COUNT, write_numbers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("large"), LARGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("loader"), range(COUNT), max_samples=5)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("other"), range(100, 109))


@pytest.fixture
def cache(folder: str) -> Iterator[Any]:
    with tc.open(folder) as opened:
        yield opened


@pytest.fixture
def more(other: str) -> Iterator[Any]:
    with tc.open(other) as opened:
        yield opened
