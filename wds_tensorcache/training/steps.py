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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One batch of one rank: all that a worker process needs to read it.

    Attributes:
        number: Number of steps before it, in all epochs.
        epoch: Epoch of the step.
        stream: Number of the mixed cache, or of the bucket, that the samples are from; 0 if there is one stream.
        indices: Sample indices in the cache, int64 `[B]`.
        is_padding: Rows that only fill the batch, bool `[B]`.
    """

    number: int
    epoch: int
    stream: int
    indices: Array
    is_padding: Array

    def cache_of(self, caches: Sequence[Any]) -> Any:
        """Return the cache that the samples are from: each stream has its own, or all have the only one."""
        return caches[self.stream % len(caches)]


class Permuted:
    """Each sample once in every epoch: all in `order`, or those of `members`."""

    def __init__(self, order: Any, members: Array | None = None) -> None:
        self._order = order
        self._members = members
        self._known: dict[tuple[int, int], Array] = {}  # the last two windows, by epoch and number

    def __len__(self) -> int:
        return int(self._order.count)

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the samples at positions of an epoch; those of steps to come are computed with them, which costs as much."""
        window = int(positions[0]) // _WINDOW
        begin = window * _WINDOW
        if int(positions.min()) < begin or int(positions.max()) >= begin + _WINDOW:
            return self._compute(epoch, positions)
        if (epoch, window) not in self._known:
            # two windows: steps are asked for when they are begun, and again when their batch is given
            self._known = dict(list(self._known.items())[-1:])
            end = min(begin + _WINDOW, len(self))
            self._known[epoch, window] = self._compute(epoch, np.arange(begin, end))
        found: Array = self._known[epoch, window][positions - begin]
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

    def indices(self, epoch: int, positions: Array) -> Array:
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
        last_batch: `"short"`, `"pad"`, `"wrap"` or `"drop"`: what becomes of a stream's last step, if it is not full.
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
        last_batch: str,
        seed: int,
        weights: Callable[[int], Any] | None = None,
    ) -> None:
        self._streams = list(streams)
        self._size = batch_size * world_size
        self._world_size = world_size
        self._mine = rank + world_size * np.arange(batch_size)  # of a step's samples
        self._last_batch = last_batch
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
        return sum(count // self._size if self._last_batch == "drop" else -(-count // self._size) for count in counts)

    def is_over(self, at: Position) -> bool:
        """Return whether an epoch has no further step."""
        if self._weights is None:
            return not any(self._left(at))
        return at.used >= (self._count // self._size * self._size if self._last_batch == "drop" else self._count)

    def _left(self, at: Position) -> list[int]:
        """Return how many samples of each stream are left for steps of an epoch."""
        least = self._size if self._last_batch == "drop" else 1
        left = [len(stream) - count for stream, count in zip(self._streams, at.counts, strict=True)]
        return [count if count >= least else 0 for count in left]

    def step(self, at: Position, drawn: Drawn | None = None) -> tuple[Step, Position]:
        """Return the step at a position where the epoch is not over, and the position after it.

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
            if self._last_batch == "short":
                mine = mine[: -(-count // self._world_size)]
            filler = (mine - count) % len(stream) if self._last_batch == "wrap" else begin + mine % count
            positions = np.where(mine < count, begin + mine, filler)
        is_padding = (mine >= count) & (self._last_batch != "wrap")
        return self._made(at, number, stream.indices(at.epoch, positions), is_padding, count)

    def _mixed(self, at: Position, weights: Any) -> tuple[Step, Position]:
        number = self._choose(weights, 0, at.step)
        stream = self._streams[number]
        epochs, positions = np.divmod(at.counts[number] + self._mine, len(stream))
        parts = [stream.indices(epoch, positions[epochs == epoch]) for epoch in np.unique(epochs).tolist()]
        return self._made(at, number, np.concatenate(parts), np.zeros(len(positions), np.bool_), self._size)

    def _choose(self, weights: Sequence[float], epoch: int, position: int) -> int:
        """Return a stream, in proportion to the weights."""
        if len(weights) == 1:
            return 0
        return int(Drawn(np.array(weights, np.float64), self._seed ^ _CHOICE).indices(epoch, np.array([position]))[0])

    def _made(self, at: Position, number: int, indices: Array, is_padding: Array, count: int) -> tuple[Step, Position]:
        """Return a step of `count` samples of a stream, on all ranks together, and the position after it."""
        counts = tuple(used + count * (stream == number) for stream, used in enumerate(at.counts))
        after = replace(at, counts=counts, used=at.used + count, step=at.step + 1)
        return Step(at.step, at.epoch, number, indices, is_padding), after
