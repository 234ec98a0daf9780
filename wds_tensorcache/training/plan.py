"""The samples of each training step, computed from a few integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.storage.threads import computed_once
from wds_tensorcache.training.weights import Weights, cumulate, draw

Array = np.ndarray[Any, Any]
# limit of `set_epoch`; even after twice as many epochs, passes and positions fit into int64
MAX_EPOCHS = 1 << 31
_VERSION = 2  # version of states; version 1 had other orders, seeds and weights
_WINDOW = 4096  # positions of a stream to compute at once
_KEYS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two steps of training, counted over all ranks."""

    epoch: int  # of the next step, from 0
    counts: tuple[int, ...]  # used samples of each stream: in this epoch, or in all epochs with a weighted `mix`
    used: int = 0  # samples used in this epoch
    step: int = 0  # steps so far, in all epochs
    began: int = 0  # steps before this epoch


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One rank's batch in one step, as sent to worker processes.

    Attributes:
        number: Number of preceding steps, in all epochs.
        epoch: Epoch of the step.
        stream: Number of the stream (see `Plan`) of the samples.
        indices: Sample indices in the cache, int64 `[B]`.
        is_padding: True for each sample that is padding, bool `[B]`.
        source: Number of the samples' cache in `mix`; 0 without `mix`.
        epochs: The epoch; with several passes in an epoch, by a weighted `mix` or `repeats`, the number of each sample's pass,
            int64 `[B]`.
    """

    number: int
    epoch: int
    stream: int
    indices: Array
    is_padding: Array
    source: int
    epochs: int | Array


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
        sources: The same counts for each bucket, or each cache of `mix`, by `info.source`. Empty if there is only one, and
            with weights, where steps are drawn at random.
    """

    num_samples: int
    num_rows: int
    num_padding: int = 0
    num_repeated: int = 0
    num_dropped: int = 0
    sources: dict[Any, RowCounts] = field(default_factory=dict, repr=False)


class Stream:
    """The samples of one cache or one bucket. An epoch passes over these samples `repeats` times.

    Attributes:
        members: Sample indices in the cache; None for all samples.
        name: Name of the stream, as in `info.source`.
        source: Number of the cache.
        count: Number of samples in a pass.
        identity: Numbers that determine the order, besides seed and `shuffle`.
    """

    def __init__(
        self, order: Any, members: Array | None = None, *, name: Any = None, source: int = 0, repeats: int = 1
    ) -> None:
        self._order = order
        self.members, self.name, self.source, self.repeats = members, name, source, repeats
        self.count = int(order.count)
        self.identity = [*order.identity, [] if members is None else members]
        self._window: tuple[int, int, Array] = -1, -1, np.empty(0, np.int64)  # pass, window, sample indices

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the sample indices at positions of an epoch. Positions after its end belong to the passes that follow."""
        first, highest = epoch * self.repeats, positions.max()
        if highest < self.count:
            return self._indices_in(first, positions, highest)
        passes, positions = np.divmod(positions, self.count)
        indices = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            part = positions[passes == number]
            indices[passes == number] = self._indices_in(first + number, part, part.max())
        return indices

    def _indices_in(self, number: int, positions: Array, highest: int) -> Array:
        # the window around the positions is computed as a whole, and kept
        window = positions.item(0) // _WINDOW
        begin, end = window * _WINDOW, min(window * _WINDOW + _WINDOW, self.count)
        if positions.min() < begin or highest >= end:
            return self._compute(number, positions)
        kept = self._window  # read once, because another thread may replace it
        if kept[:2] != (number, window):
            kept = self._window = number, window, self._compute(number, np.arange(begin, end))
        indices: Array = kept[2][positions - begin]
        return indices

    def _compute(self, number: int, positions: Array) -> Array:
        indices: Array = self._order(number, positions)
        return indices if self.members is None else np.take(self.members, indices)


class Plan:
    """The steps of all epochs, computed from positions.

    A stream is a cache, or one bucket of a cache. The next step's stream is drawn:

    - Without weights, in proportion to the numbers of samples that remain. Each epoch exhausts all streams, `repeats` times.
      Unless samples are shuffled, the draws are the same in each epoch.
    - With weights of samples, in proportion to the sum of the weights of its samples.
    - With weights of caches, first the cache by its weight, then one of its buckets. A cache passes over all its buckets before
      any of them begins another pass. Only the end of a bucket is filled from its next pass. If the cache's samples also have
      weights, the bucket is drawn in proportion to the sum of its weights. Its samples are drawn in proportion to their
      weights.

    With weights, an epoch has as many samples as all streams together, rounded to whole steps. Another plan can load a state
    of this plan only if it has the same `settings`, a dict for JSON.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        streams: Sequence[Stream],
        weights: Weights,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        last_batch: str,
        seed: int,
        settings: dict[str, Any],
    ) -> None:
        self.caches, self.streams, self.weights = list(caches), list(streams), weights
        self.batch_size, self.last_batch, self.seed = batch_size, last_batch, seed
        self._draws_seed = stream_seed(seed, "streams")
        self._is_shuffled = bool(settings["shuffle"])
        self._lengths = [stream.count * stream.repeats for stream in streams]  # samples of each stream in an epoch
        self._streams_of = [
            [number for number, stream in enumerate(streams) if stream.source == source]
            for source in range(len(caches))
        ]
        order = xxhash.xxh3_64()
        for part in chain.from_iterable(stream.identity for stream in streams):
            order.update(np.ascontiguousarray(part, np.int64).tobytes() + b";")
        self.settings = settings | {"order": order.hexdigest()}
        self.set_rank(rank, world_size)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Change the rank and the number of ranks; positions stay valid."""
        self.rank, self.world_size = rank, world_size
        self.step_size = self.batch_size * world_size
        self._rows = rank + world_size * np.arange(self.batch_size)  # selects this rank's samples of a step

    @property
    def num_samples(self) -> int:
        return sum(stream.count for stream in self.streams)

    @computed_once
    def dataset(self) -> str:
        """The identity of the samples, which a state contains. It has their number, and a hash of their keys in order."""
        digest = xxhash.xxh3_128()
        for cache in self.caches:
            digest.update(b"%d," % len(cache))
            keys = iter(cache.keys())
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                digest.update("\0".join([*part, ""]).encode("utf-8", "surrogateescape"))
        return f"{sum(map(len, self.caches))} samples, keys {digest.hexdigest()}"

    @property
    def start(self) -> Position:
        return Position(0, (0,) * len(self.streams))

    def next_epoch(self, at: Position) -> Position:
        counts = at.counts if self.weights.caches is not None else (0,) * len(at.counts)
        return replace(at, epoch=at.epoch + 1, counts=counts, used=0, began=at.step)

    def end(self, epoch: int, following: Position) -> Position:
        """Return the position after the last step of an epoch. `following` is the start of the next epoch."""
        counts = following.counts if self.weights.caches is not None else tuple(self._lengths)
        return replace(following, epoch=epoch, counts=counts, used=sum(self._lengths))

    def settle(self, at: Position) -> Position:
        """Return `at`, or the next epoch's start if its epoch is over."""
        return self.next_epoch(at) if self.is_over(at) else at

    def num_steps(self, at: Position | None = None) -> int:
        """Return the number of steps from a position to its epoch's end. By default, count a whole epoch."""
        extra = 0 if self.last_batch == "drop" else self.step_size - 1
        return sum((count + extra) // self.step_size for count in self.remaining(self.start if at is None else at))

    def count_rows(self) -> RowCounts:
        if self.weights.are_used:
            return RowCounts(sum(self._lengths), self.num_steps() * self.step_size)
        sources = {stream.name: self._rows_of(size) for stream, size in zip(self.streams, self._lengths, strict=True)}
        counts: Any = map(sum, zip(*(astuple(rows)[:-1] for rows in sources.values()), strict=True))
        return replace(RowCounts(*counts), sources=sources if len(sources) > 1 else {})

    def _rows_of(self, length: int) -> RowCounts:
        if self.last_batch == "drop":
            num_rows = length - length % self.step_size
            return RowCounts(length, num_rows, num_dropped=length - num_rows)
        missing = -length % (self.world_size if self.last_batch == "short" else self.step_size)
        repeated = missing if self.last_batch == "wrap" else 0
        return RowCounts(length, length + missing, missing - repeated, repeated)

    def is_over(self, at: Position) -> bool:
        return not any(self.remaining(at))

    def remaining(self, at: Position) -> list[int]:
        """Return the number of samples left in each stream, 0 if dropped. With weights, return only their sum."""
        least = self.step_size if self.last_batch == "drop" else 1
        if self.weights.are_used:
            counts = [sum(self._lengths) - at.used]
        else:
            counts = [length - count for length, count in zip(self._lengths, at.counts, strict=True)]
        return [count if count >= least else 0 for count in counts]

    def step(self, at: Position) -> tuple[Step, Position]:
        """Return the step at a position, and the position after it. The epoch must not be over."""
        is_mixed = self.weights.caches is not None
        number, count, rows = self._next_stream(at), self.step_size, self._rows
        stream, begin = self.streams[number], at.counts[number]
        positions, epoch = begin + rows, 0 if is_mixed else at.epoch
        is_drawn = stream.source in self.weights.samples
        if is_drawn:
            indices = self.weights.draw(number, epoch, positions)
        elif is_mixed or (remaining := self._lengths[number] - begin) >= count:
            indices = stream.indices(epoch, positions)
        else:
            count = remaining
            if self.last_batch == "short":
                rows = rows[: -(-count // self.world_size)]
            filler = (rows - count) % self._lengths[number] if self.last_batch == "wrap" else begin + rows % count
            positions = np.where(rows < count, begin + rows, filler)
            indices = stream.indices(epoch, positions)
        # samples that occur in several passes of an epoch have other seeds and choices in each
        has_passes = is_mixed or (stream.repeats > 1 and not is_drawn)
        epochs = epoch * stream.repeats + positions // stream.count if has_passes else at.epoch
        is_padding = (rows >= count) & (self.last_batch != "wrap")
        counts = (*at.counts[:number], begin + count, *at.counts[number + 1 :])
        after = Position(at.epoch, counts, at.used + count, at.step + 1, at.began)
        return Step(at.step, at.epoch, number, indices, is_padding, stream.source, epochs), after

    def _next_stream(self, at: Position) -> int:
        if len(self.streams) == 1:
            return 0
        caches, samples = self.weights.caches, self.weights.samples
        if not self.weights.are_used:
            return self._draw_stream(self.remaining(at), at.epoch if self._is_shuffled else 0, at.used)
        if caches is None:
            return self._draw_stream(samples[0].totals, at.epoch, at.used)
        source = self._draw_stream(caches, 0, at.step)
        numbers = self._streams_of[source]
        if source in samples:
            return numbers[self._draw_stream(samples[source].totals, 1, at.step)]
        counts, lengths = [at.counts[number] for number in numbers], [self.streams[number].count for number in numbers]
        begun = 1 + min(count // length for count, length in zip(counts, lengths, strict=True))
        missing = [max(0, begun * length - count) for count, length in zip(counts, lengths, strict=True)]
        return numbers[self._draw_stream(missing, 1, at.step)]

    def _draw_stream(self, weights: Sequence[float] | Array, epoch: int, position: int) -> int:
        if len(weights) == 1:
            return 0
        return int(draw(cumulate(np.array(weights, np.float64)), self._draws_seed, epoch, np.array([position])).item())

    def state(self, at: Position) -> dict[str, Any]:
        """Return the state at a position, with the current weights, for JSON."""
        return {
            "version": _VERSION,
            "position": asdict(at) | {"counts": list(at.counts)},
            "settings": dict(self.settings),
            "dataset": self.dataset,
            "weights": self.weights.state(),
        }

    def load(self, state: Mapping[str, Any]) -> Position:
        """Load a state's weights, and return its position. If the state does not fit, raise ValueError and change nothing."""
        version = state.get("version") if isinstance(state, Mapping) else None
        if version == 1:
            raise ValueError(
                "the state has version 1, which has the samples in another order. Either finish the epoch with the code that "
                "wrote the state, or leave the state out, and call set_epoch to begin an epoch anew"
            )
        if version != _VERSION:
            raise ValueError(f"expected a loader's state of version {_VERSION}, got {state!r:.200}")
        missing = {"dataset", "settings", "position", "weights"} - set(state)
        if missing or not isinstance(state["settings"], Mapping):
            raise ValueError(f"the state of a loader is damaged: it lacks {', '.join(sorted(missing)) or 'settings'}")
        if state["dataset"] != self.dataset:
            raise ValueError(
                f"the state belongs to a different dataset: {state['dataset']!s:.200}; this loader has {self.dataset}. "
                "If samples were only added, a loader of a view without them can load the state"
            )
        for name in {**self.settings, **state["settings"]}:
            saved, value = state["settings"].get(name), self.settings.get(name)
            if saved != value:
                changed = ": its buckets, shards or window have changed" if name in ("streams", "order") else ""
                changed = "; mode lists which of weights=, mix= and bucket_by= it has" if name == "mode" else changed
                raise ValueError(
                    f"the state belongs to a loader with {name}={saved!r:.200}, but this one has {name}={value!r:.200}{changed}"
                )
        position = self._parse_position(state["position"])
        self.weights.load(state["weights"])
        return position

    def _parse_position(self, at: Any) -> Position:
        if isinstance(at, Mapping) and set(at) == set(Position.__slots__) and isinstance(at["counts"], (list, tuple)):
            position = Position(**{**at, "counts": tuple(at["counts"])})
            numbers = (position.epoch, position.used, position.step, position.began, *position.counts)
            is_valid = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
            is_valid = is_valid and len(position.counts) == len(self.streams) and position.began <= position.step
            has_sum = self.weights.caches is not None or sum(position.counts) == position.used
            if is_valid and has_sum and position.epoch < 2 * MAX_EPOCHS:
                return position
        raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")
