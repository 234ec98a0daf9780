"""The samples of each training step: a pure function of the position, which is a few integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wds_tensorcache.training.weights import Drawn, Weights

__all__ = ["Course", "Permuted", "Position", "Step"]

Array = np.ndarray[Any, Any]
_WINDOW = 4096
_CHOICE = 0x5EED  # makes the choice of a stream independent of the order of its samples


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two steps of training, counted over all ranks.

    Attributes:
        epoch: Epoch of the next step, from 0.
        counts: Number of used samples of each stream (see `Course`): in this epoch, or in all epochs for `mix`.
        used: Number of samples used in this epoch.
        step: Number of steps so far, in all epochs.
        began: Number of steps before this epoch.
    """

    epoch: int
    counts: tuple[int, ...]
    used: int = 0
    step: int = 0
    began: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One rank's batch in one step: all that a worker process needs to read it.

    Attributes:
        number: Number of preceding steps, in all epochs.
        epoch: Epoch of the step.
        stream: Number of the stream (see `Course`) of the samples.
        indices: Sample indices in the cache, int64 `[B]`.
        is_padding: True for each sample that is padding, bool `[B]`.
    """

    number: int
    epoch: int
    stream: int
    indices: Array
    is_padding: Array

    def cache_of(self, caches: Sequence[Any]) -> Any:
        """Return the cache of the samples: with `mix`, the cache of the step's stream, else the only cache."""
        return caches[self.stream % len(caches)]


class Permuted:
    """A stream of the samples `members`, or of all samples: each occurs once in every epoch, in the order `order`."""

    def __init__(self, order: Any, members: Array | None = None) -> None:
        self._order = order
        self._members = members
        self._windows: dict[tuple[int, int], Array] = {}  # the last two windows, by epoch and number

    def __len__(self) -> int:
        return int(self._order.count)

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the sample indices at positions of an epoch. The whole window around them is computed at once, and kept."""
        window = positions.item(0) // _WINDOW
        begin, end = window * _WINDOW, min(window * _WINDOW + _WINDOW, len(self))
        if positions.min() < begin or positions.max() >= end:
            return self._compute(epoch, positions)
        known = self._windows.get((epoch, window))
        if known is None:
            known = self._compute(epoch, np.arange(begin, end))
            # two windows: torch_loader computes a step for a worker, and again when its batch is returned
            self._windows = dict([*self._windows.items(), ((epoch, window), known)][-2:])
        found: Array = known[positions - begin]
        return found

    def identity(self) -> list[Any]:
        """Return what determines the order besides seed and `shuffle`."""
        return [*self._order.identity, [] if self._members is None else self._members]

    def _compute(self, epoch: int, positions: Array) -> Array:
        found: Array = self._order(epoch, positions)
        return found if self._members is None else np.take(self._members, found)


class Course:
    """The steps of all epochs, each with samples of one stream; see `StepSampler` for the arguments.

    A stream is the whole cache, one cache of `mix`, or one bucket. Each epoch exhausts all buckets; a step's bucket is chosen
    in proportion to the numbers of samples that remain. With `mix`, streams are chosen by their weights: an epoch has as many
    samples as all streams together, and an exhausted stream starts again.
    """

    def __init__(
        self,
        streams: Sequence[Permuted],
        weights: Weights,
        batch_size: int,
        rank: int,
        world_size: int,
        last_batch: str,
        seed: int,
    ) -> None:
        self._streams, self._weights = streams, weights
        lengths = list(map(len, streams))
        # number of samples in an epoch: of each stream, or of all mixed streams together
        self._lengths = [sum(lengths)] if weights.are_of_streams else lengths
        self._batch_size = batch_size
        self._last_batch = last_batch
        self._seed = seed
        self.set_rank(rank, world_size)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Change the rank of this process and the number of ranks; positions stay valid."""
        self.rank, self.world_size = rank, world_size
        self.step_size = self._batch_size * world_size
        self._rows = rank + world_size * np.arange(self._batch_size)  # selects this rank's samples of a step

    def has(self, at: Position) -> bool:
        """Return whether a position is possible in this course."""
        if len(at.counts) != len(self._streams) or at.began > at.step:
            return False
        return self._weights.are_of_streams or sum(at.counts) == at.used

    def next_epoch(self, at: Position) -> Position:
        """Return the start of the next epoch."""
        counts = at.counts if self._weights.are_of_streams else (0,) * len(at.counts)
        return replace(at, epoch=at.epoch + 1, counts=counts, used=0, began=at.step)

    def num_steps(self) -> int:
        """Return the number of steps in an epoch."""
        extra = 0 if self._last_batch == "drop" else self.step_size - 1
        return sum((length + extra) // self.step_size for length in self._lengths)

    def is_over(self, at: Position) -> bool:
        """Return whether no step of the position's epoch remains."""
        return not any(self._remaining(at))

    def _remaining(self, at: Position) -> list[int]:
        """Return how many samples of the epoch remain in each stream, or with `mix` in all streams together; 0 if dropped."""
        least = self.step_size if self._last_batch == "drop" else 1
        used = (at.used,) if self._weights.are_of_streams else at.counts
        counts = [length - count for length, count in zip(self._lengths, used, strict=True)]
        return [count if count >= least else 0 for count in counts]

    def step(self, at: Position) -> tuple[Step, Position]:
        """Return the step at a position, and the position after it; the epoch must not be over."""
        remaining, count = self._remaining(at), self.step_size
        if self._weights.are_of_streams:
            number = self._choose(self._weights.values(at.step), 0, at.step)
        else:
            number = self._choose(remaining, at.epoch, at.used)
        stream, begin, rows = self._streams[number], at.counts[number], self._rows
        if self._weights.are_of_streams:
            epochs, positions = np.divmod(begin + rows, len(stream))
            parts = [stream.indices(epoch, positions[epochs == epoch]) for epoch in np.unique(epochs).tolist()]
            indices = np.concatenate(parts)
        elif (drawn := self._weights.drawn(at.step)) is not None:
            indices = drawn.indices(at.epoch, begin + rows)
        elif remaining[number] >= count:
            indices = stream.indices(at.epoch, begin + rows)
        else:
            count = remaining[number]
            if self._last_batch == "short":
                rows = rows[: -(-count // self.world_size)]
            filler = (rows - count) % len(stream) if self._last_batch == "wrap" else begin + rows % count
            indices = stream.indices(at.epoch, np.where(rows < count, begin + rows, filler))
        is_padding = (rows >= count) & (self._last_batch != "wrap")
        counts = (*at.counts[:number], begin + count, *at.counts[number + 1 :])
        after = Position(at.epoch, counts, at.used + count, at.step + 1, at.began)
        return Step(at.step, at.epoch, number, indices, is_padding), after

    def _choose(self, weights: Sequence[float] | Array, epoch: int, position: int) -> int:
        """Return the number of a stream, chosen in proportion to the weights."""
        if len(weights) == 1:
            return 0
        drawn = Drawn(np.array(weights, np.float64), self._seed ^ _CHOICE)
        return int(drawn.indices(epoch, np.array([position])).item(0))
