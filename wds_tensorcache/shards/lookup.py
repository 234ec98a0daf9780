"""Find samples by key among those of many shards, without an object per key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from wds_tensorcache.shards.index import Keys
from wds_tensorcache.shards.words import Words, are_same, hash_key, hash_keys

__all__ = ["KeyTable", "match_keys"]

Array = np.ndarray[Any, Any]
Parts = Sequence[tuple[Keys, "Array | None"]]


class KeyTable:
    """Positions of keys, in shards one after the other.

    Memory: none where keys ascend in every shard and the ranges of two shards never overlap, as those of numbered keys:
        the keys are searched where the indexes have them. Otherwise 8 bytes per key.

    Args:
        parts: Keys of each shard, and the rows of those that count, ascending; None for all.
    """

    def __init__(self, parts: Iterable[tuple[Keys, Array | None]]) -> None:
        self._parts = list(parts)
        counts = [len(keys) if rows is None else len(rows) for keys, rows in self._parts]
        self._starts = np.cumsum([0, *counts], dtype=np.int64).tolist()
        self._raw = _Raw(self._parts, self._starts)
        self._ranges = self._find_ranges()
        self._hashes = _Hashes(self._parts, self._starts) if self._ranges is None else None

    def find(self, key: str) -> list[int]:
        """Return where the key is, ascending: once at most, unless shards share it."""
        raw = key.encode("utf-8", "surrogateescape")
        if self._hashes is not None:
            return [position for position in self._hashes.find(raw) if self._raw[position] == raw]
        return self._search(raw)

    def shared(self) -> list[str]:
        """Return the keys that are there more than once."""
        if self._hashes is None:
            return []
        counts = Counter(map(self._raw.__getitem__, self._hashes.alike()))
        return sorted(raw.decode("utf-8", "surrogateescape") for raw, count in counts.items() if count > 1)

    def _find_ranges(self) -> tuple[bool, list[Any], list[Any], list[int]] | None:
        """Return whether length comes first, the shards' first keys, last keys and numbers; None where shards overlap."""
        present = [number for number in range(len(self._parts)) if self._starts[number] < self._starts[number + 1]]
        for by_length in (False, True):
            if all(self._parts[number][0].ascend(by_length) for number in present):
                ends = [(self._starts[number], self._starts[number + 1] - 1, number) for number in present]
                ranges = sorted(
                    (_rank(self._raw[first], by_length), _rank(self._raw[last], by_length), number)
                    for first, last, number in ends
                )
                if all(left[1] < right[0] for left, right in pairwise(ranges)):
                    firsts, lasts, numbers = ([each[i] for each in ranges] for i in range(3))
                    return by_length, firsts, lasts, numbers
        return None

    def _search(self, raw: bytes) -> list[int]:
        by_length, firsts, lasts, numbers = self._ranges  # type: ignore[misc]
        wanted = _rank(raw, by_length)
        at = bisect_right(firsts, wanted) - 1
        if at < 0 or wanted > lasts[at]:
            return []
        first, last = self._starts[numbers[at]], self._starts[numbers[at] + 1]
        found = first + bisect_left(range(first, last), wanted, key=lambda place: _rank(self._raw[place], by_length))
        return [found] if self._raw[found] == raw else []


def _rank(raw: bytes, by_length: bool) -> Any:
    return (len(raw), raw) if by_length else raw


class _Raw:
    """The keys of shards one after the other, as bytes."""

    def __init__(self, parts: Parts, starts: Sequence[int]) -> None:
        self._parts, self._starts = parts, starts

    def __getitem__(self, position: int) -> bytes:
        number = bisect_right(self._starts, position) - 1
        keys, rows = self._parts[number]
        row = position - self._starts[number]
        return keys.raw(row if rows is None else rows.item(row))


class _Hashes:
    """The upper bits of each key's hash, with its position in the lower ones, ascending."""

    def __init__(self, parts: Parts, starts: Sequence[int]) -> None:
        self._bits = np.uint64(starts[-1].bit_length())
        self._packed = np.empty(starts[-1], np.uint64)
        for (keys, rows), (first, last) in zip(parts, pairwise(starts), strict=True):
            hashes = hash_keys(keys.text, keys.ends)
            hashes = hashes if rows is None else hashes[rows]
            self._packed[first:last] = (hashes >> self._bits << self._bits) | np.arange(first, last, dtype=np.uint64)
        self._packed.sort()

    def find(self, raw: bytes) -> list[int]:
        """Return the positions of the keys with the hash of `raw`, ascending."""
        least = np.uint64(hash_key(raw)) >> self._bits << self._bits
        first = int(np.searchsorted(self._packed, least))
        last = int(np.searchsorted(self._packed, least | self._mask, "right"))
        return (self._packed[first:last] & self._mask).tolist()  # type: ignore[no-any-return]

    def alike(self) -> list[int]:
        """Return the positions of all keys whose hash another one has, too."""
        same = (self._packed[1:] >> self._bits) == (self._packed[:-1] >> self._bits)
        alike = np.concatenate([same, [False]]) | np.concatenate([[False], same])
        return (self._packed[alike[: len(self._packed)]] & self._mask).tolist()  # type: ignore[no-any-return]

    def matched(self, other: _Hashes) -> tuple[Array, Array, Array] | None:
        """Return the positions of keys here, those there with the same hashes, and whose hash no other key has.

        Returns None where the hashes are not the same. Both lose theirs.
        """
        here, there = self._packed, other._packed
        if len(here) != len(there) or bool(((here ^ there) >> self._bits).any()):
            return None
        alone = np.ones(len(here) + 1, np.bool_)
        alone[1:-1] = (here[1:] ^ here[:-1]) >> self._bits != 0
        here &= self._mask
        there &= self._mask
        return here.view(np.int64), there.view(np.int64), alone[:-1] & alone[1:]

    @property
    def _mask(self) -> Any:
        return (np.uint64(1) << self._bits) - np.uint64(1)


def match_keys(parts: Parts, others: Parts) -> Array | None:
    """Return for each key, shard after shard, its position among `others`, `[n]`.

    Returns None unless both have the same keys, each once. Memory: while it works, about 25 bytes per key, and the keys.
    """
    starts, ends = (np.cumsum([0, *(len(k if r is None else r) for k, r in each)]).tolist() for each in (parts, others))
    matched = _Hashes(parts, starts).matched(_Hashes(others, ends)) if starts[-1] == ends[-1] else None
    if matched is None:
        return None
    here, there, alone = matched
    result = np.empty(len(here), np.min_scalar_type(len(here)))
    result[here] = there
    # the few whose hash another key has by chance
    places = dict(_raws(others, ends, there[~alone]))
    for raw, position in _raws(parts, starts, here[~alone]):
        result[position] = places.get(raw, 0)
    del matched, here, there, alone
    words = _words(others)
    for (keys, rows), (first, last) in zip(parts, pairwise(starts), strict=True):
        if not are_same(_words([(keys, rows)]), words.at(result[first:last])):
            return None
    # keys that are there twice are not each once
    return result if len(np.unique(result)) == len(result) else None


def _raws(parts: Parts, starts: Sequence[int], positions: Array) -> list[tuple[bytes, int]]:
    raw = _Raw(parts, starts)
    return [(raw[position], position) for position in positions.tolist()]


def _words(parts: Parts) -> Words:
    """Return the keys of several shards as words."""
    texts, begins, lengths, nbytes = [], [], [], 0
    for keys, rows in parts:
        ends = keys.ends.astype(np.int64)
        first = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
        which = slice(None) if rows is None else rows
        texts.append(keys.text)
        begins.append(first[which] + nbytes)
        lengths.append((ends - first)[which])
        nbytes += len(keys.text)
    none = np.zeros(0, np.int64)
    return Words(
        np.concatenate([*texts, np.zeros(8, np.uint8)]),
        np.concatenate([none, *begins]),
        np.concatenate([none, *lengths]),
    )
