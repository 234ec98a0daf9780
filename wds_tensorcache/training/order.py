"""In which order an epoch has its samples: computed where it is asked for, never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["BlockOrder", "EpochOrder", "uniform"]

Array = np.ndarray[Any, Any]
_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class EpochOrder:
    """The order of `count` samples in each epoch: a pure function of seed, epoch and position.

    A shuffled epoch is a permutation that nobody stores: a Feistel network over the next power of two, applied again to
    whatever falls outside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), with the finaliser of
    SplitMix64 as its round function. Positions of 10^9 samples take a fraction of a millisecond and no memory.

    Threads/fork/pickle: immutable, safe everywhere; the same numbers on every machine and in every release.
    """

    def __init__(self, count: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if count < 0:
            raise ValueError(f"count={count}, expected 0 or more")
        self.count = count
        self.identity = [[count]]  # what the order depends on besides the seed
        self.shuffle = shuffle
        self.seed = seed

    def __call__(self, epoch: int, positions: Any) -> Array:
        """Return the numbers of the samples at `positions` (int64, each in `[0, count)`) of an epoch, as int64.

        Raises:
            IndexError: A position that the epoch does not have.
        """
        places: Array = np.array(positions, np.int64)
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= self.count):
            raise IndexError(f"a position out of range [0, {self.count})")
        if not self.shuffle or self.count < 2:
            return places
        bits = (self.count - 1).bit_length()
        keys = _keys(self.seed, epoch)
        result = _permute(places.astype(np.uint64), bits, keys)
        outside = np.flatnonzero(result >= self.count)
        # fewer than half each time, as the power of two is below twice the count
        while len(outside):
            result[outside] = _permute(result[outside], bits, keys)
            outside = outside[result[outside] >= self.count]
        numbers: Array = result.astype(np.int64)
        return numbers


class BlockOrder:
    """The order of samples that lie in blocks (shards): blocks in a random order, samples mixed within a moving window.

    Reads that follow each other are of few blocks: what remote shards need. A pure function, like `EpochOrder`.

    Args:
        sizes: How many samples each block has.
        window: Samples that are mixed with each other.
    """

    def __init__(self, sizes: Sequence[int], *, window: int = 4096, seed: int = 0) -> None:
        if window < 1:
            raise ValueError(f"window={window}, expected 1 or more")
        self._sizes = np.array(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.count = int(self._sizes.sum())
        self.identity = [self._sizes, [window]]
        self.window = window
        self.seed = seed
        self._blocks: tuple[int, Array, Array] | None = None

    def __call__(self, epoch: int, positions: Any) -> Array:
        """Return the numbers of the samples at `positions` of an epoch, as int64; see `EpochOrder`."""
        places: Array = np.array(positions, np.int64)
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= self.count):
            raise IndexError(f"a position out of range [0, {self.count})")
        known = self._blocks
        if known is None or known[0] != epoch:
            blocks = EpochOrder(len(self._sizes), seed=self.seed)(epoch, range(len(self._sizes)))
            known = self._blocks = epoch, blocks, np.cumsum(self._sizes[blocks])
        _, blocks, ends = known
        number, inside = places // self.window, places % self.window
        for window in np.unique(number).tolist():
            which = number == window
            width = min(self.window, self.count - window * self.window)
            mixed = EpochOrder(width, seed=self.seed + 1 + window)(epoch, inside[which])
            places[which] = window * self.window + mixed
        at = np.searchsorted(ends, places, "right")
        block = blocks[at]
        result: Array = self._starts[block] + places - (ends[at] - self._sizes[block])
        return result


def uniform(seed: int, epoch: int, positions: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a random number in [0, 1) for each position of an epoch: SplitMix64 of it, in 53 bits."""
    values = np.array(positions, np.int64).astype(np.uint64)
    for key in _keys(seed, epoch)[:2]:
        values = _finalise(values ^ key)
    result: np.ndarray[Any, np.dtype[np.float64]] = (values >> np.uint64(11)).astype(np.float64) / (1 << 53)
    return result


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """Return a key for each round: SplitMix64's sequence from a state that seed and epoch give."""
    state = _finalise_one(seed * _GOLDEN & _MASK) ^ _finalise_one((epoch + 1) * _GOLDEN + 1 & _MASK)
    return [np.uint64(_finalise_one(state + number * _GOLDEN & _MASK)) for number in range(1, _ROUNDS + 1)]


def _finalise_one(value: int) -> int:
    return int(_finalise(np.array([value], np.uint64))[0])


def _finalise(values: Array) -> Array:
    """Return SplitMix64's finaliser of each value."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed


def _permute(values: Array, bits: int, keys: list[np.uint64]) -> Array:
    """Return a permutation of `[0, 2^bits)` at `values`; the halves may differ by a bit, and change places each round."""
    low_bits, high_bits = bits // 2, bits - bits // 2
    low, high = values & np.uint64((1 << low_bits) - 1), values >> np.uint64(low_bits)
    for key in keys:
        # `high` has `high_bits` bits: what it is mixed with is cut to that
        high, low = low, high ^ (_finalise(low ^ key) & np.uint64((1 << high_bits) - 1))
        low_bits, high_bits = high_bits, low_bits
    joined: Array = high << np.uint64(low_bits) | low
    return joined
