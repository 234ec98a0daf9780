"""Every stream of a loader has its own random numbers: those of no other stream, and of no loader with another seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.training.loaders import write_numbers

COUNT = 240


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Two caches of the same size, in which bucket `x % 2` has the same positions."""
    with tc.open(write_numbers(tmp_path_factory.mktemp("twins"), range(COUNT), max_samples=40)) as cache:
        yield cache, cache[:]


def half(entry: Any) -> int:
    return int(entry.key) % 2


MODES: dict[str, Any] = {
    "mix": lambda p, q: {"mix": {"p": p, "q": q}, "shuffle": True},
    "blocks": lambda p, q: {"mix": {"p": p, "q": q}, "shuffle": "blocks", "window": 60},
    "buckets": lambda p, q: {"cache": p, "bucket_by": half, "shuffle": True},
    "weights": lambda p, q: {"mix": {"p": (p, 1), "q": (q, 1)}, "weights": {"p": np.ones(COUNT), "q": np.ones(COUNT)}},
    "weights+buckets": lambda p, q: {"cache": p, "bucket_by": half, "weights": np.ones(COUNT)},
}


@pytest.mark.parametrize("mode", MODES)
def test_no_two_streams_of_neighboring_seeds_agree(twins: tuple[Any, Any], mode: str) -> None:
    options = MODES[mode](*twins)
    streams: dict[Any, tuple[list[int], list[int]]] = {}
    for seed in range(-1, 3):
        loader = tc.Loader(batch_size=8, seed=seed, collate="list", num_threads=0, last_batch="drop", **options)
        for _, info in loader.with_info():
            indices, seeds = streams.setdefault((seed, info.source), ([], []))
            indices += (info.indices // (2 if "buckets" in mode else 1)).tolist()
            seeds += info.seeds.tolist()
    assert len(streams) == 8
    for (one, (order, seeds)), (two, (other_order, other_seeds)) in combinations(streams.items(), 2):
        same = sum(a == b for a, b in zip(order, other_order, strict=False))
        assert same < min(len(order), len(other_order)) / 10, (one, two)
        # two buckets of one cache and one seed may draw the same sample, and so its seed
        assert one[0] == two[0] or not set(seeds) & set(other_seeds), (one, two)


def test_windows_of_blocks_differ(twins: tuple[Any, Any]) -> None:
    """No window of one seed has the order of another window of a neighboring seed."""
    orders = []
    for seed in range(3):
        loader = tc.Loader(twins[0], 60, shuffle="blocks", window=60, seed=seed, collate="list", num_threads=0)
        orders += [tuple(np.argsort(info.indices).tolist()) for _, info in loader.with_info()]
    assert len(set(orders)) == len(orders) == 12
