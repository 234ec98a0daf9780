"""The samples of each training step: a pure function of the position, which is a few integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.weights import Drawn, Weights

__all__ = ["MAX_BATCH", "MAX_EPOCHS", "MAX_STEP", "Course", "Permuted", "Position", "RowCounts", "Step"]

Array = np.ndarray[Any, Any]
# with these limits and MAX_REPEATS, no position and no number of a pass over a dataset is beyond int64
MAX_EPOCHS = 1 << 31  # for `set_epoch`; training may continue up to twice as many
MAX_BATCH = 1 << 31  # samples of one rank
MAX_STEP = 1 << 62  # samples of all ranks
_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two steps of training, counted over all ranks.

    Attributes:
        epoch: Epoch of the next step, from 0.
        counts: Number of used samples of each stream (see `Course`): in this epoch, or in all epochs
            with a weighted `mix`.
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
        source: Number of the samples' cache in `mix`; 0 without `mix`.
        epochs: Number of the pass over the dataset to which each sample belongs, int64 `[B]`; None unless an epoch can have
            several passes, with a weighted `mix` or with `repeats`.
    """

    number: int
    epoch: int
    stream: int
    indices: Array
    is_padding: Array
    source: int = 0
    epochs: Array | None = None

    def cache_of(self, caches: Sequence[Any]) -> Any:
        """Return the cache of the samples."""
        return caches[self.source]


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows in the batches of one epoch, over all ranks.

    `num_rows` is `num_samples - num_dropped + num_padding + num_repeated`. With weights, it is `num_samples` rounded
    to whole steps, and the other counts are 0.

    Attributes:
        num_samples: Number of samples of the epoch; a dataset with `repeats=10` counts 10 times.
        num_rows: Number of rows in all batches.
        num_padding: Number of rows that `info.is_padding` marks, with `last_batch="short"` or `"pad"`.
        num_repeated: Number of rows that `last_batch="wrap"` fills with samples of the same epoch.
        num_dropped: Number of samples that `last_batch="drop"` leaves out.
        sources: The same counts for each bucket, or each cache of `mix`, by `info.source`. Empty with weights, where steps
            are drawn at random.
    """

    num_samples: int
    num_rows: int
    num_padding: int = 0
    num_repeated: int = 0
    num_dropped: int = 0
    sources: dict[Any, RowCounts] = field(default_factory=dict, repr=False)

    def _costs(self) -> str:
        """Return the padded, repeated and dropped rows as text for a repr, for example `, padding=1188 of 2688 rows (44%)`."""
        text = ""
        for name in ("padding", "repeated", "dropped"):
            of = "samples" if name == "dropped" else "rows"
            count, total = getattr(self, f"num_{name}"), getattr(self, f"num_{of}")
            text += f", {name}={count} of {total} {of} ({count / total:.0%})" if count else ""
        return text


class Permuted:
    """A stream of the samples `members` of one cache, or of all its samples, in passes over all of them.

    Each pass has every sample once; if samples are shuffled, in a new order.

    Attributes:
        members: Sample indices in the cache; None for all samples.
        name: Name of the stream, as in `info.source`.
        source: Number of the cache.
        repeats: Number of passes in an epoch.
    """

    def __init__(
        self, order: Any, members: Array | None = None, *, name: Any = None, source: int = 0, repeats: int = 1
    ) -> None:
        self._order = order
        self.members, self.name, self.source, self.repeats = members, name, source, repeats
        self._windows: dict[tuple[int, int], Array] = {}  # the last two windows, by pass and number

    def __len__(self) -> int:
        return int(self._order.count)

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the sample indices at positions of an epoch; positions after its end belong to the passes that follow."""
        first, highest = epoch * self.repeats, positions.max()
        if highest < len(self):
            return self._indices_in(first, positions, highest)
        passes, positions = np.divmod(positions, len(self))
        found = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            some = positions[passes == number]
            found[passes == number] = self._indices_in(first + number, some, some.max())
        return found

    def _indices_in(self, number: int, positions: Array, highest: int) -> Array:
        """Return the sample indices at positions of a pass. The whole window around them is computed at once, and kept."""
        window = positions.item(0) // _WINDOW
        begin, end = window * _WINDOW, min(window * _WINDOW + _WINDOW, len(self))
        if positions.min() < begin or highest >= end:
            return self._compute(number, positions)
        known = self._windows.get((number, window))
        if known is None:
            known = self._compute(number, np.arange(begin, end))
            # two windows: torch_loader computes a step for a worker, and again when its batch is returned
            self._windows = dict([*self._windows.items(), ((number, window), known)][-2:])
        found: Array = known[positions - begin]
        return found

    def identity(self) -> list[Any]:
        """Return what determines the order besides seed and `shuffle`."""
        return [*self._order.identity, [] if self.members is None else self.members]

    def _compute(self, number: int, positions: Array) -> Array:
        found: Array = self._order(number, positions)
        return found if self.members is None else np.take(self.members, found)


class Course:
    """The steps of all epochs, each with samples of one stream; see `StepSampler` for the arguments.

    A stream is a cache, or one bucket of a cache. The next step's stream is drawn:

    - Without weights, in proportion to the numbers of samples that remain. Each epoch exhausts all streams, `repeats` times.
      Unless samples are shuffled, the draws are the same in each epoch.
    - With weights of samples, in proportion to the sum of the weights of its samples.
    - With weights of caches, first the cache by its weight, then one of its buckets. A cache passes over all its buckets
      before any of them begins another pass, except that the end of a bucket is filled from its next pass. If its samples
      have weights, too, the bucket is drawn in proportion to their sums, and the samples are drawn.

    With weights, an epoch has as many samples as all streams together, rounded to whole steps.
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
        is_shuffled: bool,
    ) -> None:
        self._streams, self._weights = streams, weights
        self._lengths = [len(stream) * stream.repeats for stream in streams]  # in samples of an epoch
        self._num_samples = sum(self._lengths)
        self._streams_of = [
            [number for number, stream in enumerate(streams) if stream.source == source]
            for source in range(streams[-1].source + 1)
        ]
        self._batch_size = batch_size
        self._last_batch = last_batch
        self._seed = stream_seed(seed, "streams")
        self._is_shuffled = is_shuffled
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
        return self._weights.are_of_caches or sum(at.counts) == at.used

    def next_epoch(self, at: Position) -> Position:
        """Return the start of the next epoch."""
        counts = at.counts if self._weights.are_of_caches else (0,) * len(at.counts)
        return replace(at, epoch=at.epoch + 1, counts=counts, used=0, began=at.step)

    def num_steps(self, at: Position | None = None) -> int:
        """Return the number of steps in an epoch, or in the rest of a position's epoch."""
        extra = 0 if self._last_batch == "drop" else self.step_size - 1
        remaining = self._remaining(Position(0, (0,) * len(self._streams)) if at is None else at)
        return sum((count + extra) // self.step_size for count in remaining)

    def count_rows(self) -> RowCounts:
        """Return the numbers of rows in an epoch."""
        if self._weights.are_used:
            return RowCounts(self._num_samples, self.num_steps() * self.step_size)
        sources = {stream.name: self._rows_of(len(stream) * stream.repeats) for stream in self._streams}
        counts = {
            name: sum(getattr(each, name) for each in sources.values())
            for name in ("num_samples", "num_rows", "num_padding", "num_repeated", "num_dropped")
        }
        return RowCounts(**counts, sources=sources if len(sources) > 1 else {})

    def _rows_of(self, length: int) -> RowCounts:
        """Return the numbers of rows in an epoch of a stream of `length` samples."""
        rest = length % self.step_size
        missing = self.step_size - rest if rest else 0
        if self._last_batch == "short":
            missing = -rest % self.world_size
        if self._last_batch == "drop":
            return RowCounts(length, length - rest, num_dropped=rest)
        if self._last_batch == "wrap":
            return RowCounts(length, length + missing, num_repeated=missing)
        return RowCounts(length, length + missing, num_padding=missing)

    def is_over(self, at: Position) -> bool:
        """Return whether no step of the position's epoch remains."""
        return not any(self._remaining(at))

    def _remaining(self, at: Position) -> list[int]:
        """Return how many samples of the epoch remain in each stream, or with weights in all together; 0 if dropped."""
        least = self.step_size if self._last_batch == "drop" else 1
        if self._weights.are_used:
            counts = [self._num_samples - at.used]
        else:
            counts = [length - count for length, count in zip(self._lengths, at.counts, strict=True)]
        return [count if count >= least else 0 for count in counts]

    def step(self, at: Position) -> tuple[Step, Position]:
        """Return the step at a position, and the position after it; the epoch must not be over."""
        number, count, rows = self._next_stream(at), self.step_size, self._rows
        stream, begin = self._streams[number], at.counts[number]
        positions, epoch = begin + rows, 0 if self._weights.are_of_caches else at.epoch
        weights = self._weights.of_samples(stream.source)
        if weights is not None:
            bucket = number - self._streams_of[stream.source][0]
            drawn = weights.drawn(at.step, bucket).indices(epoch, positions)
            indices = drawn if stream.members is None else np.take(stream.members, drawn)
        elif self._weights.are_of_caches or (remaining := self._lengths[number] - begin) >= count:
            indices = stream.indices(epoch, positions)
        else:
            count = remaining
            if self._last_batch == "short":
                rows = rows[: -(-count // self.world_size)]
            filler = (rows - count) % self._lengths[number] if self._last_batch == "wrap" else begin + rows % count
            positions = np.where(rows < count, begin + rows, filler)
            indices = stream.indices(epoch, positions)
        # samples that occur in several passes of an epoch have other seeds and choices in each
        has_passes = self._weights.are_of_caches or (stream.repeats > 1 and weights is None)
        epochs = epoch * stream.repeats + positions // len(stream) if has_passes else None
        is_padding = (rows >= count) & (self._last_batch != "wrap")
        counts = (*at.counts[:number], begin + count, *at.counts[number + 1 :])
        after = Position(at.epoch, counts, at.used + count, at.step + 1, at.began)
        return Step(at.step, at.epoch, number, indices, is_padding, source=stream.source, epochs=epochs), after

    def _next_stream(self, at: Position) -> int:
        """Return the number of the stream of the step at a position."""
        if len(self._streams) == 1:
            return 0
        if not self._weights.are_used:
            return self._draw_stream(self._remaining(at), at.epoch if self._is_shuffled else 0, at.used)
        if not self._weights.are_of_caches:
            return self._draw_stream(self._weights.sums(at.step), at.epoch, at.used)
        source = self._draw_stream(self._weights.values(at.step), 0, at.step)
        numbers, weights = self._streams_of[source], self._weights.of_samples(source)
        if weights is not None:
            return numbers[self._draw_stream(weights.sums(at.step), 1, at.step) if len(numbers) > 1 else 0]
        counts, lengths = [at.counts[number] for number in numbers], [len(self._streams[number]) for number in numbers]
        begun = 1 + min(count // length for count, length in zip(counts, lengths, strict=True))
        missing = [max(0, begun * length - count) for count, length in zip(counts, lengths, strict=True)]
        return numbers[self._draw_stream(missing, 1, at.step)]

    def _draw_stream(self, weights: Sequence[float] | Array, epoch: int, position: int) -> int:
        """Return the number of a stream, drawn in proportion to the weights."""
        if len(weights) == 1:
            return 0
        drawn = Drawn(np.array(weights, np.float64), self._seed)
        return int(drawn.indices(epoch, np.array([position])).item(0))
