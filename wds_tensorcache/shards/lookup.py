"""Find samples by key among those of many shards, without an object per key."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np

from wds_tensorcache.shards.index import Keys

__all__ = ["KeyTable"]

Array = np.ndarray[Any, Any]
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MASK = (1 << 64) - 1


class KeyTable:
    """The hashes of keys in ascending order, and where each is: 12 bytes per key, one shard after the other.

    Args:
        parts: Of each shard its keys, and which of them count, ascending; None for all.
    """

    def __init__(self, parts: Iterable[tuple[Keys, Array | None]]) -> None:
        self._parts = list(parts)
        found = [_hashes(keys) if rows is None else _hashes(keys)[rows] for keys, rows in self._parts]
        self._starts = np.cumsum([0, *map(len, found)]).tolist()
        hashes = np.concatenate(found) if found else np.empty(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._order = hashes[order], order.astype(np.min_scalar_type(len(order)))

    def find(self, key: str) -> list[int]:
        """Return where the key is, ascending: once at most, unless shards share it."""
        raw = key.encode("utf-8", "surrogateescape")
        wanted = np.uint64(_hash(raw))
        first, last = np.searchsorted(self._hashes, wanted, "left"), np.searchsorted(self._hashes, wanted, "right")
        return sorted(position for position in self._order[first:last].tolist() if self._raw(position) == raw)

    def shared(self) -> list[str]:
        """Return the keys that are there more than once."""
        same = self._order[1:][self._hashes[1:] == self._hashes[:-1]]
        keys = {self._raw(position).decode("utf-8", "surrogateescape") for position in same.tolist()}
        return sorted(key for key in keys if len(self.find(key)) > 1)

    def _raw(self, position: int) -> bytes:
        number = bisect_right(self._starts, position) - 1
        keys, rows = self._parts[number]
        row = position - self._starts[number]
        return keys.raw(row if rows is None else rows.item(row))


def _hash(key: bytes) -> int:
    """Return the sum of each byte plus one times a power of an odd number, modulo 2^64."""
    result, factor = 0, 1
    for byte in key:
        result += (byte + 1) * factor
        factor = factor * _FACTOR & _MASK
    return result & _MASK


def _hashes(keys: Any) -> Array:
    """Return `_hash` of every key of a shard, from prefix sums over their common text."""
    factors = np.full(len(keys.text) + 1, _FACTOR, np.uint64)
    factors[:1] = 1
    factors = np.multiply.accumulate(factors)
    sums = np.zeros(len(keys.text) + 1, np.uint64)
    np.cumsum((keys.text.astype(np.uint64) + np.uint64(1)) * factors[:-1], out=sums[1:])
    begins, ends = keys.begins(), keys.ends.astype(np.int64)
    inverse = np.full(len(keys.text) + 1, pow(_FACTOR, -1, 1 << 64), np.uint64)
    inverse[:1] = 1
    inverse = np.multiply.accumulate(inverse)
    return (sums[ends] - sums[begins]) * inverse[begins]  # type: ignore[no-any-return]
