"""Seeds of samples are distinct, and choices uniform and independent: all are pure functions of integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache as kept
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc

Array = np.ndarray[Any, Any]
COUNT = 6000
NUMBERS = [2, 3, 5, 8]  # of alternatives


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("seeds")
    with tc.ShardWriter(folder, fsync=False) as sink:
        for i in range(COUNT):
            captions = list(range(NUMBERS[i % 4]))
            sink.write(f"{i}", {"captions": captions, "tags": captions + [0] * (i % 8 > 3)})
    with tc.open(folder) as opened:
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


def test_golden_choices(draw: Any) -> None:
    """The same on every machine and in every release: other choices would break a resumed training."""
    captions, tags = (draw(0, 0)[name] for name in "ct")
    assert captions[:12].tolist() == [1, 1, 0, 6, 0, 0, 3, 7, 1, 0, 1, 5]
    assert tags[:12].tolist() == [0, 0, 0, 6, 0, 0, 3, 4, 0, 2, 1, 2]
