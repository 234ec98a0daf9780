"""An epoch's order is a permutation, different in each epoch, and a pure function."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc


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


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="count=-1"):
        tc.EpochOrder(-1)
    for positions in ([3], [-1], [0, 1, 2, 3]):
        with pytest.raises(IndexError, match=r"out of range \[0, 3\)"):
            tc.EpochOrder(3)(0, positions)
    assert tc.EpochOrder(0)(0, []).tolist() == []
