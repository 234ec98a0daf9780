"""Which samples each step of training has: a pure function of where one stands, which is a few integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wds_tensorcache.training.order import uniform

__all__ = ["Course", "Drawn", "Permuted", "Position", "Step"]

Array = np.ndarray[Any, Any]
_WINDOW = 4096
_CHOICE = 0x5EED  # so that choices of a stream are independent of the orders in them


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands, on all ranks together.

    Attributes:
        epoch: Begins at 0.
        counts: How many samples of each stream were used: in this epoch, or ever where streams are mixed.
        used: How many samples this epoch has had.
        step: How many steps there were in all epochs.
        began: How many there were before this epoch.
    """

    epoch: int
    counts: tuple[int, ...]
    used: int = 0
    step: int = 0
    began: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One batch on each rank.

    Attributes:
        stream: Which one it is of.
        numbers: Of this rank's samples, int64 `[batch_size]`.
        is_padding: Which of them are there only to fill the batch, bool of the same length.
        at, after: Where training stands before it and after it, on all ranks together.
    """

    stream: int
    numbers: Array
    is_padding: Array
    at: Position
    after: Position


class Permuted:
    """Each sample once in every epoch: all in `order`, or those of `members`."""

    def __init__(self, order: Any, members: Array | None = None) -> None:
        self._order = order
        self._members = members
        self._known: tuple[int, int, Array] | None = None  # an epoch, a window of it, and what is there

    def __len__(self) -> int:
        return int(self._order.count)

    def numbers(self, epoch: int, positions: Array) -> Array:
        """Return the samples at positions of an epoch; those of steps to come are computed with them, which costs as much."""
        window = int(positions[0]) // _WINDOW
        begin = window * _WINDOW
        if int(positions.min()) < begin or int(positions.max()) >= begin + _WINDOW:
            return self._compute(epoch, positions)
        if self._known is None or self._known[:2] != (epoch, window):
            end = min(begin + _WINDOW, len(self))
            self._known = epoch, window, self._compute(epoch, np.arange(begin, end))
        found: Array = self._known[2][positions - begin]
        return found

    def identity(self) -> list[Any]:
        """Return what the order depends on besides the seed."""
        return [*self._order.identity, [] if self._members is None else self._members]

    def _compute(self, epoch: int, positions: Array) -> Array:
        found: Array = self._order(epoch, positions)
        return found if self._members is None else np.take(self._members, found)


class Drawn:
    """Samples drawn with replacement, in proportion to their weights."""

    def __init__(self, weights: Array, seed: int) -> None:
        self._sums = np.cumsum(weights / weights.max())  # so that no sum is infinite
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sums)

    def numbers(self, epoch: int, positions: Array) -> Array:
        """Return the samples that are drawn at positions of an epoch."""
        drawn = uniform(self._seed, epoch, positions) * self._sums[-1]
        found: Array = np.searchsorted(self._sums, drawn, "right")
        # rounding must not choose one of weight 0
        kept: Array = np.minimum(found, np.flatnonzero(np.diff(self._sums, prepend=0))[-1])
        return kept


class Course:
    """The steps of all epochs.

    Args:
        streams: Of samples; a step has those of one stream.
        batch_size: Samples of a step on each rank.
        rank, world_size: Which of a step's samples are this process's: every `world_size`-th.
        last: `"pad"`, `"drop"` or `"wrap"`: what becomes of a stream's last step, which has not so many.
        seed: Of what is chosen at random.
        weights: Returns the weights in proportion to which streams are mixed at a step, each beginning again when it is
            over; None for streams that are all used up in each epoch, the larger the sooner.
    """

    def __init__(
        self,
        streams: Sequence[Any],
        batch_size: int,
        rank: int,
        world_size: int,
        last: str,
        seed: int,
        weights: Callable[[int], Any] | None = None,
    ) -> None:
        self._streams = list(streams)
        self._size = batch_size * world_size
        self._mine = rank + world_size * np.arange(batch_size)  # of a step's samples
        self._last = last
        self._seed = seed
        self._weights = weights
        self._count = sum(map(len, self._streams))

    @property
    def start(self) -> Position:
        """Where training begins."""
        return Position(0, (0,) * len(self._streams))

    def has(self, at: Position) -> bool:
        """Return whether training can stand there."""
        if len(at.counts) != len(self._streams) or at.began > at.step:
            return False
        return self._weights is not None or sum(at.counts) == at.used

    def next_epoch(self, at: Position) -> Position:
        """Return the beginning of the next epoch."""
        counts = at.counts if self._weights else (0,) * len(at.counts)
        return replace(at, epoch=at.epoch + 1, counts=counts, used=0, began=at.step)

    def num_steps(self) -> int:
        """Return how many steps an epoch has."""
        counts = [self._count] if self._weights else list(map(len, self._streams))
        return sum(count // self._size if self._last == "drop" else -(-count // self._size) for count in counts)

    def is_over(self, at: Position) -> bool:
        """Return whether an epoch has no further step."""
        if self._weights is None:
            return not any(self._left(at))
        return at.used >= (self._count // self._size * self._size if self._last == "drop" else self._count)

    def _left(self, at: Position) -> list[int]:
        """Return how many samples of each stream are left for steps of an epoch."""
        least = self._size if self._last == "drop" else 1
        left = [len(stream) - count for stream, count in zip(self._streams, at.counts, strict=True)]
        return [count if count >= least else 0 for count in left]

    def step(self, at: Position, drawn: Drawn | None = None) -> Step:
        """Return the step at a position where the epoch is not over.

        Args:
            drawn: What stands for the only stream.
        """
        if self._weights is not None:
            return self._mixed(at, self._weights(at.step))
        left = self._left(at)
        number = self._choose(left, at.epoch, at.used)
        stream, begin, mine = self._streams[number], at.counts[number], self._mine
        if drawn is not None:
            stream, count, positions = drawn, self._size, begin + mine
        else:
            count = min(self._size, left[number])
            filler = begin + mine % count if self._last == "pad" else (mine - count) % len(stream)
            positions = np.where(mine < count, begin + mine, filler)
        is_padding = (mine >= count) & (self._last == "pad")
        return Step(number, stream.numbers(at.epoch, positions), is_padding, at, self._after(at, number, count))

    def _mixed(self, at: Position, weights: Any) -> Step:
        number = self._choose(weights, 0, at.step)
        stream = self._streams[number]
        epochs, positions = np.divmod(at.counts[number] + self._mine, len(stream))
        parts = [stream.numbers(epoch, positions[epochs == epoch]) for epoch in np.unique(epochs).tolist()]
        is_padding = np.zeros(len(positions), np.bool_)
        return Step(number, np.concatenate(parts), is_padding, at, self._after(at, number, self._size))

    def _choose(self, weights: Sequence[float], epoch: int, position: int) -> int:
        """Return a stream, in proportion to the weights."""
        if len(weights) == 1:
            return 0
        return int(Drawn(np.array(weights, np.float64), self._seed ^ _CHOICE).numbers(epoch, np.array([position]))[0])

    def _after(self, at: Position, number: int, count: int) -> Position:
        counts = tuple(used + count * (at == number) for at, used in enumerate(at.counts))
        return replace(at, counts=counts, used=at.used + count, step=at.step + 1)
