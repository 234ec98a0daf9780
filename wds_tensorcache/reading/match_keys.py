"""Match the keys of two caches by their hashes, without a Python object per key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.positions import in_order
from wds_tensorcache.shards.key_table import Keys

Array = np.ndarray[Any, Any]
_PIECE = 1 << 16
_COMPARED = 1 << 10  # keys of each cache to hold in memory while keys are compared in order
KeyMap: TypeAlias = "Mapping[str, str] | Callable[[str], str | None]"


def match_keys(first: Any, other: Any, key_map: KeyMap | None) -> tuple[Array | None, list[str]]:
    """Return, for each sample of `first`, the index of its match in `other`, plus the keys that only `other` contains.

    Indices are int64, -1 for a sample without a match. The array is None if both caches have the same keys in the same
    order.

    Args:
        key_map: Function or mapping from a key of `first` to a key of `other`. Several samples of `first` may then match one
            sample of `other`, and no keys of `other` are returned.

    Raises:
        KeyError: A key occurs twice in `other`.
    """
    if key_map is None and isinstance(first, TensorCache) and isinstance(other, TensorCache):
        if _are_equal(first, other):
            return None, []
        all_keys = slice(None)
        if (
            len(first)
            and len(other)
            and (matched := _match_hashes(_keys_of(first, all_keys), _keys_of(other, all_keys)))
        ):
            return matched
    places = {key: at for at, key in enumerate(other.keys())}
    if len(places) != len(other):
        twice = next(key for at, key in enumerate(other.keys()) if places[key] != at)
        raise KeyError(f"key {twice!r} occurs twice in a joined cache with {len(other)} samples, expected unique keys")
    get = key_map.get if isinstance(key_map, Mapping) else key_map
    # a generator, in which a StopIteration of the function is an error and does not end the keys
    keys = first.keys()
    wanted = keys if get is None else (get(key) for key in keys)
    rows = np.fromiter((places.get(key, -1) for key in wanted), np.int64, len(first))
    is_matched = np.zeros(len(other), np.bool_)
    is_matched[rows[rows >= 0]] = True
    return rows, [] if key_map is not None else [key for key, done in zip(places, is_matched, strict=True) if not done]


def _are_equal(first: Any, other: Any) -> bool:
    """Return whether two caches have the same keys in the same order. No key is read for equal views of one cache."""
    where, other_where = first._where, other._where
    if first._store is other._store and type(where) is type(other_where):
        if where == other_where if isinstance(where, range) else np.array_equal(where, other_where):
            return True
    if len(first) != len(other):
        return False
    for begin in range(0, len(first), _COMPARED):
        keys, others = (_keys_of(cache, slice(begin, begin + _COMPARED)) for cache in (first, other))
        if not (np.array_equal(keys.ends, others.ends) and np.array_equal(keys.text, others.text)):
            return False
    return True


def _keys_of(cache: Any, which: slice) -> Keys:
    """Return the keys of samples in the order of the cache."""
    texts, lengths = list[Any](), list[Any]()
    for shard, rows in in_order(cache._store, cache._where[which]):
        keys, samples = shard.index.keys, shard.columns.rows
        rows = rows if samples is None else samples[rows].astype(np.int64)
        first, last = rows.item(0), rows.item(-1)
        if last - first == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            begin = keys.ends.item(first - 1) if first else 0
            lengths.append(np.diff(keys.ends[first : last + 1].astype(np.int64), prepend=begin))
            texts.append(keys.text[begin : keys.ends.item(last)])
        else:
            begins, counts = keys.extents(rows)
            lengths.append(counts)
            texts.append(_gather(keys.text, begins, counts))
    return Keys(np.concatenate(texts), np.cumsum(np.concatenate(lengths)))


def _gather(text: Array, begins: Array, lengths: Array) -> Array:
    """Return the bytes of keys without gaps."""
    parts = [np.empty(0, np.uint8)]
    for first in range(0, len(begins), _PIECE):  # offsets take 24 bytes for each byte of a key
        begin, length = begins[first : first + _PIECE], lengths[first : first + _PIECE]
        offsets = np.repeat(begin - np.cumsum(length) + length, length)
        parts.append(text[offsets + np.arange(len(offsets))])
    return np.concatenate(parts)


def _match_hashes(first: Keys, other: Keys) -> tuple[Array, list[str]] | None:
    """Return the result of `match_keys`; None if two keys have one hash, usually because a key occurs twice."""
    hashes, others = first.hashes(), other.hashes()
    order = np.argsort(others)
    ascending = others[order]
    if (ascending[1:] == ascending[:-1]).any():
        return None
    rows = order[np.minimum(np.searchsorted(ascending, hashes), len(order) - 1)]
    (matched,) = np.nonzero(others[rows] == hashes)
    (begins, lengths), (other_begins, other_lengths) = first.extents(matched), other.extents(rows[matched])
    text, other_text = _gather(first.text, begins, lengths), _gather(other.text, other_begins, other_lengths)
    if not (np.array_equal(lengths, other_lengths) and np.array_equal(text, other_text)):
        return None
    result = np.full(len(first), -1, np.int64)
    result[matched] = rows[matched]
    is_matched = np.zeros(len(other), np.bool_)
    is_matched[rows[matched]] = True
    return result, [other[row] for row in np.flatnonzero(~is_matched).tolist()]
