"""A cache as a sequence of samples."""

from __future__ import annotations

import fnmatch
import glob
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.batch.assemble import fill_batch, read_batch, read_tensors
from wds_tensorcache.reading.batch.nest import project
from wds_tensorcache.reading.batch.request import Request, Structures
from wds_tensorcache.reading.batch.rows import locate
from wds_tensorcache.reading.keys import KeysView
from wds_tensorcache.reading.positions import Inverse, Positions, as_array, numbers_of, take
from wds_tensorcache.reading.schema import (
    Entry,
    TensorSchema,
    as_patterns,
    entries,
    members_of,
    name_matcher,
    schema_of,
)
from wds_tensorcache.reading.shard_set import Store

__all__ = ["TensorCache"]

Array = np.ndarray[Any, Any]
_MAX_VIEWS = 16


class TensorCache(Sequence[Any]):
    """The samples of one or many shards, by number and by key; each is read when it is asked for. Made by `tc.open`.

    `cache[i]` reads the skeleton alone and returns the nested sample that was written, with lazy tensors in it.
    `cache[a:b]`, `select` and `filter` return views, which share files and memory with the cache.

    Memory: 22 bytes per sample and its key; 8 more once something was looked up by key, unless keys ascend from shard to shard.
    Threads/fork/pickle: safe everywhere; a copy in another process opens the shards again, and raises FormatError for one that
        was changed or replaced since. `close`, or the end of a `with` block, closes files and threads of the cache and all its
        views; lazy tensors that were not loaded are lost then.
    """

    def __init__(self, store: Store, order: Positions | None = None, patterns: tuple[str, ...] | None = None) -> None:
        self._store = store
        everything = range(len(store))
        self._order = None if isinstance(order, range) and order == everything else order  # None: all
        self._where: Positions = everything if self._order is None else self._order
        self._inverse: Inverse | None = None
        self._patterns = patterns
        self._narrowed: dict[tuple[str, ...], TensorCache] = {}  # views for fill_batch
        self._wanted = name_matcher(patterns) if patterns is not None else None
        self._structures = Structures(self._wanted)

    def __reduce__(self) -> Any:
        return TensorCache, (self._store, self._order, self._patterns)

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample by number or key; a view for a slice, or for a list or array of numbers or keys, or a mask of bools.

        Raises:
            IndexError: The number is not in `[-len, len)`.
            TypeError: It is something else, or a mask of another length.
            KeyError: No sample, or more than one, has the key.
            FormatError: The shard is damaged, or not what its index says.
        """
        if isinstance(index, slice):
            return self._take(index)
        if isinstance(index, str):
            return self._sample(self._at(self._find(index)))
        if isinstance(index, list) or getattr(index, "ndim", 0) == 1:
            return self._take(numbers_of(index, len(self), self._find))
        count = len(self)
        if not hasattr(index, "__index__"):
            raise TypeError(f"a sample is named by number or key, got {index!r:.100}")
        number = operator.index(index)
        if not -count <= number < count:
            raise IndexError(f"index {number} out of range [0, {count})")
        return self._sample(self._at(number))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self._sample(self._at(number))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices` as a list; torch's DataLoader fetches batches with it."""
        positions = as_array(take(self._where, numbers_of(indices, len(self), self._find)))
        return [self._sample(position) for position in positions.tolist()]

    def __contains__(self, key: object) -> bool:
        """Return whether there is a sample with this key."""
        return isinstance(key, str) and bool(self._found(key))

    def keys(self) -> KeysView:
        """Return the keys in order, as a sequence that decodes each when it is asked for."""
        return KeysView(self)

    @property
    def schema(self) -> dict[str, TensorSchema]:
        """What tensors the samples have, by name: dtype, shape or its range, bytes, in how many samples."""
        wanted = self._wanted or (lambda name: True)
        return {k: v for k, v in schema_of(self._store, self._where).items() if wanted(k)}

    @property
    def io(self) -> Any:
        """How files are read, and why: `.method` is "auto", "mmap" or "pread", `.reason` a sentence."""
        return self._store.io

    @property
    def fingerprint(self) -> dict[str, Any]:
        """How the cache was made: the fields on which all of its shards agree."""
        return dict(self._store.fingerprint)

    @property
    def num_shards(self) -> int:
        """Number of shards behind this cache."""
        return len(self._store.shards)

    def select(self, patterns: Iterable[str]) -> TensorCache:
        """Return a view whose samples have only the tensors with names like one of `patterns` (`"cond.*"`, as in a shell).

        Other tensors are gone from dicts and None in lists and tuples; they are not read. Small values stay.

        Raises:
            KeyError: A pattern that no tensor's name matches.
            TypeError: They are no texts.
        """
        patterns = as_patterns(patterns)
        names = list(self.schema)
        for pattern in patterns:
            if names and not fnmatch.filter(names, pattern):
                raise KeyError(f"no tensor is called {pattern!r}; there are {', '.join(map(repr, names))}")
        if self._patterns is not None:
            patterns = tuple(glob.escape(name) for name in names if name_matcher(patterns)(name))
        return TensorCache(self._store, self._order, patterns)

    def filter(self, predicate: Callable[[Entry], Any]) -> TensorCache:
        """Return a view of the samples for which `predicate` is true; it is given what the index knows, no tensor is read.

        Args:
            predicate: Called with an entry: `.key`, `.nbytes` (bytes of its tensors) and `.shapes` (shape by tensor name).
        """
        kept = (number for number, entry in enumerate(self._entries()) if predicate(entry))
        return self._take(np.fromiter(kept, np.int64))

    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: Any = "stack",
        pad_value: Any = 0,
    ) -> Any:
        """Read samples as one batch, without decoding them one by one.

        Args:
            indices: Numbers or keys, in any order, also repeated.
            device: Where the tensors go; the CPU by default. A GPU gets them in one transfer from pinned memory.
            pin_memory: Put them into pinned memory.
            collate: `"stack"` gives tensors `[B, …]`; `"list"` lists of B tensors; `"pad"` tensors `[B, *largest shape]`.
                A function is called with the list of the B samples, their tensors loaded, and its result returned.
            pad_value: What `"pad"` fills with, texts and dates aside; a dict has the values of some tensors by name.

        Returns:
            The structure of the first sample, batched tensors in the places of its tensors; arrays are stacked as numpy arrays.
            Dicts keep their keys, lists and tuples are kept where a tensor is in them; everything else becomes a list-like
            of B values, decoded when it is first looked at. With `"pad"`, a pair of this and a dict: int64 `[B, ndim]` for
            each tensor name, the shapes before padding.

        Raises:
            IndexError, KeyError: A sample that is not there.
            BatchError: Shapes that differ under `"stack"`, dtypes or numbers of dimensions that differ; with two keys.
            FormatError: A shard is damaged, or not what its index says.
            RuntimeError: `device` is not there, or there is no GPU to pin memory for.

        Memory: one recycled arena for the batch, which is reused when the last tensor over it is gone; the cache keeps at
            most 1 GiB of idle arenas. Keep a clone of one small tensor rather than the tensor, which keeps the arena.
        """
        return read_batch(self._request(indices), device, pin_memory, collate, pad_value)

    def read_tensors(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str = "stack",
    ) -> dict[str, Any]:
        """Read the tensors of a batch alone, by name; otherwise as `read_batch`.

        Args:
            collate: `"stack"`, `"list"`, or `"auto"`: stacked where a tensor's shapes are equal, else a list.
        """
        return read_tensors(self._request(indices), device, pin_memory, collate)

    def fill_batch(self, indices: Iterable[int | str], tensors: Mapping[str, Any]) -> Any:
        """Return what `read_batch` returns for these samples, with the values of `tensors` (by name) in its tensors' places.

        Tensors that are not given are left out, as `select` leaves them out. Nothing is read but the first skeleton.

        Raises:
            KeyError: The first sample has no tensor of such a name.
        """
        names = tuple(sorted(tensors))
        view = self._narrowed.get(names)
        if view is None:
            if len(self._narrowed) >= _MAX_VIEWS:
                self._narrowed.clear()
            view = TensorCache(self._store, self._order, tuple(map(glob.escape, names)))
            self._narrowed[names] = view
        request = view._request(self._request(indices))
        structure = request.structures.of(request.rows)
        for name in names:
            if name not in structure.tensors or (self._wanted is not None and not self._wanted(name)):
                raise KeyError(f"sample {request.key(0)!r} has no tensor {name!r}")
        return fill_batch(request, tensors)

    def _request(self, indices: Any) -> Request:
        """Return the request of samples: by number or key, or of those of another view's request, which has located them."""
        if isinstance(indices, Request):
            return Request(self._store, indices.rows, self._structures)
        numbers = numbers_of(indices, len(self._where), self._find)
        positions = numbers if self._order is None else as_array(take(self._where, numbers))
        return Request(self._store, locate(self._store, positions), self._structures)

    @property
    def members(self) -> dict[str, int]:
        """Other members of the samples, by suffix: how many samples have it, say `{"jpg": 100, "json": 100}`."""
        return {suffix: int(np.count_nonzero(having)) for suffix, having in self._having().items()}

    def _having(self) -> dict[str, Array]:
        return members_of(self._store, self._where)

    def read_members(self, indices: Iterable[int | str], suffix: str) -> list[bytes]:
        """Return the bytes of each sample's member `KEY.suffix`, as they are in the shard.

        Raises:
            IndexError, KeyError: A sample that is not there, or that has no such member.
            FormatError: A shard is not what its index says.
        """
        return all_found(self, self._request(indices), suffix)

    def _find_members(self, request: Request, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return a member of those `wanted` samples of a batch that have it, by their place in the batch."""
        rows = request.rows
        suffix = suffix.lower().removeprefix(".")  # as the index has it, and webdataset
        numbers = np.empty(len(rows), np.int64)
        for number, at, some in rows.parts:
            numbers[at] = rows.shards[number].find_members(some, suffix)
        return {
            i: rows.shards[rows.number.item(i)].member(rows.row.item(i), suffix, number)
            for i in wanted
            if (number := numbers.item(i)) >= 0
        }

    def close(self) -> None:
        """Close the files and threads of this cache and its views."""
        self._store.close()

    def __enter__(self) -> TensorCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TensorCache({len(self)} samples in {self.num_shards} shards)"

    def _take(self, numbers: Any) -> TensorCache:
        return TensorCache(self._store, take(self._where, numbers), self._patterns)

    def _single_threaded(self) -> TensorCache:
        return TensorCache(self._store.with_threads(1), self._order, self._patterns)

    def _entries(self) -> Iterator[Entry]:
        return entries(self._store, self._where)

    def _at(self, number: int) -> int:
        return self._where[number] if isinstance(self._where, range) else self._where.item(number)

    def _sample(self, position: int) -> Any:
        shard, row = self._store.locate(position)
        sample = shard.sample(row)
        return sample if self._wanted is None else project(sample, self._wanted)

    def _found(self, key: str) -> list[int]:
        """Return the numbers of the samples with this key."""
        found = self._store.find(key)
        if self._order is None:
            return found
        if self._inverse is None:
            self._inverse = Inverse(self._order)
        return [number for position in found for number in self._inverse.find(position)]

    def _find(self, key: str) -> int:
        found = self._found(key)
        if not found:
            raise KeyError(f"no sample {key!r} among {len(self)}")
        if len({self._at(number) for number in found}) > 1:
            paths = ", ".join(self._store.locate(self._at(number))[0].path for number in found)
            raise KeyError(f"sample {key!r} is in several shards, {paths}; use its number")
        return found[0]


def all_found(cache: Any, request: Any, suffix: str) -> list[bytes]:
    """Return a member of each sample of a request that a cache has made.

    Raises:
        KeyError: A sample does not have it.
    """
    found: dict[int, bytes] = cache._find_members(request, suffix, range(len(request)))
    for i in range(len(request)):
        if i not in found:
            raise KeyError(f"sample {request.key(i)!r} has no member {suffix!r}; in the cache are {cache.members}")
    return [found[i] for i in range(len(request))]
