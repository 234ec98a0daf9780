"""Several caches of the same keys as one: new text states never rewrite old latents."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.cache import all_found
from wds_tensorcache.reading.positions import by_shard, in_order
from wds_tensorcache.reading.schema import Entry, as_patterns
from wds_tensorcache.shards.lookup import match_keys

__all__ = ["JoinedCache", "are_equal", "match"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _JoinedRequest:
    """The samples of a batch; `parts` has each cache's request of them."""

    parts: Sequence[Any]

    def __len__(self) -> int:
        return len(self.parts[0])

    def key(self, i: int) -> str:
        """Return the key of sample `i` of the batch."""
        return self.parts[0].key(i)  # type: ignore[no-any-return]


class JoinedCache(Sequence[Any]):
    """Caches joined by key; made by `tc.open([…], join="key")`.

    Numbers and order are the first cache's. Methods are `TensorCache`'s.

    Raises (when made):
        KeyError: A cache lacks a key of the first one, or the other way round.
    """

    def __init__(self, caches: Sequence[Any], names: tuple[str, ...] | None = None) -> None:
        if not caches:
            raise ValueError("nothing to join")
        self._names = names
        self._caches = [caches[0]]
        for number, cache in enumerate(caches[1:], start=1):
            first, other = _first(caches[0]), _first(cache)
            if not are_equal(first, other):
                cache = cache._take(_match_or_raise(first, other, number))
            self._caches.append(cache)

    def __reduce__(self) -> Any:
        return _joined, (self._caches, self._names)

    def __len__(self) -> int:
        return len(self._caches[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._each(lambda cache: cache[index])
        if isinstance(index, list) or getattr(index, "ndim", 0) == 1:
            numbers = self._numbers(index)
            return self._each(lambda cache: cache[numbers])
        number = self._caches[0]._find(index) if isinstance(index, str) else index
        return self._merge([cache[number] for cache in self._caches])

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self[number]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices` as a list."""
        return [self._merge(parts) for parts in zip(*(c.__getitems__(indices) for c in self._caches), strict=True)]

    def __contains__(self, key: object) -> bool:
        return key in self._caches[0]

    @property
    def num_shards(self) -> int:
        """Number of shards behind all caches."""
        return sum(cache.num_shards for cache in self._caches)

    def keys(self) -> Sequence[str]:
        """Return the keys in order."""
        return self._caches[0].keys()  # type: ignore[no-any-return]

    @property
    def schema(self) -> dict[str, Any]:
        """What the tensors are, by name; called `NAME.TENSOR` where the caches have names, here as everywhere."""
        return {
            prefix + name: tensor
            for prefix, cache in zip(self._prefixes(), self._caches, strict=True)
            for name, tensor in cache.schema.items()
        }

    def select(self, patterns: Iterable[str]) -> JoinedCache:
        """Return a view with only the tensors that match: as `TensorCache.select`, on every cache."""
        patterns = as_patterns(patterns)
        whole = [
            [prefix + name for name in cache.schema]
            for prefix, cache in zip(self._prefixes(), self._caches, strict=True)
        ]
        for pattern in patterns:
            if not any(fnmatch.filter(names, pattern) for names in whole):
                shown = ", ".join(repr(name) for names in whole for name in names)
                raise KeyError(f"no tensor is called {pattern!r}; there are {shown}")
        views = []
        for prefix, names, cache in zip(self._prefixes(), whole, self._caches, strict=True):
            kept = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
            views.append(cache.select([glob.escape(name[len(prefix) :]) for name in kept]))
        return _joined(views, self._names)

    def filter(self, predicate: Callable[[Any], Any]) -> JoinedCache:
        """Return a view of the samples for which `predicate` is true; as `TensorCache.filter`, of an entry of all caches."""
        kept = (number for number, entry in enumerate(self._entries()) if predicate(entry))
        return self._take(np.fromiter(kept, np.int64))

    def read_batch(
        self,
        indices: Iterable[Any],
        device: Any = None,
        *,
        pin_memory: bool = False,
        collate: Any = "stack",
        pad_value: Any = 0,
    ) -> Any:
        """Read one batch of each cache, joined as samples are; `"pad"` joins the shapes too. As `TensorCache.read_batch`."""
        request = self._request(indices)
        each = list if callable(collate) else collate
        parts = [
            cache.read_batch(part, device, pin_memory=pin_memory, collate=each, pad_value=pad_value)
            for cache, part in zip(self._caches, request.parts, strict=True)
        ]
        if callable(collate):
            return collate([self._merge(samples) for samples in zip(*parts, strict=True)])
        if collate != "pad":
            return self._merge(parts)
        return self._merge([batch for batch, _ in parts]), self._merge([shapes for _, shapes in parts])

    def read_tensors(
        self, indices: Iterable[Any], device: Any = None, *, pin_memory: bool = False, collate: str = "stack"
    ) -> dict[str, Any]:
        """Read the tensors of a batch alone, by name; as `TensorCache.read_tensors`."""
        request = self._request(indices)
        return {
            prefix + name: tensor
            for prefix, cache, part in zip(self._prefixes(), self._caches, request.parts, strict=True)
            for name, tensor in cache.read_tensors(part, device, pin_memory=pin_memory, collate=collate).items()
        }

    def fill_batch(self, indices: Iterable[Any], tensors: Mapping[str, Any]) -> Any:
        """Return the batch of these samples with `tensors`, named as by `read_tensors`, in it; as `TensorCache.fill_batch`."""
        request = self._request(indices)
        parts, rest = [], dict(tensors)
        for prefix, names, cache, part in zip(
            self._prefixes(), self._tensor_names, self._caches, request.parts, strict=True
        ):
            mine = {prefix + name: name for name in names if prefix + name in rest}
            parts.append(cache.fill_batch(part, {name: rest.pop(whole) for whole, name in mine.items()}))
        if rest:
            raise KeyError(f"no tensor is called {next(iter(rest))!r}")
        return self._merge(parts)

    @cached_property
    def _tensor_names(self) -> list[list[str]]:
        return [list(cache.schema) for cache in self._caches]

    def _numbers(self, indices: Iterable[Any]) -> list[Any]:
        if isinstance(indices, str):
            raise TypeError(f"indices are a sequence of ints or keys, got {indices!r:.100}")
        return [self._caches[0]._find(i) if isinstance(i, str) else i for i in indices]

    def _request(self, indices: Any) -> _JoinedRequest:
        """Return the request of samples; as `TensorCache._request`."""
        if isinstance(indices, _JoinedRequest):
            return indices
        numbers = self._numbers(indices)
        return _JoinedRequest([cache._request(numbers) for cache in self._caches])

    def _prefixes(self) -> list[str]:
        """Return what stands in front of the names of each cache's tensors."""
        return [f"{name}." for name in self._names] if self._names is not None else [""] * len(self._caches)

    @property
    def members(self) -> dict[str, int]:
        """Other members of the samples, by suffix: how many samples have it in one of the caches."""
        return {suffix: int(np.count_nonzero(having)) for suffix, having in self._having().items()}

    def _having(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for cache in self._caches:
            for suffix, having in cache._having().items():
                result[suffix] = result[suffix] | having if suffix in result else having
        return result

    def read_members(self, indices: Iterable[Any], suffix: str) -> list[bytes]:
        """Return the bytes of a member of each sample, of the first cache that has it; as `TensorCache.read_members`."""
        return all_found(self, self._request(indices), suffix)

    def _find_members(self, request: _JoinedRequest, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return a member of those `wanted` samples of a batch that have it in one of the caches."""
        found: dict[int, bytes] = {}
        for cache, part in zip(self._caches, request.parts, strict=True):
            found |= cache._find_members(part, suffix, [i for i in wanted if i not in found])
        return found

    @property
    def io(self) -> tuple[Any, ...]:
        """How the files of each cache are read, and why."""
        return tuple(cache.io for cache in self._caches)

    def close(self) -> None:
        """Close all caches."""
        for cache in self._caches:
            cache.close()

    def __enter__(self) -> JoinedCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JoinedCache({len(self)} samples of {len(self._caches)} caches)"

    def _merge(self, parts: Sequence[Any]) -> Any:
        if self._names is not None:
            return dict(zip(self._names, parts, strict=True))
        merged: dict[Any, Any] = {}
        for number, part in enumerate(parts):
            if type(part) is not dict:
                raise BatchError(f"cache {number} has a {type(part).__name__}, not a dict; join a dict of caches")
            twice = merged.keys() & part.keys()
            if twice:
                raise BatchError(f"more than one cache has {sorted(map(str, twice))}; join a dict of caches")
            merged.update(part)
        return merged

    def _find(self, key: str) -> int:
        return self._caches[0]._find(key)  # type: ignore[no-any-return]

    def _entries(self) -> Iterator[Entry]:
        prefixes = self._prefixes()
        for parts in zip(*(cache._entries() for cache in self._caches), strict=True):
            shapes = {
                prefix + name: shape
                for prefix, part in zip(prefixes, parts, strict=True)
                for name, shape in part.shapes.items()
            }
            yield Entry(parts[0].key, sum(part.nbytes for part in parts), shapes)

    def _take(self, numbers: Any) -> JoinedCache:
        return self._each(lambda cache: cache._take(numbers))

    def _single_threaded(self) -> JoinedCache:
        return self._each(lambda cache: cache._single_threaded())

    def _each(self, view: Callable[[Any], Any]) -> JoinedCache:
        return _joined([view(cache) for cache in self._caches], self._names)


def _first(cache: Any) -> Any:
    """Return the cache that has the keys of joined ones."""
    while isinstance(cache, JoinedCache):
        cache = cache._caches[0]
    return cache


def _match_or_raise(first: Any, other: Any, number: int) -> Any:
    """Return which sample of `other`, cache `number`, has the key of each sample of `first`.

    Raises:
        KeyError: A key is not in both, or twice in `other`.
    """
    matched = match(first, other)
    if matched is not None:
        return matched
    # an error, most often
    keys = first.keys()
    place = {key: at for at, key in enumerate(other.keys())}
    missing = next((key for key in keys if key not in place), None)
    if missing is None:
        missing = min(set(place).difference(keys), default=None)
    if missing is not None or len(place) != len(other):
        what = f"sample {missing!r} is not in both" if missing is not None else "a key occurs twice"
        raise KeyError(f"cache 0 with {len(first)} samples and cache {number} with {len(other)}: {what}")
    return np.array([place[key] for key in keys], np.int64)


def _joined(caches: Sequence[Any], names: tuple[str, ...] | None) -> JoinedCache:
    """Return caches joined that are known to have the same keys in the same order."""
    result: JoinedCache = object.__new__(JoinedCache)
    result._caches, result._names = list(caches), names
    return result


def are_equal(left: Any, right: Any) -> bool:
    """Return whether two caches have the same keys in the same order; of the same samples, at once."""
    if len(left) != len(right):
        return False
    if left._store is right._store and _same_positions(left._where, right._where):
        return True
    blocks, others = _blocks(left), _blocks(right)
    lengths, text = _NONE
    other_lengths, other_text = _NONE
    while True:
        if not len(lengths):
            lengths, text = next(blocks, _NONE)
        if not len(other_lengths):
            other_lengths, other_text = next(others, _NONE)
        count = min(len(lengths), len(other_lengths))
        if not count:
            return True
        nbytes = int(lengths[:count].sum())
        if not np.array_equal(lengths[:count], other_lengths[:count]) or not np.array_equal(
            text[:nbytes], other_text[:nbytes]
        ):
            return False
        lengths, text = lengths[count:], text[nbytes:]
        other_lengths, other_text = other_lengths[count:], other_text[nbytes:]


_NONE: tuple[Array, Array] = np.empty(0, np.int64), np.empty(0, np.uint8)


def _same_positions(left: Any, right: Any) -> bool:
    if isinstance(left, range) and isinstance(right, range):
        return left == right
    return left is right or (type(left) is type(right) and np.array_equal(left, right))


def _blocks(cache: Any) -> Iterator[tuple[Array, Array]]:
    """Yield the lengths of keys that follow each other in a cache, and their text."""
    for shard, rows in in_order(cache._store, cache._where):
        keys, samples = shard.index.keys, shard.columns.rows
        rows = rows if samples is None else samples[rows].astype(np.int64)
        first, last = rows.item(0), rows.item(-1)
        if last - first == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            begin = keys.ends.item(first - 1) if first else 0
            ends = keys.ends[first : last + 1].astype(np.int64)
            yield np.diff(ends, prepend=begin), keys.text[begin : keys.ends.item(last)]
        else:
            found = [keys.raw(row) for row in rows.tolist()]
            yield np.array(list(map(len, found)), np.int64), np.frombuffer(b"".join(found), np.uint8)


def match(left: Any, right: Any) -> Array | None:
    """Return which sample of `right` has the key of each of `left`, int64; None unless both have the same keys, each once."""
    (parts, mine), (others, theirs) = _parts(left), _parts(right)
    matched = match_keys(parts, others)
    if matched is None:
        return None
    result = np.empty(len(matched), np.int64)
    result[mine] = theirs[matched]
    return result


def _parts(cache: Any) -> tuple[list[Any], Array]:
    """Return the keys of a cache shard by shard, and which of its samples they are."""
    parts, numbers = [], np.empty(len(cache), np.min_scalar_type(len(cache)))
    done = 0
    for shard, which, rows in by_shard(cache._store, cache._where):
        samples = shard.columns.rows
        parts.append((shard.index.keys, rows if samples is None else samples[rows].astype(np.int64)))
        numbers[done : done + len(rows)] = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        done += len(rows)
    return parts, numbers
