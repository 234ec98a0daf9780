"""The page about 10^9 samples shows what its script computes, and the script computes what the package does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale import BATCH, RANKS_PER_NODE, WAYS, Way, node_hits, tables
from wds_tensorcache.training.plan import Plan, Position, Stream
from wds_tensorcache.training.weights import Weights

PAGE = Path(__file__).parent.parent / "benchmarks" / "scale.md"


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text()
    for table in tables():
        assert table in page, "replace the table in scale.md by that of python -m benchmarks.scale"


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


def test_a_cache_that_fits_serves_all() -> None:
    for order in ("True", "blocks"):
        assert node_hits(order, True, 1.0) == 1
        hits = [node_hits(order, is_own, size) for is_own in (False, True) for size in (0.25, 0.5, 0.75)]
        assert hits[:3] == sorted(hits[:3])
        assert max(hits[:3]) < 0.05 < hits[-1] < 1
