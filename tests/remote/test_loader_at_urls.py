"""`tc.Loader` over remote shards: how far it reads ahead, and what happens when it is closed or a server fails."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.caches import small, write_cache
from tests.remote.servers.http_server import HttpServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("served") / "cache", [small(i) for i in range(60)], max_samples=20)


@pytest.fixture(scope="module")
def server(module_server: HttpServer, folder: Path) -> HttpServer:
    module_server.set(folder=folder.parent, latency_s=0.02)
    return module_server


def test_the_number_of_batches_ahead(server: HttpServer) -> None:
    ahead = tc.Loader(tc.open(f"{server.url}/cache"), 2)._ahead
    assert ahead.count == 4
    for _ in range(3):
        ahead.note(10_000, has_waited=False, has_requested=True)
    assert ahead.count == 4
    counts = []
    for _ in range(5):
        ahead.note(10_000, has_waited=True, has_requested=True)
        counts.append(ahead.count)
    assert counts == [8, 16, 32, 32, 32]
    # at most 1 GiB, but two batches
    ahead.note(1 << 28, has_waited=True, has_requested=True)
    assert ahead.count == 4
    ahead.note(1 << 31, has_waited=True, has_requested=True)
    assert ahead.count == 2
    # batches that need no requests, as those from a node's cache
    for _ in range(5):
        ahead.note(10_000, has_waited=True, has_requested=True)
    seen = []
    for has_requested in [False] * 7 + [True] + [False] * 9:
        ahead.note(10_000, has_waited=False, has_requested=has_requested)
        seen.append(ahead.count)
    assert seen == [32] * 15 + [2] * 2
    ahead.note(10_000, has_waited=True, has_requested=True)
    assert ahead.count == 4
    for _ in range(8):
        ahead.note(10_000, has_waited=False, has_requested=False)
    # more than what latency times rate asks for is not read ahead, however long training waits
    ahead.note(1 << 27, has_waited=True, has_requested=True)
    assert ahead.count == 2


def test_a_loader_reads_further_ahead_while_training_waits(server: HttpServer, folder: Path) -> None:
    with tc.open(f"{server.url}/cache") as cache, tc.Loader(cache.select("latent"), 2, shuffle=True) as loader:
        first = [info.keys for _, info in loader.with_info()]
        assert loader._ahead.count == 32
        assert loader._num_threads == 16
        local = tc.Loader(tc.open(folder).select("latent"), 2, shuffle=True)
        assert [info.keys for _, info in local.with_info()] == first
        assert (local._ahead.count, local._num_threads) == (2, 2)
        chosen = tc.Loader(cache, 2, num_threads=3, prefetch_batches=5)
        assert (chosen._ahead.count, chosen._num_threads) == (5, 3)
        alone = tc.Loader(cache.select("latent"), 2, num_threads=0)
        assert len(list(alone)) == 30
        assert alone._ahead.count == 4


def test_new_weights_on_ranks_that_read_different_numbers_of_batches_ahead(server: HttpServer, tmp_path: Path) -> None:
    """One rank has all blocks in its node's cache; both use new weights from the same step on, and have one state."""
    with tc.open(f"{server.url}/cache", cache_dir=tmp_path / "node") as warm, tc.open(f"{server.url}/cache") as cold:
        warm.select("latent").read_batch(range(60))
        views = [(cache.select("latent")[:20], cache.select("latent")[20:]) for cache in (warm, cold)]
        ranks = [
            tc.Loader(mix={"a": (a, 1), "b": (b, 1)}, batch_size=1, shuffle=True, rank=rank, world_size=2)
            for rank, (a, b) in enumerate(views)
        ]
        for epoch in range(2):  # in the second one, one rank reads 2 batches ahead, the other one up to 32
            sources: list[str] = []
            for step in zip(*(loader.with_info() for loader in ranks), strict=True):
                (source,) = {info.source for _, info in step}
                sources.append(source)
                if len(sources) == 10:
                    (begin,) = {loader.set_weights({"a": epoch, "b": 1 - epoch}) for loader in ranks}
            assert ranks[0].state_dict() == ranks[1].state_dict()
            begin -= epoch * len(ranks[0])
            assert set(sources[begin:]) <= {"ba"[epoch]}
