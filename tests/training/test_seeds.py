"""Random numbers of loaders: seeds are distinct, choices and orders uniform, and each stream has its own numbers."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import cache as kept
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.training.loaders import write_numbers

Array = np.ndarray[Any, Any]
COUNT = 6000
NUMBERS = [2, 3, 5, 8]  # of alternatives
TWIN_COUNT = 240


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    captions = [list(range(NUMBERS[i % 4])) for i in range(COUNT)]
    samples = [{"captions": each, "tags": each + [0] * (i % 8 > 3)} for i, each in enumerate(captions)]
    with tc.open(write(tmp_path_factory.mktemp("seeds"), samples, max_samples=COUNT)) as opened:
        yield opened


def record(cache: Any, seed: int, epoch: int, choose: Any = None) -> Any:
    """Return the record of a batch of all samples, in order."""
    loader = tc.Loader(cache, COUNT, seed=seed, choose=choose, num_threads=0)
    loader.set_epoch(epoch)
    ((_, info),) = loader.with_info()
    return info


@pytest.fixture(scope="module")
def draw(cache: Any) -> Any:
    """A function of a loader's seed and epoch that returns the choices of all samples by name."""
    return kept(lambda seed, epoch: record(cache, seed, epoch, {"c": "captions.*", "t": "tags.*"}).choices)


def check_uniform(*drawn: Array, number: int = 2) -> None:
    """Check by the chi-square test that all combinations are equally frequent; the seeds are fixed, so this never flickers."""
    counts = np.bincount(np.ravel_multi_index(drawn, (number,) * len(drawn)), minlength=number ** len(drawn))
    expected, degrees = counts.sum() / counts.size, counts.size - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: about normal; exceeded with a probability of 1 in 30,000 on each side
    score = ((chi_square / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    assert abs(score) < 4


@pytest.mark.parametrize("at", range(4), ids=map(str, NUMBERS))
def test_choices_are_uniform_and_independent(cache: Any, draw: Any, at: int) -> None:
    """Of epochs, seeds, neighbors, names, and the seeds as transforms of users use them."""
    number = NUMBERS[at]
    now = draw(5, 2)["c"][at::4]
    others = [draw(*of)["c"][at::4] for of in ((5, 3), (6, 2), (-1, 1 << 30))]
    for other in (*others, np.roll(now, 1), np.roll(now, 64), record(cache, 5, 2).seeds[at::4] % number):
        check_uniform(now, other, number=number)
    check_uniform(*(draw(5, 2)[name][at::8] for name in "ct"), number=number)  # the samples with as many tags
    check_uniform(now[:-2:3], now[1:-1:3], number=number)


def test_seeds_are_distinct(cache: Any) -> None:
    seeds = np.concatenate(
        [record(cache, seed, epoch).seeds for seed in (-1, 0, 1, 1 << 70) for epoch in (0, 1, 1 << 30)]
    )
    assert len(np.unique(seeds)) == len(seeds)
    assert seeds.min() >= 0
    for bit in range(63):
        check_uniform(seeds >> bit & 1)


# --- streams: none has the numbers of another one, nor of a loader with another seed ---


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Two caches of the same size, in which bucket `x % 2` has the same positions."""
    with tc.open(write_numbers(tmp_path_factory.mktemp("twins"), range(TWIN_COUNT), max_samples=40)) as cache:
        yield cache, cache[:]


def half(entry: Any) -> int:
    return int(entry.key) % 2


MODES: dict[str, Any] = {
    "mix": lambda p, q: {"mix": {"p": p, "q": q}, "shuffle": True},
    "blocks": lambda p, q: {"mix": {"p": p, "q": q}, "shuffle": "blocks", "window": 60},
    "buckets": lambda p, q: {"cache": p, "bucket_by": half, "shuffle": True},
    "weights": lambda p, q: {
        "mix": {"p": (p, 1), "q": (q, 1)},
        "weights": {"p": np.ones(TWIN_COUNT), "q": np.ones(TWIN_COUNT)},
    },
    "weights+buckets": lambda p, q: {"cache": p, "bucket_by": half, "weights": np.ones(TWIN_COUNT)},
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


# --- the order of an epoch: a permutation, different in each epoch, and a pure function ---


@given(st.integers(0, 3000), st.integers(-(1 << 70), 1 << 70), st.integers(0, 1 << 40))
def test_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = tc.EpochOrder(count, seed=seed)
    numbers = order(epoch, np.arange(count))
    assert numbers.dtype == np.int64
    assert sorted(numbers.tolist()) == list(range(count))
    some = np.arange(count)[::7]
    assert order(epoch, some).tolist() == numbers[some].tolist()  # position by position


def test_the_same_everywhere() -> None:
    """Written down: a release that shuffles otherwise would resume other epochs."""
    order = pickle.loads(pickle.dumps(tc.EpochOrder(1000, seed=42)))
    assert order(0, range(8)).tolist() == EXPECTED[0]
    assert order(1, range(8)).tolist() == EXPECTED[1]
    assert tc.EpochOrder(10**12, seed=7)(3, [0, 10**12 - 1]).tolist() == EXPECTED[2]


EXPECTED = [
    [564, 839, 227, 402, 364, 296, 122, 70],
    [827, 722, 334, 860, 918, 276, 182, 583],
    [679588686720, 736122006021],
]


def test_no_order_is_preferred() -> None:
    found = Counter(tuple(tc.EpochOrder(4, seed=seed)(0, range(4)).tolist()) for seed in range(4800))
    assert len(found) == 24
    assert 140 < min(found.values()) <= max(found.values()) < 260  # 200 each; five standard deviations are 69
    numbers = tc.EpochOrder(100_000)(0, np.arange(100_000))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, np.arange(100_000))[0, 1]) < 0.02


def test_an_order_refuses_wrong_positions() -> None:
    with pytest.raises(ValueError, match="count=-1"):
        tc.EpochOrder(-1)
    for positions in ([3], [-1], [0, 1, 2, 3]):
        with pytest.raises(IndexError, match=r"out of range \[0, 3\)"):
            tc.EpochOrder(3)(0, positions)
    assert tc.EpochOrder(0)(0, []).tolist() == []
    for wrong in ([1.7], 1, [[0], [1]]):
        with pytest.raises(TypeError, match="expected a sequence of ints"):
            tc.EpochOrder(3)(0, wrong)


def test_an_order_takes_integers_of_numpy() -> None:
    order = tc.EpochOrder(np.int64(6), seed=np.int64(3))
    assert order(np.int64(1), range(6)).tolist() == tc.EpochOrder(6, seed=3)(1, range(6)).tolist()
    with pytest.raises(TypeError, match=r"count=1\.5, expected an integer"):
        tc.EpochOrder(1.5)  # type: ignore[arg-type]
