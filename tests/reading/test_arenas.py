"""Arenas are reused when the last tensor over them is gone, never before, and batches are where they are asked for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import SMALL, assert_batch, write


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """No arena waits for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_arenas_come_back_after_batch_errors(tmp_path: Any) -> None:
    with tc.open(write(tmp_path, [{"x": torch.zeros(1 + i), "i": i} for i in range(3)])) as cache:

        def address() -> int:
            return cache.read_batch(range(2, 3))["x"].data_ptr()

        before = address()
        for collate, error in (("stack", tc.BatchError), (lambda samples: 1 / 0, ZeroDivisionError)):
            with pytest.raises(error):
                cache.read_batch(range(3), collate=collate)
            assert address() == before
        batch = cache.read_batch(range(3), collate="list")
        leaves = batch["i"]
        del batch
        assert leaves == [0, 1, 2]
        assert address() == before  # small values do not keep the tensors


# --- devices ---


def test_devices(small: str) -> None:
    with tc.open(small) as cache:
        expected = [SMALL[4], SMALL[2]]
        assert_batch(expected, cache.read_batch([4, 2], device="cpu"))
        with torch.device("meta"):
            assert_batch(expected, cache.read_batch([4, 2]))
            padded, info = cache.read_batch_with_info([4, 2], collate="pad")
            assert_batch(expected, padded)
            assert info.shapes["x"].device.type == info.is_padding.device.type == "cpu"
        assert cache.read_batch([4, 2], device="meta")["x"].is_meta
        assert cache.read_batch([4], device="meta", collate=list)[0]["x"].is_meta
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="pin_memory=True requires"):
                cache.read_batch([0], pin_memory=True)
            with pytest.raises(RuntimeError, match="torch sees no GPU"):
                cache.read_batch([0], device="cuda")
