"""Folders of small samples, which are gathered from maps, and of large ones, which are not."""

from __future__ import annotations

import pytest

from tests.reading.batches import LARGE, SMALL, write


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("large"), LARGE)
