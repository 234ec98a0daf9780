"""Seeds of samples are distinct, and draws from them uniform and independent: all are pure functions of integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_tensorcache.reading.choose import Alternatives, Randomness
from wds_tensorcache.reading.seeds import fractions_of, purpose_of, sample_seeds

Array = np.ndarray[Any, Any]
COUNT = 60_000
CHOOSE = Alternatives.of({"latent": ["a", "b"], "text": "captions.*", ("x", "y"): [("x", "y"), ("u", "v")]})


def choices(seed: int, epoch: int, num_alternatives: int, group: int = 0, first: int = 0, count: int = COUNT) -> Array:
    """Return the choice of each of some samples."""
    pick = Randomness(seed, epoch, CHOOSE).chooser(np.arange(first, first + count))
    return pick(CHOOSE.groups[group], np.full(count, num_alternatives))


def check_uniform(counts: Array) -> None:
    """Check by the chi-square test that all counts have one expected value; the seeds are fixed, so this never flickers."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: about normal; exceeded with a probability of 1 in 30,000 on each side
    score = ((chi_square / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    assert abs(score) < 4


def check_independent(*drawn: Array, num_alternatives: int) -> None:
    """Check that all combinations of several choices are equally frequent."""
    combined = np.ravel_multi_index(drawn, (num_alternatives,) * len(drawn))
    check_uniform(np.bincount(combined, minlength=num_alternatives ** len(drawn)))


@pytest.mark.parametrize("num_alternatives", [2, 3, 5, 10, 64])
@pytest.mark.parametrize("seed", [0, -1, 1 << 70])
def test_choices_are_uniform(num_alternatives: int, seed: int) -> None:
    for epoch, group in ((0, 0), (1, 1), (1 << 40, 2)):
        drawn = choices(seed, epoch, num_alternatives, group)
        assert drawn.min() == 0
        check_uniform(np.bincount(drawn, minlength=num_alternatives))


@pytest.mark.parametrize("num_alternatives", [2, 3, 8])
def test_choices_are_independent(num_alternatives: int) -> None:
    """Of names, epochs, seeds, neighbors and other draws."""
    seeds = sample_seeds(5, 2, np.arange(COUNT))
    now = choices(5, 2, num_alternatives)
    for others in (
        [choices(5, 3, num_alternatives)],
        [choices(6, 2, num_alternatives)],
        [choices(5, 2, num_alternatives, group=1), choices(5, 2, num_alternatives, group=2)],
        *([choices(5, 2, num_alternatives, first=distance)] for distance in (1, 2, 64, 1000)),
        [(fractions_of(seeds, "drop_text|text") * num_alternatives).astype(np.int64)],
        [seeds % num_alternatives],  # as transforms of users use them
    ):
        check_independent(now, *others, num_alternatives=num_alternatives)
    check_independent(now[:-2:3], now[1:-1:3], now[2::3], num_alternatives=num_alternatives)
    # over epochs, each sample has all alternatives equally often
    drawn = np.stack([choices(3, epoch, num_alternatives, count=20) for epoch in range(800)])
    for of_sample in drawn.T:
        check_uniform(np.bincount(of_sample, minlength=num_alternatives))


def test_seeds_are_distinct() -> None:
    indices = np.arange(50_000)
    found = [sample_seeds(seed, epoch, indices) for seed in (-1, 0, 1, 2) for epoch in (0, 1, 2, 1 << 61)]
    seeds = np.concatenate(found)
    assert len(np.unique(seeds)) == len(seeds)
    assert seeds.min() >= 0
    for bit in range(63):
        check_uniform(np.bincount(seeds >> bit & 1))


@given(
    st.integers(-(1 << 80), 1 << 80),
    st.lists(st.tuples(st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 62) - 1)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_a_draw_depends_only_on_its_sample(seed: int, pairs: list[tuple[int, int]], random: Any) -> None:
    """Not on the batch: every row of a batch of several passes is what it is alone, also if it occurs twice."""
    pairs += random.sample(pairs, min(3, len(pairs)))
    epochs, indices = map(np.array, zip(*pairs, strict=True))
    draw = Randomness(seed, epochs, CHOOSE)
    counts = 1 + indices % 7
    drawn = draw.chooser(indices)(CHOOSE.groups[1], counts)
    assert (drawn >= 0).all()
    assert (drawn < counts).all()
    for row, (epoch, index) in enumerate(pairs):
        alone = Randomness(seed, epoch, CHOOSE)
        assert draw.seeds(indices)[row] == alone.seeds(np.array([index])).item(0)
        assert drawn[row] == alone.chooser(np.array([index]))(CHOOSE.groups[1], counts[row : row + 1]).item(0)
    assert (len(set(draw.seeds(indices).tolist()))) == len(set(pairs))


def test_more_alternatives_move_a_choice_forward() -> None:
    """The share of the range that the choice comes from stays, so only some choices change with their position."""
    before, after = choices(0, 0, 4), choices(0, 0, 8)
    assert (before == after // 2).all()


def test_purposes_of_different_names_differ() -> None:
    names = ["a b", "a|b", "a\\ b", "a\\|b", "a| b", "a |b", "a  b", "a\\\\|b", "b a"]
    assert len({purpose_of("choose", text.split(" ")) for text in names}) == len(names)
    # determines choices, so it must not change
    assert purpose_of("choose", ["latent", "text.0"]) == "choose|latent|text.0"
