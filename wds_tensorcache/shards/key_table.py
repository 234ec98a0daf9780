"""Arrays of keys and their lookup, without a Python object per key."""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import lt, mul
from struct import unpack
from typing import Any

import numpy as np

from wds_tensorcache.shards.names import older_key, strip_dots

Array = np.ndarray[Any, Any]
_SECRET = secrets.randbits(128)
_WORD_NBYTES = 4
_MASK = (1 << 64) - 1
_NUM_FACTORS = 64  # enough for keys of up to 251 bytes
_FACTORS: Array = np.random.PCG64(_SECRET).random_raw(_NUM_FACTORS)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a shard, in order.

    `text` contains the keys in UTF-8, without gaps, uint8. `ends` contains the offset in `text` at which each key ends.
    """

    text: Array
    ends: Array

    @classmethod
    def of(cls, raws: Sequence[bytes]) -> Keys:
        return cls(np.frombuffer(b"".join(raws), np.uint8), np.array([*accumulate(map(len, raws))], np.uint64))

    def without_dots(self) -> Keys:
        """Return the keys without leading `./`."""
        # an older index of a tar of `tar -c .` has `./` before all keys
        if not len(self) or not self.raw(0).startswith(b"./"):
            return self
        return Keys.of([strip_dots(raw) for raw in self.raws()])

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
        text, ends = self.text.tobytes(), self.ends.tolist()
        return [text[begin:end] for begin, end in pairwise([0, *ends])]

    def lengths(self) -> Array:
        return np.diff(self.ends.astype(np.int64), prepend=0)

    def ascending(self, rows: Array | None = None) -> Array | None:
        """Return equally long, ascending keys as a bytes array; otherwise None. numpy removes zeros at the end of each key."""
        nbytes, rest = divmod(len(self.text), len(self) or 1)
        if not nbytes or rest or (self.lengths() != nbytes).any():
            return None
        column = self.text.view(f"S{nbytes}")
        column = column if rows is None else column[rows]
        return column if (column[1:] > column[:-1]).all() else None

    def hashes(self, rows: Array | None = None) -> Array:
        """Return the `_hash` of each key, uint64. There must be at least one key."""
        lengths = self.lengths()
        begins = self.ends.astype(np.int64) - lengths
        if rows is not None:
            begins, lengths = begins[rows], lengths[rows]
        words, firsts = _words(self.text, begins, lengths)
        factors = _factors(int(lengths.max()) // _WORD_NBYTES + 2)
        places = np.arange(1, len(words) + 1) - np.repeat(firsts, lengths // _WORD_NBYTES + 1)
        hashes: Array = np.add.reduceat(words * factors[places], firsts) + lengths.astype(np.uint64) * factors[0]
        return hashes


def _words(text: Array, begins: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the words (uint32) of all keys, and each key's first position."""
    # the 4 bytes at each offset of the text as one number
    windows: Array = np.ndarray(
        len(text) + 1, "<u4", np.concatenate([text, np.zeros(_WORD_NBYTES, np.uint8)]), strides=(1,)
    )
    counts = lengths // _WORD_NBYTES + 1
    firsts = np.cumsum(counts) - counts
    offsets = np.repeat(begins - _WORD_NBYTES * firsts, counts) + _WORD_NBYTES * np.arange(counts.sum())
    words: Array = windows[offsets]
    # zeros complete the last word of a key
    words[firsts + counts - 1] &= ((1 << 8 * (lengths % _WORD_NBYTES)) - 1).astype(np.uint32)
    return words, firsts


def _hash(raw: bytes) -> int:
    """Return the 64-bit hash of a key."""
    # The sum of the length and the words, each times a secret factor. Hazard: a hostile shard could contain keys with equal
    # hashes, which are slow to look up. Two keys have the same upper 32 bits with a probability of at most 2^-31, if the
    # factors are random and unknown (multilinear hashing).
    count = len(raw) // _WORD_NBYTES + 1
    words = unpack(f"<{count}I", raw.ljust(_WORD_NBYTES * count, b"\0"))
    total: int = sum(map(mul, (len(raw), *words), _factors(count + 1).tolist()))
    return total & _MASK


def _factors(count: int) -> Array:
    if count > _NUM_FACTORS:
        return np.random.PCG64(_SECRET).random_raw(count)
    return _FACTORS[:count]


class KeyTable:
    """The positions of samples by key, across all shards of a cache.

    Keys are found by bisection if all ascend and each shard's keys have one length, otherwise by their hashes.
    """

    def __init__(self, parts: Iterable[tuple[Keys, Array | None]]) -> None:
        self._parts = [(keys, rows) for keys, rows in parts if len(keys if rows is None else rows)]
        counts = [len(keys) if rows is None else len(rows) for keys, rows in self._parts]
        self._starts: list[int] = np.cumsum([0, *counts], dtype=np.int64).tolist()
        self._bits = np.uint64(self._starts[-1].bit_length())
        self._mask = (np.uint64(1) << self._bits) - np.uint64(1)
        self._lasts = [self.raw(end - 1) for end in self._starts[1:]]
        columns = [column for keys, rows in self._parts if (column := keys.ascending(rows)) is not None]
        ascend = len(columns) == len(counts) and all(map(lt, self._lasts, map(self.raw, self._starts[1:-1])))
        self._columns = columns if ascend else None
        # Hazard: before Python 3.12, a child that is forked during a `cached_property` finds its lock held forever.
        self._packed = self._pack() if self._columns is None else np.empty(0, np.uint64)

    def _pack(self) -> Array:
        """Return the hashes of the keys, ascending, with positions as low bits."""
        packed = np.empty(self._starts[-1], np.uint64)
        for (keys, rows), (first, last) in zip(self._parts, pairwise(self._starts), strict=True):
            packed[first:last] = (keys.hashes(rows) & ~self._mask) | np.arange(first, last, dtype=np.uint64)
        packed.sort()
        return packed

    def find(self, key: str) -> list[int]:
        """Return the ascending positions of a key, at most one per shard.

        If there are none, look up the key that an earlier version of `safe_key` made of the same name.
        """
        positions = self._find(key)
        older = None if positions else older_key(key)
        return positions if older is None else self._find(older)

    def _find(self, key: str) -> list[int]:
        try:
            raw = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # a surrogate that stands for no byte, so no key of a tar has it
            return []
        if self._columns is not None:
            number = bisect_left(self._lasts, raw)
            # otherwise numpy would convert the whole column
            if number == len(self._lasts) or len(raw) != self._columns[number].itemsize:
                return []
            position = self._starts[number] + int(self._columns[number].searchsorted(raw))
            return [position] if self.raw(position) == raw else []
        least = np.uint64(_hash(raw)) & ~self._mask
        first, last = self._packed.searchsorted(least), self._packed.searchsorted(least | self._mask, "right")
        positions: list[int] = (self._packed[first:last] & self._mask).tolist()
        return [position for position in positions if self.raw(position) == raw]

    def raw(self, position: int) -> bytes:
        number = bisect_right(self._starts, position) - 1
        keys, rows = self._parts[number]
        row = position - self._starts[number]
        return keys.raw(row if rows is None else rows.item(row))

    def shared(self) -> list[str]:
        """Return the keys that occur in several shards."""
        if self._columns is not None:
            return []
        differ = np.ones(len(self._packed) + 1, np.bool_)
        differ[1:-1] = (self._packed[1:] ^ self._packed[:-1]) >> self._bits != 0
        positions = self._packed[~(differ[:-1] & differ[1:])] & self._mask
        counts = Counter(map(self.raw, positions.tolist()))
        return sorted(raw.decode("utf-8", "surrogateescape") for raw, count in counts.items() if count > 1)
