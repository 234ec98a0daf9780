"""Compare and match the keys of two caches; if both contain the same keys, no key becomes a Python object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.positions import by_shard, in_order
from wds_tensorcache.shards.key_table import match_unique_keys

Array = np.ndarray[Any, Any]
KeyMap: TypeAlias = "Mapping[str, str] | Callable[[str], str | None]"


def match_some(first: Any, other: Any, key_map: KeyMap | None) -> tuple[Array | None, list[str]]:
    """Return, for each sample of `first`, the index of its match in `other`, plus the keys that only `other` contains.

    Indices are int64, -1 for a sample without a match. The array is None if both caches have the same keys in the same
    order.

    Args:
        key_map: Maps a key of `first` to a key of `other`. Several samples of `first` may then match one sample of `other`, and
            no keys of `other` are returned.

    Raises:
        KeyError: A key occurs twice in `other`.
    """
    if key_map is None and isinstance(first, TensorCache) and isinstance(other, TensorCache):
        if _are_equal(first, other):
            return None, []
        matched = match(first, other)
        if matched is not None:
            return matched, []
    places = {key: at for at, key in enumerate(other.keys())}
    if len(places) != len(other):
        twice = next(key for at, key in enumerate(other.keys()) if places[key] != at)
        raise KeyError(f"key {twice!r} occurs twice in a joined cache with {len(other)} samples, expected unique keys")
    get = key_map.get if isinstance(key_map, Mapping) else key_map
    # a generator, in which a StopIteration of the function is an error and does not end the keys
    keys = first.keys()
    wanted = keys if get is None else (get(key) for key in keys)
    positions = np.fromiter((places.get(key, -1) for key in wanted), np.int64, len(first))
    if key_map is not None or int(np.count_nonzero(positions >= 0)) >= len(places):
        return positions, []
    first_keys = set(first.keys())
    return positions, [key for key in places if key not in first_keys]


def _are_equal(left: Any, right: Any) -> bool:
    """Return whether two caches have the same keys in the same order."""
    if len(left) != len(right) or not len(left):
        return len(left) == len(right)
    ours, theirs = left._where, right._where
    if left._store is right._store and type(ours) is type(theirs):
        if ours == theirs if isinstance(ours, range) else np.array_equal(ours, theirs):
            return True
    return all(np.array_equal(part, other) for part, other in zip(_raw_keys(left), _raw_keys(right), strict=True))


def _raw_keys(cache: Any) -> tuple[Array, Array]:
    """Return the length of each key in bytes, and the bytes of all keys without gaps."""
    lengths, texts = list[Any](), list[Any]()
    for shard, rows in in_order(cache._store, cache._where):
        keys, samples = shard.index.keys, shard.columns.rows
        rows = rows if samples is None else samples[rows].astype(np.int64)
        first, last = rows.item(0), rows.item(-1)
        if last - first == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            begin = keys.ends.item(first - 1) if first else 0
            lengths.append(np.diff(keys.ends[first : last + 1].astype(np.int64), prepend=begin))
            texts.append(keys.text[begin : keys.ends.item(last)])
        else:
            raw_keys = [keys.raw(row) for row in rows.tolist()]
            lengths.append(np.array(list(map(len, raw_keys)), np.int64))
            texts.append(np.frombuffer(b"".join(raw_keys), np.uint8))
    return np.concatenate(lengths), np.concatenate(texts)


def match(left: Any, right: Any) -> Array | None:
    """Return the index in `right` of each key of `left`, int64; None if their keys differ, or a key occurs twice."""
    (parts, left_rows), (others, right_rows) = _parts(left), _parts(right)
    matched = match_unique_keys(parts, others)
    if matched is None:
        return None
    result = np.empty(len(matched), np.int64)
    result[left_rows] = right_rows[matched]
    return result


def _parts(cache: Any) -> tuple[list[Any], Array]:
    """Return the keys of a cache shard by shard, and the sample index of each key."""
    parts, numbers = [], np.empty(len(cache), np.min_scalar_type(len(cache)))
    done = 0
    for shard, which, rows in by_shard(cache._store, cache._where):
        samples = shard.columns.rows
        parts.append((shard.index.keys, rows if samples is None else samples[rows].astype(np.int64)))
        numbers[done : done + len(rows)] = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        done += len(rows)
    return parts, numbers
