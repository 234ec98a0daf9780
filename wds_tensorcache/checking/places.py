"""Places of members by an index, as far as the bytes of the shard confirm them: the way past headers that were lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from wds_tensorcache.codec.header import DIGITS_END, parse_header
from wds_tensorcache.codec.sample import check_binding
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import stale_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.names import SKELETON, TENSORS, member_suffix, split_member
from wds_tensorcache.shards.sidecar import stored
from wds_tensorcache.shards.tar.archive import BLOCK, is_meta_name, names_of, padding
from wds_tensorcache.shards.tar.fields import adds_up, parse_number
from wds_tensorcache.storage.files import ShardFile

__all__ = ["Place", "Places", "find_places"]

_Read = Callable[[int, int], bytes]
_CHUNK_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100  # a longer name is in an extended header
_MAX_OCTAL_NBYTES = 1 << 33  # a larger size may be in one
_FILE = ord("0")
_NAME = re.compile(rb"[!-~]+\.[!-~]+").fullmatch

# What is known of a place. Without a readable header, only digests tell that a member is there. A member that has neither,
# but is followed by one that is where the index has it, keeps its bytes from being searched for headers.
_UNKNOWN, _UNREADABLE, _BY_HEADER, _BY_DIGEST, _BY_NEXT = range(5)


def find_places(file: ShardFile) -> Places | None:
    """Return where members are by the index at a shard's end, or else by its sidecar; either may be stale."""
    index = next(stored(file, lambda each: stale_footer(each.read, each.nbytes), lenient=True), None)
    return None if index is None else Places(file.read, file.nbytes, index)


class Place(NamedTuple):
    """A member of an index: its content begins at byte `begin`, its padding ends at byte `end`.

    `is_next_to_last` says that no member of unknown place is just before it; `is_confirmed` that digests match its bytes.
    """

    name: str
    begin: int
    nbytes: int
    end: int
    has_header: bool
    is_confirmed: bool
    is_next_to_last: bool


class Places:
    """The members of an index in the order of their bytes.

    Hazard: an index may be stale or forged. So a member counts only if its own header names it, or if its digests in the index,
    the skeleton and the tensors match its bytes and no readable header contradicts its key.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        nbytes: Length of the file.
        index: Index of the shard, perhaps a stale one.

    Memory: 25 bytes for each member. Nothing is read before `after` is called.
    """

    def __init__(self, read: _Read, nbytes: int, index: ShardIndex) -> None:
        self._read, self._nbytes, self._index = read, nbytes, index
        self._suffixes: list[str] = []
        self._caches: list[CacheColumns | None] = []  # of each suffix, None for other members
        parts: list[tuple[Any, Any, Any]] = []
        everything = np.arange(len(index.keys))
        for name, cache in index.caches.items():
            rows = everything if cache.rows is None else cache.rows
            self._suffixes += [member_suffix(name, SKELETON), member_suffix(name, TENSORS)]
            self._caches += [cache, cache]
            parts.append((rows, cache.skeleton_begin, cache.skeleton_nbytes))
            parts.append((rows, cache.tensors_begin, index.layouts.nbytes[cache.layout]))
        for suffix, member in index.members.items():
            self._suffixes.append(suffix)
            self._caches.append(None)
            parts.append((everything if member.rows is None else member.rows, member.begin, member.nbytes))
        kinds = np.concatenate([np.full(len(part[0]), kind) for kind, part in enumerate(parts)] or [everything[:0]])
        numbers = np.concatenate([np.arange(len(part[0])) for part in parts] or [everything[:0]])
        columns = [np.concatenate([part[i].astype(np.int64) for part in parts] or [everything[:0]]) for i in range(3)]
        order = np.argsort(columns[1], kind="stable")
        self._rows, self._begins, self._sizes = (column[order] for column in columns)
        self._kinds, self._numbers = kinds[order], numbers[order]
        self._states: Any = None

    def after(self, offset: int) -> Place | None:
        """Return the first member of known place whose content begins after byte `offset`.

        After the last one, return a place without a name, the end of the archive; None if that is not where the index has it.
        """
        first = int(np.searchsorted(self._begins, offset, "right"))
        if first == len(self._begins) and offset >= self._index.end:
            return None
        if self._states is None:
            self._states = self._look()
        if first == len(self._begins):
            return self._end()
        known = np.flatnonzero(self._states[first:] >= _BY_HEADER)
        if not len(known):
            return None
        at = first + int(known[0])
        begin, nbytes, state = self._begins.item(at), self._sizes.item(at), self._states.item(at)
        is_next = at == first and (at == 0 or self._states.item(at - 1) >= _BY_HEADER)
        end = begin + nbytes + padding(nbytes)
        return Place(self._name(at), begin, nbytes, end, state == _BY_HEADER, state == _BY_DIGEST, is_next)

    def _end(self) -> Place | None:
        end = self._index.end
        if end + BLOCK > self._nbytes or self._read(end, end + BLOCK).strip(b"\0"):
            return None
        is_known = not len(self._states) or self._states.item(-1) >= _BY_HEADER
        return Place("", end, 0, end, False, False, is_known)

    def _key(self, at: int) -> str:
        return self._index.keys[self._rows.item(at)]

    def _name(self, at: int) -> str:
        return f"{self._key(at)}.{self._suffixes[self._kinds.item(at)]}"

    def _look(self) -> Any:
        """Return what is known of each place. One read for each member, and all bytes of those without a header."""
        states = np.zeros(len(self._begins), np.uint8)
        doubtful: set[str] = set()  # keys of which the index and a header say something else
        for at in range(len(states)):
            states[at] = self._by_header(at, doubtful)
        found: dict[tuple[int, int], bool] = {}
        for at in np.flatnonzero(states == _UNREADABLE).tolist():
            cache = self._caches[self._kinds.item(at)]
            if self._key(at) in doubtful:
                states[at] = _UNKNOWN
            elif cache is not None:
                half = id(cache), self._numbers.item(at)
                if half not in found:
                    found[half] = self._has_digests(cache, half[1])
                states[at] = _BY_DIGEST if found[half] else _UNREADABLE
        for at in np.flatnonzero(states == _UNREADABLE)[::-1].tolist():
            beside = at + 1 if at + 1 < len(states) else at - 1
            is_known = beside >= 0 and states.item(beside) >= _BY_HEADER
            states[at] = _BY_NEXT if is_known else _UNKNOWN
        return states

    def _by_header(self, at: int, doubtful: set[str]) -> int:
        """Return what the header before a place says; put into `doubtful` the keys that it contradicts."""
        begin, nbytes, name = self._begins.item(at), self._sizes.item(at), self._name(at)
        key, suffix = self._key(at), self._suffixes[self._kinds.item(at)]
        if begin < BLOCK or begin + nbytes > self._nbytes:
            return _UNKNOWN
        if split_member(name) != (key, suffix) or is_meta_name(name):
            doubtful.add(key)
            return _UNKNOWN
        raw = name.encode("utf-8", "surrogateescape")
        # other names are in an extended header, which may be lost
        is_plain = name.isascii() and len(raw) <= _MAX_FIELD_NBYTES
        try:
            header = self._read(begin - BLOCK, begin)
        except (FormatError, OSError):
            return _UNREADABLE
        if not adds_up(header):
            there = header[:_MAX_FIELD_NBYTES].partition(b"\0")[0]
            if not is_plain or not _NAME(there) or there.lower() == raw.lower():
                return _UNREADABLE
            if adds_up(raw.ljust(_MAX_FIELD_NBYTES, b"\0") + header[_MAX_FIELD_NBYTES:]):
                return _UNREADABLE  # the name alone is damaged
            # damaged elsewhere: it may still name a member of another key
            split = split_member(there.decode())
            doubtful.update([key] if split is None else [key, split[0]])
            return _UNKNOWN
        size = parse_number(header[124:136])
        if header.startswith(raw + b"\0") and size == nbytes and header[156] == _FILE and not header[345]:
            return _BY_HEADER
        names = [found.decode("utf-8", "surrogateescape") for found in names_of(self._read, begin, self._nbytes)]
        splits = [split for split in map(split_member, names) if split is not None]
        if (key, suffix) in [(found, other.lower()) for found, other in splits]:
            return _BY_HEADER if size == nbytes or nbytes >= _MAX_OCTAL_NBYTES else _UNKNOWN
        if not is_plain:
            return _UNREADABLE
        doubtful.update([key, *(found for found, _ in splits)])
        return _UNKNOWN

    def _has_digests(self, cache: CacheColumns, number: int) -> bool:
        """Return whether both members of a cache are where the index has them, with the digests that all three declare."""
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
