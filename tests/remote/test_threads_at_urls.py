"""Remote shards that many threads read at once, and reads that are interrupted."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.remote.caches import small, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same

COUNT = 60
NAMES = ["latent", "bits.int", "array"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("served") / "cache", [small(i) for i in range(COUNT)], max_samples=4)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    with HttpServer(folder.parent, latency_s=0.005) as server:
        yield server


def test_threads(server: HttpServer, folder: Path) -> None:
    """Threads that begin with indexes that are not loaded yet."""
    local = tc.open(folder).select(NAMES)
    indices = [[(7 * thread + 13 * i) % COUNT for i in range(9)] for thread in range(12)]
    expected = [local.read_batch(each) for each in indices]
    with tc.open(f"{server.url}/cache") as whole:
        cache = whole.select(NAMES)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for _ in range(3):
                    batch = cache.read_batch(indices[number])
                    for name in ("latent", "array"):
                        assert_same(expected[number][name], batch[name])
                    assert batch["prompt"] == expected[number]["prompt"]
                    assert_same(small(indices[number][0])["text"], whole[indices[number][0]]["text"])
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(indices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no setitimer")
def test_interrupts(server: HttpServer, folder: Path) -> None:
    """An interrupt at any time of a read reaches the caller, and the next read is right."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    expected = tc.open(folder).select(NAMES).read_batch(range(COUNT))
    gc.disable()  # an interrupt in a callback of the collector, such as that of Hypothesis, would be lost
    before = signal.signal(signal.SIGALRM, interrupt)
    num_interrupted = 0
    try:
        for attempt in range(25):
            with tc.open(f"{server.url}/cache") as whole:
                cache = whole.select(NAMES)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.003 * attempt)
                    batch = cache.read_batch(range(COUNT))
                    time.sleep(0.2)
                except KeyboardInterrupt:
                    num_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                batch = cache.read_batch(range(COUNT))
                assert_same(expected["latent"], batch["latent"])
                assert batch["prompt"] == expected["prompt"]
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert num_interrupted == 25
