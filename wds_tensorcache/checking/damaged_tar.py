"""Members of a damaged tar, found by an index or by headers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from wds_tensorcache.codec.header import DIGITS_END, parse_header
from wds_tensorcache.codec.sample import check_binding
from wds_tensorcache.errors import FormatError, Kind, TensorCacheError
from wds_tensorcache.shards.footer import read_index, read_trailer
from wds_tensorcache.shards.index import CacheColumns
from wds_tensorcache.shards.index_builder import IndexBuilder
from wds_tensorcache.shards.load_index import parse_both
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar import (
    BLOCK,
    Scanner,
    find_header,
    is_extended,
    is_header,
    is_meta_name,
    names_of,
    padding,
    parse_number,
    parse_records,
)
from wds_tensorcache.storage.files import ShardFile

_CHUNK_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100  # longer names are in extended headers
_MAGIC, _TYPE_BEGIN = slice(257, 262), 156
_MAX_RECORDS_NBYTES = 1 << 20
_NAMING, _EMPTY = frozenset(b"xXLK"), frozenset(b"123456")  # headers that name the next member; links, folders, devices
_RECORD = re.compile(rb"[0-9]+ [^=\n]+=")


class Member(NamedTuple):
    """An ordinary file in a tar.

    Its headers start at byte `first`, perhaps after entries that belong to no sample. Its content starts at byte `begin`, and
    its padding ends at byte `end`. If `is_rebuilt`, there is no readable header: name and place come from an index, and
    digests confirm the bytes.
    """

    name: str
    first: int
    begin: int
    nbytes: int
    end: int
    is_rebuilt: bool = False


class Break(NamedTuple):
    """Bytes `[offset, end)` in which no member could be read. The range is empty if only the end of the archive is missing."""

    offset: int
    end: int
    reason: str
    kind: Kind


class End(NamedTuple):
    """The end of the archive, at byte `offset`. `unseen` is the offset of a member after the end; readers do not see it."""

    offset: int
    unseen: int | None = None


class Salvage:
    """The contents of a damaged tar, in order: members, `Break` and `End`.

    After damage, reading resumes at the next member of an index whose place is confirmed. Without an index, it resumes at the
    next block with a valid checksum and the name of a sample's member. Hazard: a member may itself be a tar. If its header is
    lost and there is no index, its files are mistaken for members.

    Stock readers stop at the first block of zeros. Zeros are damage if an index says that the archive ends later, or if only
    one block is zero. Members after two or more blocks of zeros, such as the members of an appended tar, belong to no archive.
    """

    def __init__(self, file: ShardFile, read: Callable[[int, int], bytes]) -> None:
        self._file, self._read, self._nbytes = file, read, file.nbytes
        trailers = parse_both(file, lambda part: read_trailer(part.read, part.nbytes, file.nbytes), lenient=True)
        self._end = next((trailer.end for trailer in trailers), None)  # of the archive, according to an index
        self._places: _Places | None = None  # found at the first damage

    def __iter__(self) -> Iterator[Member | Break | End]:
        scan_begin: int | None = 0
        while scan_begin is not None:
            first, scanner = scan_begin, Scanner(self._read, self._nbytes, scan_begin)
            reason = "zeros before the end of the archive"
            kind: Kind = "zeros"
            try:
                for name, content, nbytes in scanner:
                    end = content + nbytes + padding(nbytes)
                    yield Member(name, first, content, nbytes, end)
                    first = end
                failed = scanner.end
            except FormatError as exc:
                reason, kind = exc.reason, exc.kind
                # an error in an extended header has an offset in the header's content
                is_inner = exc.offset is None or kind in ("extended-header", "sparse")
                failed = scanner.header_begin if is_inner else exc.offset or 0
            except OSError as exc:
                failed, reason, kind = first, f"cannot be read: {exc}", "unreadable"
            place, scan_begin = None, None
            with contextlib.suppress(OSError, FormatError):
                place, scan_begin = self._resume(failed, kind)
            if kind == "zeros" and place is None and scan_begin is None:
                yield End(failed, self._find_unseen(failed))
                return
            stop = place.first if place is not None else self._nbytes if scan_begin is None else scan_begin
            if stop > first or place is None:
                yield Break(min(first, self._nbytes), stop, reason, kind)
            if place is not None:
                yield place
                scan_begin = place.end

    def _resume(self, failed: int, kind: Kind) -> tuple[Member | None, int | None]:
        """Return the next member, or else the offset where a scan resumes."""
        if kind == "zeros" and failed == self._end:
            return None, None
        if self._places is None:
            self._places = _Places(self._file)
        place = self._places.after(failed)
        if place is not None or kind in ("truncated", "compressed", "unreadable"):
            return place, None  # the rest of the file is content of one member
        is_early = self._end is not None and failed < self._end
        if kind == "zeros" and not is_early and not self._read_block(failed + BLOCK).strip(b"\0"):
            return None, None
        if is_early and self._places.is_last(failed):
            return None, self._end
        return None, self._search(failed, self._end if is_early else None)

    def _search(self, failed: int, end: int | None) -> int | None:
        """Return the offset of a sample's next header, or else `end`."""
        limit, at = self._nbytes if end is None else end, self._end_of(failed)
        block = self._read_block(at)
        if at > failed and (is_header(block) or not block.strip(b"\0")):
            return at
        begin = find_header(self._read, at + BLOCK, limit)
        if begin is not None:
            begin = self._end_of(begin) if self._may_name(at, begin) else begin
            begin = find_header(self._read, begin, limit, _may_begin_sample)
        return end if begin is None else begin

    def _read_block(self, begin: int) -> bytes:
        return self._read(min(begin, self._nbytes), min(begin + BLOCK, self._nbytes))

    def _end_of(self, at: int) -> int:
        """Return where the member at `at` ends, or a damaged header begins."""
        while is_header(header := self._read_block(at)):
            nbytes = 0 if header[_TYPE_BEGIN] in _EMPTY else max(0, parse_number(header[124:136]))
            at += BLOCK + nbytes + padding(nbytes)
            if header[_TYPE_BEGIN] not in _NAMING:
                break
        return at

    def _may_name(self, failed: int, begin: int) -> bool:
        """Return whether a damaged header may have named the member at `begin`."""
        header = self._read_block(failed)
        content = self._read(failed + BLOCK, min(begin, failed + _MAX_RECORDS_NBYTES)).rstrip(b"\0")
        is_naming = header[_MAGIC] == b"ustar" and header[_TYPE_BEGIN] in _NAMING
        has_full_name = b"\0" not in self._read_block(begin)[:_MAX_FIELD_NBYTES]
        if not is_naming and not has_full_name and not _RECORD.match(content):
            return False
        try:
            # most extended headers have only times, which `parse_records` leaves out
            return not content or bool(parse_records(content, 0))
        except FormatError:
            return True

    def _find_unseen(self, end: int) -> int | None:
        with contextlib.suppress(OSError, FormatError):
            return None if end == self._end else find_header(self._read, end, self._nbytes)
        return None


def _may_begin_sample(header: bytes) -> bool:
    name = header[:_MAX_FIELD_NBYTES].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return is_header(header) and (is_extended(header) or split_member(name) is not None)


class _Places:
    """The confirmed members in a shard's index, or else in its sidecar."""

    def __init__(self, file: ShardFile) -> None:
        indexes = parse_both(file, lambda part: read_index(part.read, part.nbytes), lenient=True)
        self._file, self._index = file, next(indexes, IndexBuilder().finish(0))
        self._table = self._index.members_in_order()
        self._at = -1  # position of the last answer of `after`
        self._member: Member | None = None
        # an index that a header contradicts is not used
        self._is_stale = any(map(self._is_contradicted, range(len(self._table.begins))))
        if self._is_stale:
            self._at = len(self._table.begins)

    def after(self, offset: int) -> Member | None:
        """Return the first confirmed member whose content starts after byte `offset`."""
        first, count = int(np.searchsorted(self._table.begins, offset, "right")), len(self._table.begins)
        # offsets never decrease, so an answer holds until its member is passed
        if first > self._at:
            self._at, self._member = count, None
            for at in range(first, count):
                with contextlib.suppress(OSError, TensorCacheError):
                    self._member = self._confirm(at)
                if self._member is not None:
                    self._at = at
                    break
        return self._member

    def is_last(self, offset: int) -> bool:
        """Return whether a current index lists at most one member after `offset`."""
        return not self._is_stale and bool((self._table.begins > offset).sum() <= 1)

    def _member_at(self, at: int) -> tuple[str, str, int, int]:
        """Return key, suffix, offset and length of a member."""
        table = self._table
        key, suffix = self._index.keys[table.rows.item(at)], table.suffixes[table.kinds.item(at)]
        return key, suffix, table.begins.item(at), table.sizes.item(at)

    def _header_of(self, at: int) -> int | None:
        """Return the offset of the first header that names a member."""
        key, suffix, begin, nbytes = self._member_at(at)
        for raw, size, header_begin in names_of(self._file.read, begin, self._file.nbytes):
            split = split_member(raw.decode("utf-8", "surrogateescape"))
            if size == nbytes and split is not None and (split[0], split[1].lower()) == (key, suffix):
                return header_begin
        return None

    def _is_contradicted(self, at: int) -> bool:
        """Return whether the intact header before a member names another member."""
        key, suffix, begin, nbytes = self._member_at(at)
        # a longer or non-ASCII name is in an extended header, which may be lost
        is_plain = key.isascii() and suffix.isascii() and len(f"{key}.{suffix}") <= _MAX_FIELD_NBYTES
        with contextlib.suppress(OSError):
            is_there = is_plain and begin + nbytes <= self._file.nbytes  # the shard may be cut short
            return is_there and is_header(self._file.read(begin - BLOCK, begin)) and self._header_of(at) is None
        return False

    def _confirm(self, at: int) -> Member | None:
        key, suffix, begin, nbytes = self._member_at(at)
        if begin + nbytes > self._file.nbytes:
            return None
        name, end, header_begin = f"{key}.{suffix}", begin + nbytes + padding(nbytes), self._header_of(at)
        # Hazard: the index may be stale. So a header must name the member, or all digests must match its bytes.
        if header_begin is not None:
            return Member(name, header_begin, begin, nbytes, end)
        cache = self._table.caches[self._table.kinds.item(at)]
        is_possible = split_member(name) == (key, suffix) and not is_meta_name(name)
        if cache is None or not is_possible or not self._has_digests(cache, self._table.numbers.item(at)):
            return None
        return Member(name, begin, begin, nbytes, end, True)

    def _has_digests(self, cache: CacheColumns, at: int) -> bool:
        """Return whether both members of a cache match all their digests."""
        read, layout = self._file.read, self._index.layouts[cache.layout.item(at)]
        begin, digest = cache.tensors_begin.item(at), cache.digest.item(at)
        skeleton_begin, skeleton_nbytes = cache.skeleton_begin.item(at), cache.skeleton_nbytes.item(at)
        if not digest or parse_header(read(begin, begin + layout.data_begin), layout.nbytes) != (layout, digest):
            return False
        skeleton = read(skeleton_begin, skeleton_begin + skeleton_nbytes)
        body, body_digest = check_binding(skeleton, layout.nbytes, digest)
        if xxhash.xxh3_64_intdigest(memoryview(skeleton)[body:]) != body_digest:
            return False
        tensors, end = xxhash.xxh3_64(), begin + layout.nbytes
        for chunk_begin in range(begin + DIGITS_END, end, _CHUNK_NBYTES):
            tensors.update(read(chunk_begin, min(chunk_begin + _CHUNK_NBYTES, end)))
        return bool(tensors.intdigest() == digest)
