"""Store the keys of a shard as arrays, and look up keys in many shards, without a Python object per key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from operator import eq, lt
from typing import Any

import numpy as np

from wds_tensorcache.shards.names import older_key

__all__ = ["KeyRows", "KeyTable", "Keys", "match_unique_keys"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a shard, in order: `text` is their UTF-8 without gaps, uint8; `ends` are the offsets in it where keys end."""

    text: Array
    ends: Array
    _is_ascending: dict[bool, bool] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, row: int) -> bytes:
        """Return the key of sample `row` as UTF-8."""
        begin = self.ends.item(row - 1) if row else 0
        return self.text[begin : self.ends.item(row)].tobytes()

    def __getitem__(self, row: int) -> str:
        return self.raw(row).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        raw, begin = self.text.tobytes(), 0
        text = raw.decode("ascii") if raw.isascii() else None  # a slice of a str takes half as long
        for end in self.ends.tolist():
            yield text[begin:end] if text is not None else raw[begin:end].decode("utf-8", "surrogateescape")
            begin = end

    def raws(self) -> list[bytes]:
        """Return all keys as UTF-8."""
        text, ends = self.text.tobytes(), self.ends.tolist()
        return [text[begin:end] for begin, end in pairwise([0, *ends])]

    def lengths(self) -> Array:
        """Return the length of each key in bytes, int64."""
        lengths = self.ends.astype(np.int64)
        lengths[1:] -= lengths[:-1].copy()
        return lengths

    def is_ascending(self, by_length: bool) -> bool:
        """Return whether the keys are strictly ascending by their bytes; with `by_length`, first by length, then by bytes."""
        if by_length not in self._is_ascending:
            lengths = self.lengths()
            if by_length or bool((lengths == lengths[:1]).all()):
                self._is_ascending[by_length] = self._is_ascending_by_length(lengths)
            else:
                self._is_ascending[by_length] = all(starmap(lt, pairwise(self.raws())))
        return self._is_ascending[by_length]

    def _is_ascending_by_length(self, lengths: Array) -> bool:
        if bool((lengths[1:] < lengths[:-1]).any()):
            return False
        changes = np.flatnonzero(lengths[1:] != lengths[:-1]) + 1
        for first, last in pairwise([0, *changes.tolist(), len(lengths)] if len(lengths) else []):
            length, end = lengths.item(first), self.ends.item(last - 1)
            same = self.text[end - (last - first) * length : end].view(f"S{max(length, 1)}")
            if not (same[:-1] < same[1:]).all() or (not length and last - first > 1):
                return False
        return True


# the keys of each shard, and the numbers of the samples to include, ascending; None for all samples
KeyRows = Sequence[tuple[Keys, "Array | None"]]


class KeyTable:
    """Look-up of sample positions by key, across all shards of a cache.

    Memory: none if keys ascend in every shard and the key ranges of shards do not overlap, as is usual for numbered keys: the
        table then searches the indexes. Otherwise 8 bytes per key.

    Args:
        parts: Keys of each shard, and the numbers of the samples to include, ascending; None for all samples.
    """

    def __init__(self, parts: Iterable[tuple[Keys, Array | None]]) -> None:
        self._parts = list(parts)
        self._starts = _starts(self._parts)
        self._ranges = self._find_ranges()
        self._hashes = _Hashes(self._parts, self._starts) if self._ranges is None else None

    def find(self, key: str) -> list[int]:
        """Return the positions of the key, ascending: at most one, unless several shards contain the key.

        A key of `safe_key` is also found under the key that an earlier version of `safe_key` made of the same name.
        """
        older = None if (found := self._find(key)) else older_key(key)
        return found if older is None else self._find(older)

    def _find(self, key: str) -> list[int]:
        raw = key.encode("utf-8", "surrogateescape")
        if self._hashes is not None:
            return [position for position in self._hashes.find(raw) if self._raw(position) == raw]
        return self._search(raw)

    def neighbors(self, key: str, count: int) -> list[int]:
        """Return up to `count` positions of keys next to a key that may not exist, in ascending order of the keys.

        Returns an empty list unless the keys of all shards ascend. Cost: logarithmic.
        """
        if self._ranges is None or not self._ranges[1]:
            return []
        by_length, firsts, _, numbers = self._ranges
        wanted = _sort_key(key.encode("utf-8", "surrogateescape"), by_length)
        number = numbers[max(0, bisect_right(firsts, wanted) - 1)]
        begin, end = self._starts[number], self._starts[number + 1]
        place = begin + bisect_left(range(begin, end), wanted, key=lambda at: _sort_key(self._raw(at), by_length))
        return list(range(max(begin, place - count // 2), min(end, place + count // 2)))

    def shared(self) -> list[str]:
        """Return the keys that occur in several shards."""
        counts = Counter(map(self._raw, [] if self._hashes is None else self._hashes.positions_with_shared_hash()))
        return sorted(raw.decode("utf-8", "surrogateescape") for raw, count in counts.items() if count > 1)

    def _raw(self, position: int) -> bytes:
        return _raw(self._parts, self._starts, position)

    def _find_ranges(self) -> tuple[bool, list[Any], list[Any], list[int]] | None:
        """Return a bool `by_length`, and three lists in key order: first key, last key and number of each shard with keys.

        If `by_length`, keys are compared by length first, then by bytes. Returns None if neither order works: if the keys of a
        shard do not ascend, or the key ranges of two shards overlap.
        """
        present = [number for number in range(len(self._parts)) if self._starts[number] < self._starts[number + 1]]
        for by_length in (False, True):
            if all(self._parts[number][0].is_ascending(by_length) for number in present):
                ends = [(self._starts[number], self._starts[number + 1] - 1, number) for number in present]
                ranges = sorted(
                    (_sort_key(self._raw(first), by_length), _sort_key(self._raw(last), by_length), number)
                    for first, last, number in ends
                )
                if all(left[1] < right[0] for left, right in pairwise(ranges)):
                    firsts, lasts, numbers = ([each[i] for each in ranges] for i in range(3))
                    return by_length, firsts, lasts, numbers
        return None

    def _search(self, raw: bytes) -> list[int]:
        by_length, firsts, lasts, numbers = self._ranges  # type: ignore[misc]
        wanted = _sort_key(raw, by_length)
        at = bisect_right(firsts, wanted) - 1
        if at < 0 or wanted > lasts[at]:
            return []
        first, last = self._starts[numbers[at]], self._starts[numbers[at] + 1]
        found = first + bisect_left(
            range(first, last), wanted, key=lambda position: _sort_key(self._raw(position), by_length)
        )
        return [found] if self._raw(found) == raw else []


def _starts(parts: KeyRows) -> list[int]:
    counts = [len(keys) if rows is None else len(rows) for keys, rows in parts]
    return np.cumsum([0, *counts], dtype=np.int64).tolist()  # type: ignore[no-any-return]


def _raw(parts: KeyRows, starts: Sequence[int], position: int) -> bytes:
    number = bisect_right(starts, position) - 1
    keys, rows = parts[number]
    row = position - starts[number]
    return keys.raw(row if rows is None else rows.item(row))


def _sort_key(raw: bytes, by_length: bool) -> Any:
    return (len(raw), raw) if by_length else raw


class _Hashes:
    """The 64-bit hashes of all keys, sorted; in each, the key's position replaces the low bits.

    Hazard: a hostile shard could contain keys with equal hashes, which are slow to look up. So the hash is Python's hash of
    bytes, which has a secret seed.
    """

    def __init__(self, parts: KeyRows, starts: Sequence[int]) -> None:
        self._bits = np.uint64(starts[-1].bit_length())
        self._packed = np.empty(starts[-1], np.uint64)
        for (keys, rows), (first, last) in zip(parts, pairwise(starts), strict=True):
            hashes = np.fromiter(map(hash, keys.raws()), np.int64, len(keys)).view(np.uint64)
            hashes = hashes if rows is None else hashes[rows]
            self._packed[first:last] = (hashes >> self._bits << self._bits) | np.arange(first, last, dtype=np.uint64)
        self._packed.sort()
        self._mask = (np.uint64(1) << self._bits) - np.uint64(1)

    def find(self, raw: bytes) -> list[int]:
        """Return the positions of the keys with the same hash as `raw`, ascending."""
        least = np.int64(hash(raw)).view(np.uint64) >> self._bits << self._bits
        first = int(np.searchsorted(self._packed, least))
        last = int(np.searchsorted(self._packed, least | self._mask, "right"))
        return (self._packed[first:last] & self._mask).tolist()  # type: ignore[no-any-return]

    def _are_unique(self) -> Array:
        """Return a mask of the hashes that occur once."""
        differ = np.ones(len(self._packed) + 1, np.bool_)
        differ[1:-1] = (self._packed[1:] ^ self._packed[:-1]) >> self._bits != 0
        return differ[:-1] & differ[1:]

    def positions_with_shared_hash(self) -> list[int]:
        """Return the positions of all keys that share their hash with another key."""
        return (self._packed[~self._are_unique()] & self._mask).tolist()  # type: ignore[no-any-return]

    def pair_by_hash(self, other: _Hashes) -> tuple[Array, Array, Array] | None:
        """Pair keys by hash: return their positions here, their positions in `other`, and a mask of unique hashes.

        Returns None if the two sets of hashes differ.
        """
        if len(self._packed) != len(other._packed) or bool(((self._packed ^ other._packed) >> self._bits).any()):
            return None
        here, there = ((each._packed & self._mask).view(np.int64) for each in (self, other))
        return here, there, self._are_unique()


def match_unique_keys(parts: KeyRows, others: KeyRows) -> Array | None:
    """Return, for each key of `parts` in the order of the shards, its position in `others`, `[n]`.

    Returns None if their keys differ, or if a key occurs twice. Memory during the call: about 40 bytes per key, plus the keys.
    """
    starts, other_starts = _starts(parts), _starts(others)
    paired = (
        _Hashes(parts, starts).pair_by_hash(_Hashes(others, other_starts)) if starts[-1] == other_starts[-1] else None
    )
    if paired is None:
        return None
    here, there, are_unique = paired
    result = np.empty(len(here), np.min_scalar_type(len(here)))
    result[here] = there
    # the loop is short: few keys share a hash
    places = {_raw(others, other_starts, position): position for position in there[~are_unique].tolist()}
    for position in here[~are_unique].tolist():
        result[position] = places.get(_raw(parts, starts, position), 0)
    del paired, here, there, are_unique
    text, begins, ends = _concatenate(others)
    for (keys, rows), (first, last) in zip(parts, pairwise(starts), strict=True):
        raws = keys.raws()
        mine = raws if rows is None else map(raws.__getitem__, rows.tolist())
        which = result[first:last]
        theirs = (text[a:b] for a, b in zip(begins[which].tolist(), ends[which].tolist(), strict=True))
        if not all(map(eq, mine, theirs)):
            return None
    is_matched = np.zeros(len(result), np.bool_)
    is_matched[result] = True
    return result if is_matched.all() else None  # False if a key occurs twice


def _concatenate(parts: KeyRows) -> tuple[bytes, Array, Array]:
    """Return the text of all keys, and the offsets in it at which each included key begins and ends, int64 `[n]`."""
    begins, ends, nbytes = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for keys, rows in parts:
        which = slice(None) if rows is None else rows
        shard_ends = keys.ends.astype(np.int64) + nbytes
        begins.append(np.concatenate([[nbytes], shard_ends[:-1]])[: len(shard_ends)][which])
        ends.append(shard_ends[which])
        nbytes += len(keys.text)
    return b"".join(keys.text.tobytes() for keys, _ in parts), np.concatenate(begins), np.concatenate(ends)
