"""Statistics of a loader: no assertion depends on the machine's speed."""

from __future__ import annotations

import time
from typing import Any

import wds_tensorcache as tc


def test_counts_and_bytes(cache: Any) -> None:
    loader = tc.Loader(cache.select("x"), 4)
    assert loader.stats().num_batches == loader.stats().total_s == 0
    assert "waited" not in repr(loader)
    list(loader)
    once = loader.stats()
    assert (once.num_batches, once.nbytes) == (6, 6 * 128)  # multiples of 64 bytes
    assert 0 < once.training_waited_s <= once.total_s
    assert 0 <= once.data_waited_s <= once.total_s
    assert once.read_s > 0
    assert once.transform_s == once.transfer_s == 0
    assert once.nbytes_per_s == once.nbytes / once.total_s
    assert repr(loader).endswith(f"\n  {once}")
    next(iter(loader))
    more = loader.stats() - once
    assert (more.num_batches, more.nbytes) == (1, 128)
    assert more.total_s >= more.training_waited_s > 0


def test_waiting_times(cache: Any) -> None:
    loader = tc.Loader(cache.select("x"), 8, num_threads=1, prefetch_batches=2)
    given = iter(loader)
    next(given)
    first = loader.stats()
    assert (first.num_batches, first.data_waited_s) == (1, 0)
    loader.pause()  # the other two batches are ready
    began = time.perf_counter()
    time.sleep(0.01)  # training
    paused_s = time.perf_counter() - began
    next(given)
    second = loader.stats() - first
    assert second.num_batches == 1
    assert second.total_s >= second.data_waited_s >= paused_s
    loader.close()


def test_waits_of_a_torch_loader(cache: Any) -> None:
    loader = tc.torch_loader(cache.select("x"), 4, num_workers=2)
    list(loader)
    once = loader.stats()
    assert (once.num_batches, once.nbytes, once.read_s, once.data_waited_s) == (6, 0, 0, 0)
    assert repr(loader).endswith(f"\n  {once}")
    assert 0 < once.training_waited_s <= once.total_s
