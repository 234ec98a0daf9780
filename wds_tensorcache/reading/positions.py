"""Positions of a view's samples in its store, and their keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.shard import Shard

Array = np.ndarray[Any, Any]
Positions: TypeAlias = "range | Array"  # positions in the store; an array is int64
_SHARDS_AHEAD = 64  # shards whose indexes `in_order` loads at a time


def take(positions: Positions, numbers: Any) -> Positions:
    """Return the positions of a view's samples `numbers`. Only a slice of a range gives a range."""
    if isinstance(positions, range):
        if isinstance(numbers, slice):
            return positions[numbers]
        # in a whole cache, positions equal sample indices
        if (positions.start, positions.step) != (0, 1):
            numbers = numbers * positions.step + positions.start
        return numbers  # type: ignore[no-any-return]
    taken: Array = positions[numbers]
    # a copy, since a numpy view would keep all positions alive
    return taken.copy() if isinstance(numbers, slice) else taken


def as_array(positions: Positions) -> Array:
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return positions


def by_shard(store: Store, positions: Positions) -> Iterator[tuple[Shard, Any, Array]]:
    """Yield `(shard, indices into positions, rows)` for each shard of the positions.

    Shards come in their order. A row is the index of a sample among the samples of its shard that have the cache.
    """
    if isinstance(positions, range):
        runs = list(shard_runs(store, positions))
        store.load_indexes([at for at, _, _ in runs])
        for at, first, last in runs if positions.step > 0 else reversed(runs):
            yield store.shards[at], slice(first, last), as_array(positions[first:last]) - store.starts[at]
        return
    number = store.shard_numbers(positions)
    # sorted once, not searched for each shard; numpy uses a radix sort for short integers
    order = np.argsort(number, kind="stable") if bool((number[1:] < number[:-1]).any()) else slice(None)
    ordered = number[order]
    edges = _edges(ordered).tolist()
    present = ordered[edges[:-1]].tolist()
    store.load_indexes(present)
    for at, (first, last) in zip(present, pairwise(edges), strict=True):
        which = slice(first, last) if isinstance(order, slice) else order[first:last]
        yield store.shards[at], which, positions[which] - store.starts[at]


def shard_runs(store: Store, positions: Positions) -> Iterator[tuple[int, int, int]]:
    """Yield `(shard number, first, last)` for each run `positions[first:last]` in one shard."""
    if not isinstance(positions, range):
        numbers = store.shard_numbers(positions)
        yield from ((numbers.item(first), first, last) for first, last in pairwise(map(int, _edges(numbers))))
        return
    done = 0
    while done < len(positions):
        at = store.shard_number(positions[done])
        begin, end = store.starts.item(at), store.starts.item(at + 1)
        # distance to the edge of the shard in the direction of the step
        left = end - 1 - positions[done] if positions.step > 0 else positions[done] - begin
        last = min(done + left // abs(positions.step) + 1, len(positions))
        yield at, done, last
        done = last


def _edges(numbers: Array) -> Array:
    """Return the first index of each run of equal numbers, and `len(numbers)`."""
    return np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1], [True]])) if len(numbers) else numbers


def in_order(store: Store, positions: Positions) -> Iterator[tuple[Shard, Array]]:
    """Yield `(shard, rows)` for each run of positions in one shard."""
    runs = shard_runs(store, positions)
    while ahead := list(islice(runs, _SHARDS_AHEAD)):
        store.load_indexes([at for at, _, _ in ahead])
        for at, first, last in ahead:
            yield store.shards[at], as_array(positions[first:last]) - store.starts[at]


def numbers_of(indices: Iterable[int | str], count: int, find: Callable[[str], int]) -> Array:
    """Return sample indices for indices, keys or a mask, int64 in `[0, count)`.

    Indices may be negative. Raises IndexError or KeyError if a sample does not exist, and TypeError for anything but ints,
    keys or `count` bools.
    """
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise TypeError(f"indices must be a sequence of ints or keys, got {indices!r:.100}")
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy(force=True)
    indices = indices if isinstance(indices, (np.ndarray, list)) else list(indices)
    numbers = np.array(indices)  # a copy: the caller may change the array before values are decoded
    if numbers.dtype.kind in "UO":
        indices = [find(index) if isinstance(index, str) else index for index in indices]
        numbers = np.asarray(indices)
    if numbers.dtype == np.bool_ and numbers.shape == (count,):
        return np.flatnonzero(numbers)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and (len(numbers) or numbers.dtype == np.bool_)):
        raise TypeError(f"indices must be a sequence of ints or keys, or a mask of {count} bools, got {indices!r:.100}")
    if numbers.dtype != np.int64 or (len(numbers) and int(numbers.view(np.uint64).max()) >= count):
        wrong = (numbers < -count) | (numbers >= count)  # before the cast, which would wrap large unsigned integers
        if wrong.any():
            at = int(np.argmax(wrong))
            raise IndexError(f"indices[{at}] = {numbers[at]} out of range [0, {count})")
        numbers = numbers.astype(np.int64)
        numbers = np.where(numbers < 0, numbers + count, numbers)
    return numbers


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers of `range(count)`, from 0 on."""
    most = min(count, most)
    return [count * number // most for number in range(most)]


@dataclass(frozen=True, slots=True, repr=False)
class KeysView(Sequence[str]):
    """The keys of a cache in sample order, each decoded on access."""

    _cache: Any

    def __len__(self) -> int:
        return len(self._cache)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> KeysView: ...
    def __getitem__(self, index: int | slice) -> str | KeysView:
        if isinstance(index, slice):
            return KeysView(self._cache[index])
        key: str = self._cache._store.key(self._cache._at(range(len(self))[index]))
        return key

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the index of the first sample whose key is `value`. With `start` or `stop`, the keys are searched.

        Raises:
            ValueError: No sample in the range has the key.
        """
        if value not in self:
            raise ValueError(f"no sample {value!r:.100} among the {len(self)} samples")
        if (start, stop) == (0, None):
            with contextlib.suppress(KeyError):  # samples of several shards have the key
                number: int = self._cache._find(value)
                return number
        return Sequence.index(self, value, start, len(self) if stop is None else stop)

    def __iter__(self) -> Iterator[str]:
        for shard, rows in in_order(self._cache._store, self._cache._where):
            keys, samples = shard.index.keys, shard.columns.rows
            if shard.index.has_names:
                yield from map(shard.key, rows.tolist())
            elif samples is None and len(rows) == len(keys) and bool((rows[1:] > rows[:-1]).all()):
                yield from keys
            else:
                yield from map(keys.__getitem__, (rows if samples is None else samples[rows]).tolist())

    def __repr__(self) -> str:
        return f"KeysView({len(self)} keys)"
