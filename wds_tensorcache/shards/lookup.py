"""Keys of samples: those of a shard as arrays, and where a key is among those of many shards, without an object per key."""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["KeyTable", "Keys", "are_ascending", "hash_key", "hash_keys", "match_keys"]

Array = np.ndarray[Any, Any]
_LONG_NBYTES = 128  # keys beyond are rare: a loop over them
_MASKS = np.array([(1 << 64) - (1 << 8 * (8 - nbytes)) for nbytes in range(9)], np.uint64)  # of a word's first bytes
_LOW, _HALF = np.uint64((1 << 32) - 1), np.uint64(32)
# Hazard: an author who knows the factors can write keys that all have one hash. So each process draws its own.
_FACTORS = np.array([secrets.randbits(64) for _ in range(1 + _LONG_NBYTES // 4)], np.uint64)
_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)  # a factor of SplitMix64's
_SECRET = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a shard in its order: `text` holds them one behind the other, `ends` where each ends."""

    text: Array
    ends: Array
    _ascend: tuple[bool, bool] | None = field(init=False, default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, row: int) -> bytes:
        """Return one key as UTF-8."""
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

    def ascend(self, by_length: bool) -> bool:
        """Return whether each key is greater than the one before, by its bytes or by its length and then its bytes."""
        if self._ascend is None:
            object.__setattr__(self, "_ascend", are_ascending(self.text, self.ends))
        return self._ascend[by_length]  # type: ignore[index]


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


class Words:
    """Keys as words: eight bytes as a big-endian number, with zeros after a key's end.

    Args:
        text: Bytes of the keys, and eight more, uint8.
        begins, lengths: Begin and length of each key in `text`, in bytes, int64 `[n]`.
        width: The length of every key, where they follow each other; None if they do not.
    """

    def __init__(self, text: Array, begins: Array, lengths: Array, width: int | None = None) -> None:
        self._text, self._begins, self.lengths, self.width = text, begins, lengths, width
        self._first: Array | None = None

    @classmethod
    def of(cls, text: Array, ends: Array) -> Words:
        """Return the words of keys that follow each other in `text`."""
        ends = ends.astype(np.int64)
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
        lengths = ends - begins
        width = int(lengths[0]) if len(ends) and bool((lengths == lengths[0]).all()) else None
        return cls(np.concatenate([text, np.zeros(8, np.uint8)]), begins, lengths, width)

    def at(self, numbers: Array) -> Words:
        """Return the words of some of the keys."""
        return Words(self._text, self._begins[numbers], self.lengths[numbers])

    def raw(self, number: int) -> bytes:
        """Return a key."""
        begin = self._begins.item(number)
        return self._text[begin : begin + self.lengths.item(number)].tobytes()

    def __call__(self, number: int, which: Array | None = None) -> Array:
        """Return the word from byte `8 * number` of each key, or of the keys `which`."""
        at = 8 * number
        if which is None and self.width is not None:
            if at >= self.width:
                return np.zeros(len(self.lengths), np.uint64)
            # no gather: the words are at equal distances
            words: Array = np.ndarray((len(self.lengths),), ">u8", self._text, at, (self.width,)).astype(np.uint64)
            words &= _MASKS[min(8, self.width - at)]
            return words
        everywhere = np.ndarray((len(self._text) - 7,), ">u8", self._text, 0, (1,))
        if not number:
            if self._first is None:
                self._first = everywhere[self._begins].astype(np.uint64) & _MASKS[np.minimum(self.lengths, 8)]
            return self._first if which is None else self._first[which]
        begins, lengths = (self._begins, self.lengths) if which is None else (self._begins[which], self.lengths[which])
        words = everywhere[np.minimum(begins + at, len(everywhere) - 1)].astype(np.uint64)
        words &= _MASKS[np.clip(lengths - at, 0, 8)]
        return words


def are_ascending(text: Array, ends: Array) -> tuple[bool, bool]:
    """Return whether keys ascend, none twice: by their bytes; and by their lengths, then their bytes, as numbers do."""
    words = Words.of(text, ends)
    by_bytes = _are_ascending(words, None)
    if words.width is not None:
        return by_bytes, by_bytes
    if bool((words.lengths[1:] < words.lengths[:-1]).any()):
        return by_bytes, False
    return by_bytes, _are_ascending(words, np.flatnonzero(words.lengths[1:] == words.lengths[:-1]))


def _are_ascending(words: Words, which: Array | None) -> bool:
    """Return whether each key of `which` (None: all) is before the next one by its bytes; linear in the bytes of the keys."""
    for number in range(_LONG_NBYTES // 8):
        if which is None:
            every = words(number)
            left, right = every[:-1], every[1:]
        else:
            left, right = words(number, which), words(number, which + 1)
        if bool((left > right).any()):
            return False
        same = left == right
        if not same.all():
            which = np.flatnonzero(same) if which is None else which[same]
        elif which is None and words.width is not None and words.width > 8 * number + 8:
            continue  # a prefix that all have
        elif which is None:
            which = np.arange(len(same))
        longest = np.maximum(words.lengths[which], words.lengths[which + 1])
        over = longest <= 8 * number + 8
        if bool((words.lengths[which] >= words.lengths[which + 1])[over].any()):
            return False
        which = which[~over]
        if not len(which):
            return True
    pairs = range(len(words.lengths) - 1) if which is None else which.tolist()
    return all(words.raw(at) < words.raw(at + 1) for at in pairs)


def are_same(left: Words, right: Words) -> bool:
    """Return whether keys are the same, one by one."""
    lengths = left.lengths
    if len(lengths) != len(right.lengths) or not bool((lengths == right.lengths).all()):
        return False
    which: Array | None = None
    for number in range(-(-min(int(lengths.max(initial=0)), _LONG_NBYTES) // 8)):
        if number and (which is not None or bool((lengths <= 8 * number).any())):
            which = np.flatnonzero(lengths > 8 * number) if which is None else which[lengths[which] > 8 * number]
        if not bool((left(number, which) == right(number, which)).all()):
            return False
    return all(left.raw(at) == right.raw(at) for at in np.flatnonzero(lengths > _LONG_NBYTES).tolist())


def hash_keys(text: Array, ends: Array) -> Array:
    """Return `hash_key` of every key, uint64 `[n]`."""
    words = Words.of(text, ends)
    lengths = words.lengths
    result: Array = lengths.astype(np.uint64) * _FACTORS[0]
    # the longest first, so that those which have a word are the first ones
    order = None if words.width is not None else np.argsort(-lengths, kind="stable")
    longest = int(lengths.max()) if len(lengths) else 0
    for number in range(-(-min(longest, _LONG_NBYTES) // 8)):
        which = None if order is None else order[: np.searchsorted(-lengths[order], -8 * number)]
        word = words(number, which)
        term = (word >> _HALF) * _FACTORS[1 + 2 * number] + (word & _LOW) * _FACTORS[2 + 2 * number]
        if which is None:
            result += term
        else:
            result[which] += term
    # Keys at equal distances have sums at equal distances: without this, one chance collision would be one of all.
    result ^= result >> _SHIFT
    result *= _MIX
    result ^= result >> _SHIFT
    if longest > _LONG_NBYTES:
        for at in np.flatnonzero(lengths > _LONG_NBYTES).tolist():
            result[at] = hash_key(words.raw(at))
    return result


def hash_key(key: bytes) -> int:
    """Return a hash of 64 bits: the sum of the key's words of four bytes times secret factors, mixed.

    Two keys have the same one by chance alone, at most once in 2^32, whatever they are (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014); keys that were not chosen to collide, once in 2^64.
    """
    if len(key) > _LONG_NBYTES:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=_SECRET).digest(), "big")
    factors = _FACTORS.tolist()
    result = len(key) * factors[0]
    for number, at in enumerate(range(0, len(key), 4), start=1):
        result += int.from_bytes(key[at : at + 4].ljust(4, b"\0"), "big") * factors[number]
    result &= (1 << 64) - 1
    result = (result ^ result >> int(_SHIFT)) * int(_MIX) & (1 << 64) - 1
    return int(result ^ result >> int(_SHIFT))
