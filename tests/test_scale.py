"""The page about 10^9 samples shows what its code computes, and the code computes what the package does."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import wds_tensorcache as tc
from benchmarks.scale.memory import OPEN_NBYTES, PICKLED_NBYTES, shards, write_listing
from benchmarks.scale.setting import BATCH, PER_SHARD, RANKS_PER_NODE
from benchmarks.scale.tables import tables
from benchmarks.scale.traffic import WAYS, Way, node_hits
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.shards.footer import build_footer, parse_index
from wds_tensorcache.training.plan import Plan, Position, Stream
from wds_tensorcache.training.weights import Weights

PAGE = Path(__file__).parent.parent / "benchmarks" / "scale.md"


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text()
    found = tables()
    for title, table in found.items():
        assert table in page, f"{title}: replace the table in scale.md by that of python -m benchmarks.scale"
    separators = [line for line in page.splitlines() if line.startswith("| ---")]
    assert len(separators) == len(found) + 1  # the last table is text


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_samples_are_those_of_a_loader(way: Way) -> None:
    for rank in (0, RANKS_PER_NODE - 1):
        plan = Plan(
            [range(way.num_samples)],
            [Stream(way.order)],
            Weights([], None, {}, [], 0),
            batch_size=BATCH,
            rank=way.first_rank + rank,
            world_size=way.world_size,
            last_batch="drop",
            seed=0,
            settings={"shuffle": True},
        )
        step, after = plan.step(Position(0, (2 * BATCH * way.world_size,), 2 * BATCH * way.world_size, 2))
        assert np.array_equal(step.indices, way.indices(0, 2)[rank])
        assert after.step == 3


def test_the_index_is_a_real_one() -> None:
    index = shards().index
    assert len(index.keys) == PER_SHARD
    footer = build_footer(index)
    body = footer[len(footer) - len(footer.lstrip(b"\0")) :]
    parsed = parse_index(body, shards().nbytes)
    assert parsed is not None
    assert parsed.nbytes == index.nbytes


@pytest.mark.long
def test_the_memory_of_an_open_shard(tmp_path: Path) -> None:
    sizes = {}
    with HttpServer(tmp_path) as server:
        for count in (300, 300, 1300):  # the first one fills caches
            write_listing(tmp_path / "manifest.json", count)
            gc.collect()
            tracemalloc.start()
            cache = tc.open(f"{server.url}/manifest.json")
            gc.collect()
            sizes[count] = tracemalloc.get_traced_memory()[0], len(pickle.dumps(cache))
            tracemalloc.stop()
            cache.close()
    memory, pickled = ((large - small) / 1000 for small, large in zip(sizes[300], sizes[1300], strict=True))
    assert OPEN_NBYTES / 1.33 < memory < OPEN_NBYTES * 1.33
    assert PICKLED_NBYTES / 1.33 < pickled < PICKLED_NBYTES * 1.33


def test_a_cache_that_fits_serves_all() -> None:
    for order in ("True", "blocks"):
        assert node_hits(order, True, 1.0) == 1
        hits = [node_hits(order, is_own, size) for is_own in (False, True) for size in (0.25, 0.5, 0.75)]
        assert hits[:3] == sorted(hits[:3])
        assert max(hits[:3]) < 0.05 < hits[-1] < 1
