"""Positions of members according to an index, for damaged shards; used only where the shard's bytes confirm them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from wds_tensorcache.codec.header import DIGITS_END, parse_header
from wds_tensorcache.codec.sample import check_binding
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import read_index
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.load_index import parse_both
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar import BLOCK, is_header, is_meta_name, names_of, padding, parse_number
from wds_tensorcache.storage.files import ShardFile

_CHUNK_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100  # longer names are in extended headers
_MAX_OCTAL_NBYTES = 1 << 33  # larger sizes may be in extended headers
_FILE = ord("0")
_NAME = re.compile(rb"[!-~]+\.[!-~]+").fullmatch

# How a member's place in the shard is confirmed: by its own tar header or, if that is unreadable, by digests of its bytes. A
# member with neither is `_BY_NEXT` if the place of the member next to it is confirmed: its bytes are not searched for headers.
_UNKNOWN, _UNREADABLE, _BY_HEADER, _BY_DIGEST, _BY_NEXT = range(5)


class Place(NamedTuple):
    """The place of a member according to an index: its content starts at byte `begin`, its padding ends at byte `end`.

    `has_header` is True if a readable header names the member, `is_confirmed` if digests match its bytes, and `follows_known`
    if it is the first member, or the place of the member before it is confirmed.
    """

    name: str
    begin: int
    nbytes: int
    end: int
    has_header: bool
    is_confirmed: bool
    follows_known: bool


def find_places(file: ShardFile) -> Places | None:
    """Return the places in the index at a shard's end, or else in its sidecar, even if stale; None if there is no index."""
    index = next(parse_both(file, lambda each: read_index(each.read, each.nbytes), lenient=True), None)
    return None if index is None else Places(file.read, file.nbytes, index)


class Places:
    """The members that an index lists, in the order of their offsets, and for each whether the shard confirms its place.

    Hazard: an index may be stale or forged, and could name the wrong bytes. So a member is recovered only if its own header
    names it, or if its bytes match the digests in the index, the skeleton and the tensors, and no readable header contradicts
    its key.

    Args:
        read: Function that returns the bytes `[begin, end)` of the file.
        nbytes: Length of the file.
        index: Index of the shard, perhaps a stale one.

    Memory: 41 bytes for each member. The file is not read before the first call of `after`.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int, index: ShardIndex) -> None:
        self._read, self._nbytes, self._index = read, nbytes, index
        table = index.members_in_order()
        self._kinds = list(zip(table.suffixes, table.caches, strict=True))
        self._table = np.array([table.begins, table.sizes, table.rows, table.kinds, table.numbers], np.int64)
        self._states: Any = None

    def after(self, offset: int) -> Place | None:
        """Return the first member whose place is confirmed and whose content starts after byte `offset`.

        If no member follows, return the end of the archive, as a place without a name. Return None if the index is wrong about
        the end, if `offset` is after the end, or if no later place is confirmed.
        """
        begins = self._table[0]
        first, end = int(np.searchsorted(begins, offset, "right")), self._index.end
        if first == len(begins) and offset >= end:
            return None
        if self._states is None:
            self._states = self._look()
        known = self._states >= _BY_HEADER
        if first == len(begins):
            if end + BLOCK > self._nbytes or self._read(end, end + BLOCK).strip(b"\0"):
                return None
            return Place("", end, 0, end, False, False, not first or bool(known[-1]))
        if not known[first:].any():
            return None
        at = first + int(known[first:].argmax())
        begin, nbytes, name, _, _ = self._member(at)
        state, end = self._states.item(at), begin + nbytes + padding(nbytes)
        is_next = at == 0 or bool(known[at - 1])
        return Place(name, begin, nbytes, end, state == _BY_HEADER, state == _BY_DIGEST, is_next)

    def _member(self, at: int) -> tuple[int, int, str, str, str]:
        """Return a member's begin, length, name, key and suffix."""
        begin, nbytes, row, kind, _ = self._table[:, at].tolist()
        key, suffix = self._index.keys[row], self._kinds[kind][0]
        return begin, nbytes, f"{key}.{suffix}", key, suffix

    def _look(self) -> Any:
        """Return how each place is confirmed. Cost: one read per member, and all bytes of caches with unreadable headers."""
        states = np.zeros(self._table.shape[1], np.uint8)
        doubtful: set[str] = set()  # keys on which the index and a header disagree
        for at in range(len(states)):
            states[at] = self._by_header(at, doubtful)
        found: dict[tuple[int, int], bool] = {}
        for at in np.flatnonzero(states == _UNREADABLE).tolist():
            *_, kind, number = self._table[:, at].tolist()
            cache = self._kinds[kind][1]
            if self._member(at)[3] in doubtful:
                states[at] = _UNKNOWN
            elif cache is not None:
                half = id(cache), number
                if half not in found:
                    found[half] = self._has_digests(cache, number)
                states[at] = _BY_DIGEST if found[half] else _UNREADABLE
        for at in np.flatnonzero(states == _UNREADABLE)[::-1].tolist():
            neighbor = at + 1 if at + 1 < len(states) else at - 1
            is_known = neighbor >= 0 and states.item(neighbor) >= _BY_HEADER
            states[at] = _BY_NEXT if is_known else _UNKNOWN
        return states

    def _by_header(self, at: int, doubtful: set[str]) -> int:
        """Return how a header confirms a place; if the header contradicts the index, add the keys of both to `doubtful`."""
        begin, nbytes, name, key, suffix = self._member(at)
        if begin < BLOCK or begin + nbytes > self._nbytes:
            return _UNKNOWN
        if split_member(name) != (key, suffix) or is_meta_name(name):
            doubtful.add(key)
            return _UNKNOWN
        raw = name.encode("utf-8", "surrogateescape")
        # any other name is in an extended header, which may be lost
        is_plain = name.isascii() and len(raw) <= _MAX_FIELD_NBYTES
        try:
            header = self._read(begin - BLOCK, begin)
        except (FormatError, OSError):
            return _UNREADABLE
        if not is_header(header):
            there = header[:_MAX_FIELD_NBYTES].partition(b"\0")[0]
            if not is_plain or not _NAME(there) or there.lower() == raw.lower():
                return _UNREADABLE
            if is_header(raw.ljust(_MAX_FIELD_NBYTES, b"\0") + header[_MAX_FIELD_NBYTES:]):
                return _UNREADABLE  # only the name is damaged
            splits = [split_member(there.decode())]  # if the damage is not in the name, this is another sample's member
        else:
            size = parse_number(header[124:136])
            if header.startswith(raw + b"\0") and size == nbytes and header[156] == _FILE and not header[345]:
                return _BY_HEADER
            names = [name.decode("utf-8", "surrogateescape") for name, _ in names_of(self._read, begin, self._nbytes)]
            splits = [split_member(each) for each in names]
            if (key, suffix) in [(split[0], split[1].lower()) for split in splits if split is not None]:
                return _BY_HEADER if size == nbytes or nbytes >= _MAX_OCTAL_NBYTES else _UNKNOWN
            if not is_plain:
                return _UNREADABLE
        doubtful.update([key, *(split[0] for split in splits if split is not None)])
        return _UNKNOWN

    def _has_digests(self, cache: CacheColumns, number: int) -> bool:
        """Return whether both members of a cache are where the index says, and match the index's digest and their own."""
        layout = self._index.layouts[cache.layout.item(number)]
        begin, digest = cache.tensors_begin.item(number), cache.digest.item(number)
        first = cache.skeleton_begin.item(number)
        last = first + cache.skeleton_nbytes.item(number)
        if not digest or begin + layout.nbytes > self._nbytes or last > self._nbytes:
            return False
        try:
            if parse_header(self._read(begin, begin + layout.data_begin), layout.nbytes) != (layout, digest):
                return False
            skeleton = self._read(first, last)
            body, body_digest = check_binding(skeleton, layout.nbytes, digest)
            if body_digest is None or xxhash.xxh3_64_intdigest(memoryview(skeleton)[body:]) != body_digest:
                return False
            made = xxhash.xxh3_64()
            for at in range(begin + DIGITS_END, begin + layout.nbytes, _CHUNK_NBYTES):
                made.update(self._read(at, min(at + _CHUNK_NBYTES, begin + layout.nbytes)))
        except (TensorCacheError, OSError):
            return False
        return bool(made.intdigest() == digest)
