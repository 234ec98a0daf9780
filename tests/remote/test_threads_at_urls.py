"""Remote shards that many threads read at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

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
