"""Statistics of a loader, with events in place of times where an order matters: no assertion depends on the machine's speed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import wds_tensorcache as tc
from wds_tensorcache.training.stats import Clock, Timing


def test_counts_and_bytes(cache: Any) -> None:
    loader = tc.Loader(cache.select("x"), 4)
    assert loader.stats() == tc.LoaderStats()
    assert "waited" not in repr(loader)
    list(loader)
    once = loader.stats()
    assert (once.num_batches, once.nbytes) == (6, 6 * 128)  # multiples of 64 bytes
    assert 0 < once.training_waited_s <= once.total_s
    assert 0 <= once.data_waited_s <= once.total_s
    assert once.read_s > 0
    assert once.transform_s == once.transfer_s == 0
    assert once.nbytes_per_s == once.nbytes / once.total_s
    assert once.stages["read"] == tc.StageStats(once.read_s, once.nbytes)
    assert once.stages["transfer"].nbytes_per_s == 0
    assert repr(loader).endswith(f"\n  {once}")
    next(iter(loader))
    more = loader.stats() - once
    assert (more.num_batches, more.nbytes) == (1, 128)
    assert more.total_s >= more.training_waited_s > 0


def test_stages_are_told_apart(cache: Any) -> None:
    def transform(batch: Any, info: Any) -> Any:
        time.sleep(0.01)
        return batch

    loader = tc.Loader(cache.select("x"), 23, transform=transform, num_threads=0, device="cpu")
    list(loader)
    stats = loader.stats()
    assert stats.transform_s >= 0.01
    assert stats.transfer_s > 0
    assert stats.training_waited_s >= stats.read_s + stats.transform_s + stats.transfer_s


def test_who_waits(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the test moves: training waits for the first batch, and the second waits for training."""
    now, may_run, has_begun = [0.0], threading.Semaphore(1), threading.Semaphore(0)
    for module in ("stats", "loader"):
        monkeypatch.setattr(f"wds_tensorcache.training.{module}.perf_counter", lambda: now[0])

    def transform(batch: Any, info: Any) -> Any:
        has_begun.release()
        may_run.acquire()
        now[0] += 5
        return batch

    loader = tc.Loader(cache.select("x"), 8, transform=transform, num_threads=1, prefetch_batches=2)
    given = iter(loader)
    next(given)
    first = loader.stats()
    assert (first.num_batches, first.training_waited_s, first.data_waited_s, first.total_s) == (1, 5, 0, 5)
    assert (first.read_s, first.transform_s) == (0, 5)
    may_run.release()
    for _ in range(3):  # the third batch begins after the second is done
        has_begun.acquire()
    now[0] += 3
    next(given)
    second = loader.stats() - first
    assert (second.num_batches, second.training_waited_s, second.data_waited_s, second.total_s) == (1, 0, 3, 8)
    may_run.release()
    assert next(given, None) is not None


def test_time_between_iterations_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 2, 5, 6, 100, 101, 103, 104])
    monkeypatch.setattr("wds_tensorcache.training.stats.perf_counter", lambda: next(now))
    clock = Clock()
    for done_at in ((1.5, 3.5), (100.5, 103.5)):
        clock.begin()
        for at in done_at:
            clock.ask()
            clock.take(Timing(1.0, 0.25, 0.5, 10, 0, at))
            clock.give()
    stats = clock.stats()
    # asked at 0 and given at 2, asked at 5 (ready since 3.5) and given at 6; asked at 100, given at 101, 103 and 104
    assert stats == tc.LoaderStats(4, 40, 6 + 4, 2 + 1 + 1 + 1, 1.5, 4.0, 1.0, 2.0)
    assert str(stats) == ("4 batches in 10.0 s, 0 MB/s; training waited 5.0 s for data, data waited 1.5 s for training")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_waits_of_a_torch_loader(cache: Any, num_workers: int) -> None:
    loader = tc.torch_loader(cache.select("x"), 4, num_workers=num_workers)
    assert loader.stats() == tc.WaitStats()
    assert "waited" not in repr(loader)
    list(loader)
    once = loader.stats()
    assert once.num_batches == 6
    assert 0 < once.training_waited_s <= once.total_s
    assert repr(loader).endswith(f"\n  {once}")
    given = iter(loader)
    next(given)
    began = time.perf_counter()
    time.sleep(0.02)  # training
    paused_s = time.perf_counter() - began
    next(given)
    more = loader.stats() - once
    assert more.num_batches == 2
    assert more.total_s >= more.training_waited_s + paused_s
    loader.close()


def test_sums_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 2, 5, 6])
    monkeypatch.setattr("wds_tensorcache.training.stats.perf_counter", lambda: next(now))
    clock = Clock()
    clock.begin()
    for _ in range(2):
        clock.ask()
        clock.give()
    assert clock.waits() == tc.WaitStats(2, 6, 3)
    assert str(clock.waits()) == "2 batches in 6.0 s; training waited 3.0 s for data"
