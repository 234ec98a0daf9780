"""The order of samples in an epoch, computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from wds_tensorcache.arguments import as_int
from wds_tensorcache.reading.seeds import finalize, round_keys, stream_seed

Array = np.ndarray[Any, Any]
_ROUNDS = 8  # one for each of the `round_keys`
_TABLE_BITS = 12  # in a half; up to 2^24 samples, the round function is read from tables of at most 256 KB in all


class EpochOrder:
    """The order of samples: a function of count, seed, epoch and position.

    A shuffled epoch is a permutation that is never stored. It is a Feistel network over the next power of two. Results out of
    range pass through it again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round function is the
    finalizer of SplitMix64. Computing one position among 10^9 samples takes a fraction of a millisecond.

    Args:
        count: Number of samples.
        shuffle: Shuffle each epoch; False keeps the order of the samples.
        seed: Seed of all epochs; any integer, of which the lowest 64 bits count.

    Raises:
        TypeError: `count` or `seed` is not an integer.
        ValueError: `count` is negative.

    Memory: none per sample. Up to 2^24 samples, tables of the round function take at most 8 MB for all orders of a process.
    Threads/fork/pickle: immutable, safe everywhere; the same order on every machine and in every release.
    """

    def __init__(self, count: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.count, self.seed = as_int("count", count), as_int("seed", seed)
        if self.count < 0:
            raise ValueError(f"count={count}, expected 0 or more")
        self.identity = [[self.count]]  # with seed and `shuffle`, this determines the order
        self.shuffle = shuffle

    def __call__(self, epoch: int, positions: Any) -> Array:
        """Return the sample indices, int64 `[N]`, at positions of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            positions: Integers `[N]`, each in `[0, count)`: a range, a sequence or an array. N may be 0.

        Raises:
            IndexError: A position is out of range.
            TypeError: `epoch` is not an integer, or `positions` is a single number.

        Memory: a new array.
        """
        places, epoch = _places(positions, self.count), as_int("epoch", epoch)
        if not self.shuffle or self.count < 2:
            return places
        bits = (self.count - 1).bit_length()
        result = _permute(places, bits, self.seed, epoch)
        outside = np.flatnonzero(result >= self.count)
        # on average, fewer than half remain each time, because the power of two is below twice the count
        while len(outside):
            again = _permute(result[outside], bits, self.seed, epoch)
            result[outside] = again
            outside = outside[again >= self.count]
        return result


class BlockOrder:
    """The order of samples: blocks in random order, shuffled within windows.

    `sizes` contains the number of samples in each block, which is a shard. Successive samples come from few blocks, which suits
    remote shards. Like `EpochOrder`, the order is a pure function.
    """

    def __init__(self, sizes: Sequence[int], *, window: int = 4096, seed: int = 0) -> None:
        if not 1 <= window < 1 << 63:
            raise ValueError(f"window={window}, expected 1 or more, and less than 2^63")
        self._sizes = np.array(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.count = int(self._sizes.sum())
        self.identity = [self._sizes, [window]]
        self.window = window
        self.seed = seed
        self._blocks: tuple[int, Array, Array] | None = None

    def __call__(self, epoch: int, positions: Any) -> Array:
        places = _places(positions, self.count)
        kept = self._blocks  # read once, because another thread may replace it
        if kept is None or kept[0] != epoch:
            blocks = EpochOrder(len(self._sizes), seed=self.seed)(epoch, range(len(self._sizes)))
            kept = self._blocks = epoch, blocks, np.cumsum(self._sizes[blocks])
        _, blocks, ends = kept
        windows, inside = places // self.window, places % self.window
        for window in np.unique(windows).tolist():
            which = windows == window
            width = min(self.window, self.count - window * self.window)
            order = EpochOrder(width, seed=stream_seed(self.seed, "window", window))
            mixed = order(epoch, inside[which])
            places[which] = window * self.window + mixed
        at = np.searchsorted(ends, places, "right")
        block = blocks[at]
        result: Array = self._starts[block] + places - (ends[at] - self._sizes[block])
        return result


def _places(positions: Any, count: int) -> Array:
    numbers = np.asarray(positions)
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise TypeError(f"positions={positions!r:.100}, expected a sequence of ints")
    places: Array = numbers.astype(np.int64)
    if len(places) and (int(places.min()) < 0 or int(places.max()) >= count):
        raise IndexError(f"positions {places.min()} to {places.max()} out of range [0, {count})")
    return places


@lru_cache(maxsize=32)
def _round_tables(seed: int, epoch: int, bits: int) -> list[Array]:
    """Return the round function's results in each round, for all inputs."""
    low, high = np.arange(1 << bits // 2, dtype=np.uint64), np.arange(1 << bits - bits // 2, dtype=np.uint64)
    pairs = zip([low, high] * (_ROUNDS // 2), [high, low] * (_ROUNDS // 2), round_keys(seed, epoch), strict=True)
    return [_round(half, len(other).bit_length() - 1, key) for half, other, key in pairs]


def _round(half: Array, bits: int, key: np.uint64) -> Array:
    """Apply the round function to one half; return int64 in `[0, 2^bits)`."""
    result: Array = (finalize(half ^ key) & np.uint64((1 << bits) - 1)).astype(np.int64)
    return result


def _permute(values: Array, bits: int, seed: int, epoch: int) -> Array:
    # the two halves swap in each round, and may differ in width by one bit
    low_bits, high_bits = bits // 2, bits - bits // 2
    low, high = values & (1 << low_bits) - 1, values >> low_bits
    if high_bits <= _TABLE_BITS:
        for table in _round_tables(seed, epoch, bits):
            high, low = low, high ^ table[low]
    else:
        for key in round_keys(seed, epoch):
            high, low = low, high ^ _round(low.astype(np.uint64), high_bits, key)
            low_bits, high_bits = high_bits, low_bits
    joined: Array = high << bits // 2 | low
    return joined
