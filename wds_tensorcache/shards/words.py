"""Keys eight bytes at a time, for all keys of a shard in a few array operations: whether they ascend, and their hashes."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np

__all__ = ["Words", "are_ascending", "are_same", "hash_key", "hash_keys"]

Array = np.ndarray[Any, Any]
_LONG_NBYTES = 128  # keys beyond are rare: a loop over them
_MASKS = np.array([(1 << 64) - (1 << 8 * (8 - nbytes)) for nbytes in range(9)], np.uint64)  # of a word's first bytes
_LOW, _HALF = np.uint64((1 << 32) - 1), np.uint64(32)
# Hazard: an author who knows the factors can write keys that all have one hash. So each process draws its own.
_FACTORS = np.array([secrets.randbits(64) for _ in range(1 + _LONG_NBYTES // 4)], np.uint64)
_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)  # a factor of SplitMix64's
_SECRET = secrets.token_bytes(16)


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
