"""However an iteration ends, nothing of it stays: no threads, no files."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import write

COUNT = 40


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Any]:
    with tc.open(write(tmp_path, [{"x": torch.full((1000,), i)} for i in range(COUNT)], max_samples=9)) as opened:
        opened.read_batch(range(COUNT))  # every shard is open
        yield opened


@pytest.fixture(autouse=True)
def nothing_stays(cache: Any) -> Iterator[None]:
    gc.collect()  # what other tests left
    files = len(os.listdir("/proc/self/fd"))
    yield
    # an abandoned iteration waits for its threads for a second, which a busy machine may exceed
    for thread in threading.enumerate():
        if thread.name.startswith("tensorcache-loader"):
            thread.join(60)
            assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == files


def test_loops_that_are_left(cache: Any) -> None:
    list(tc.Loader(cache, 4, prefetch_batches=9))
    for _ in tc.Loader(cache, 4):
        break
    iterator = iter(tc.Loader(cache, 4))
    next(iterator)
    del iterator


def test_closing(cache: Any) -> None:
    """Closing twice, before an iteration begins and after its end is allowed; the position is kept."""
    with tc.Loader(cache, 4) as loader:
        loader.close()
        iterator = iter(loader)
        loader.close()
        assert list(iterator) == []
        iterator = iter(loader)
        next(iterator)
    for _ in range(2):
        assert list(iterator) == []
        iterator.close()  # type: ignore[attr-defined]
    assert loader.state_dict()["position"]["used"] == 4


def test_a_new_loop_ends_the_old_one(cache: Any) -> None:
    loader = tc.Loader(cache, 4)
    old = iter(loader)
    next(old)
    assert len(list(loader)) == 10
    with pytest.raises(RuntimeError, match="another iteration of this loader has begun"):
        next(old)
    with pytest.raises(RuntimeError, match="another iteration of this loader has begun"):
        list(zip(loader, loader, strict=True))
    gc.collect()


def test_a_fork_in_an_iteration(cache: Any) -> None:
    loader = tc.Loader(cache, 4)
    iterator = iter(loader)
    next(iterator)
    loader.pause()  # a fork while another thread reads is not supported

    def work() -> None:
        with pytest.raises(RuntimeError, match="process that began it"):
            next(iterator)
        assert len(list(loader)) == 10  # a new iteration has its own threads

    assert run_in_child(work) == 0
    assert len(list(iterator)) == 9


def test_an_error_in_collate(cache: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        if any(sample["x"][0] == 17 for sample in samples):
            raise ZeroDivisionError("of the user")
        return samples

    loader = tc.Loader(cache, 4, collate=collate)
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        list(loader)
    assert any(entry.name == "collate" for entry in caught.traceback)
    used = loader.state_dict()["position"]["used"]
    assert used % 4 == 0
    del caught
    gc.collect()
    again = tc.Loader(cache, 4)
    again.load_state_dict(loader.state_dict())
    batch = next(iter(again))
    assert 17 in batch["x"][:, 0].tolist()


@pytest.mark.long
def test_sigint_and_the_end_of_the_interpreter(cache: Any, tmp_path: Path) -> None:
    """A real signal ends a loop; then the process ends by itself, in spite of an iteration that was left."""
    code = f"""
import signal, sys
import wds_tensorcache as tc
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background is told to ignore it
loader, other = (tc.Loader(tc.open({str(tmp_path)!r}), 4) for _ in range(2))
left = iter(other)
next(left)
try:
    while True:
        for batch, info in loader.with_info():
            print(info.step, flush=True)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("interrupted", file=sys.stderr, flush=True)
"""
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        for _ in range(30):
            running.stdout.readline()
        for _ in range(20):  # Python ignores an interrupt inside a finalizer
            running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                _, errors = running.communicate(timeout=5)
                break
    finally:
        running.kill()
    assert running.returncode == 0
    assert errors.endswith("interrupted\n")  # and no more
