"""Find the members of a damaged tar by its headers. After a damaged header, use an index, or search for the next header."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.checking.indexed_places import Place, Places
from wds_tensorcache.errors import FormatError, Kind
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar import BLOCK, Scanner, is_extended, is_header, padding, parse_number, parse_records

_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 1 << 13, 1 << 20
_MAGIC, _MAGIC_BEGIN = np.frombuffer(b"ustar", np.uint8), 257
_TYPE_BEGIN = 156
_NAMING = frozenset(b"xXL")  # extended headers that may hold the next member's name or size
_EMPTY = frozenset(b"123456")  # links, devices, directories, FIFOs
_SPARSE, _COMMON = ord("S"), ord("g")
_IS_MAP, _IS_MAP_BLOCK = 482, 504  # flags of a sparse member's header, and of the blocks of its map
_MAX_RECORDS_NBYTES = 1 << 20
_FORMAT: Kind = "format"
_IN_EXTENDED = frozenset({"extended-header", "sparse"})  # faults of what follows an intact header
_RECORD = re.compile(rb"[0-9]+ [^=\n]+=")


class Member(NamedTuple):
    """An ordinary file: its content starts at byte `begin`, its padding ends at byte `end`.

    Its headers are after byte `first`, the end of the member before it, perhaps after entries that belong to no sample.

    If `is_rebuilt`, its header is unreadable: its name and position come from an index, and digests confirm its bytes.
    """

    name: str
    first: int
    begin: int
    nbytes: int
    end: int
    is_rebuilt: bool = False


class Break(NamedTuple):
    """Bytes `[offset, end)` in which no member could be read; an empty range if the file ends too soon."""

    offset: int
    end: int
    reason: str
    kind: Kind


class End(NamedTuple):
    """The end of the archive, at byte `offset`. `unseen` is the offset of a member after the end; readers do not see it."""

    offset: int
    unseen: int | None = None


@dataclass(frozen=True, slots=True)
class Salvage:
    """The contents of a damaged tar, in order: its members, unreadable ranges (`Break`) and `End`.

    After a damaged header, reading resumes at the next member in the index. Without an index, it resumes at the next block
    that is a header, with a valid checksum and a member's name. Hazard: if the damaged header is that of a tar stored as a
    member, the files inside that tar are then taken for members.

    Stock readers stop at the first block of zeros. Zeros are damage if an index says that the archive ends later. A single
    block of zeros before a member is also damage: a lost header. Members after two or more blocks of zeros, such as those of
    an appended tar, are not part of the archive for any reader.

    Args:
        read: Function that returns the bytes `[begin, end)` of the file.
        nbytes: Length of the file.
        end: Offset of the end of the archive according to an index; members are searched up to there, even after zeros.
        find_places: Function that returns the places of members according to an index, if any; called at the first damage.
    """

    read: Callable[[int, int], bytes]
    nbytes: int
    end: int | None = None
    find_places: Callable[[], Places | None] = lambda: None

    def __iter__(self) -> Iterator[Member | Break | End]:
        scan_begin: int | None = 0
        while scan_begin is not None:
            scanner = Scanner(self.read, self.nbytes, scan_begin)
            first, unseen, place = scan_begin, None, None
            reason, kind = "", _FORMAT
            try:
                for name, begin, size in scanner:
                    end_of_member = begin + size + padding(size)
                    yield Member(name, first, begin, size, end_of_member)
                    first = end_of_member
            except (FormatError, OSError) as exc:
                limit, reason, kind = first, f"cannot be read: {exc}", "unreadable"
                if isinstance(exc, FormatError):
                    limit, reason, kind = first if exc.offset is None else exc.offset, exc.reason, exc.kind
                failed = scanner.header_begin if kind in _IN_EXTENDED else limit
                scan_begin = None
                with contextlib.suppress(OSError, FormatError):
                    scan_begin, place = self._resume(max(first, failed), limit, kind)
            else:
                limit, scan_begin = scanner.end, None
                with contextlib.suppress(OSError, FormatError):
                    scan_begin, place, unseen = self._resume_after_zeros(limit)
                if scan_begin is not None:
                    reason, kind = "zeros before the end of the archive", "zeros"
            if not reason:
                yield End(limit, unseen)
                return
            rebuilt = place if place is not None and place.is_confirmed else None
            stop = self.nbytes if scan_begin is None else scan_begin if rebuilt is None else rebuilt.begin
            yield Break(min(first, self.nbytes), stop, reason, kind)
            if rebuilt is not None:
                yield Member(rebuilt.name, rebuilt.begin, rebuilt.begin, rebuilt.nbytes, rebuilt.end, True)

    def _resume(self, failed: int, readable_end: int, kind: Kind) -> tuple[int | None, Place | None]:
        """Return the offset where members resume after a damaged header, and the index's place there; each may be None."""
        failed = failed // BLOCK * BLOCK
        begin = failed + BLOCK
        is_whole = kind in _IN_EXTENDED and begin <= self.nbytes and _is_header(self.read(failed, begin), False)
        if is_whole:  # this header's size is valid, although an extension of it is not
            begin = max(begin, self._end_of_member(failed))
        place = self._place_after(readable_end)
        if place is not None:
            return self._resume_by_index(place, failed, begin)
        if kind in ("truncated", "compressed", "unreadable") or begin > self.nbytes:
            return None, None  # the rest of the file is content of one member
        if is_whole and begin + BLOCK <= self.nbytes:
            block = self.read(begin, begin + BLOCK)
            if not block.strip(b"\0") or _is_header(block, False):
                return begin, None
            failed, begin = begin, begin + BLOCK  # the next header is damaged, too
        return self._search(failed, begin, self.nbytes, self.end), None

    def _place_after(self, offset: int) -> Place | None:
        places = self.find_places()
        return None if places is None else places.after(offset)

    def _resume_by_index(self, place: Place, failed: int, begin: int) -> tuple[int | None, Place | None]:
        """Return the two values of `_resume`, given the next place in the index. Members resume at or after byte `begin`."""
        if not place.follows_known:
            found = self._search(failed, begin, place.begin, None)
            if found is not None and found < place.begin:
                return found, None
        # Between known places, there may be members that the index omits because they belong to no sample. Hazard: headers
        # there may instead be inside a tar that is itself a member, so members must lead from them exactly to the place.
        while place.follows_known and begin < place.begin:
            found = self._next_header(begin, place.begin, named=False)
            if found is None:
                break
            leads, begin = self._leads_to_place(found, place)
            if leads:
                return found, None
        return (place.begin - BLOCK, None) if place.has_header else (place.end, place)

    def _leads_to_place(self, found: int, place: Place) -> tuple[bool, int]:
        """Return whether members from byte `found` on lead exactly to `place`, and where to search next if they do not."""
        scanner = Scanner(self.read, self.nbytes, found)
        try:
            for name, begin, _ in scanner:
                if begin >= place.begin:
                    key, suffix = split_member(name) or ("", "")
                    is_it = begin == place.begin and f"{key}.{suffix.lower()}" == place.name
                    return is_it, max(found + BLOCK, place.begin)
        except FormatError as exc:
            return False, max(found, exc.offset or 0) + BLOCK
        return not place.name and scanner.end == place.begin, max(found, scanner.end) + BLOCK

    def _search(self, failed: int, begin: int, limit: int, end: int | None) -> int | None:
        """Return the offset of the first header in `[begin, limit)`; skip a member that lost its extended header at `failed`.

        `end` is the end of the archive according to an index. It is returned if there is no header before it. Return None if
        there is neither a header nor an end.
        """
        found = self._next_member(begin, limit, end, named=False)
        if found is None or found == end:
            return found
        if self._may_name_next(failed, found):
            # without its damaged extended header, the next member would get a wrong name or size; skip it
            found = self._end_of_member(found)
        return self._next_member(found, limit, end)

    def _may_name_next(self, failed: int, found: int) -> bool:
        """Return whether the damaged header at `failed` may be an extended one, with the name or size of the next member."""
        header = self.read(failed, failed + BLOCK)
        content = self.read(failed + BLOCK, min(found, failed + _MAX_RECORDS_NBYTES)).rstrip(b"\0")
        is_naming = header[_MAGIC_BEGIN : _MAGIC_BEGIN + 5] == b"ustar" and header[_TYPE_BEGIN] in _NAMING
        if not is_naming and not _RECORD.match(content) and b"\0" in self.read(found, found + 100):
            return False
        try:
            # most extended headers contain only times, which `parse_records` leaves out
            return not content or bool(parse_records(content, 0))
        except FormatError:
            return True

    def _end_of_member(self, at: int) -> int:
        """Return the end of the member whose headers start at `at`, or the offset of its first unreadable header."""
        while at + BLOCK <= self.nbytes:
            header = self.read(at, at + BLOCK)
            if not _is_header(header, False):
                return at
            at += BLOCK
            is_map = header[_TYPE_BEGIN] == _SPARSE and header[_IS_MAP] != 0
            while is_map and at + BLOCK <= self.nbytes:  # skip the blocks of the hole map
                is_map = self.read(at + _IS_MAP_BLOCK, at + _IS_MAP_BLOCK + 1) != b"\0"
                at += BLOCK
            size = max(0, parse_number(header[124:136])) if header[_TYPE_BEGIN] not in _EMPTY else 0
            at += size + padding(size)
            if header[_TYPE_BEGIN] == _COMMON or not is_extended(header):
                break
        return at

    def _resume_after_zeros(self, at: int) -> tuple[int | None, Place | None, int | None]:
        """Decide whether zeros at byte `at` end the archive.

        If members resume after the zeros, return the two values of `_resume`, and None. If the archive ends here, return None,
        None, and the offset of the first member after its end. The offset is None if there is no such member, and also if the
        index confirms this end, since nothing is then searched.
        """
        if at == self.end:
            return None, None, None
        begin, limit = at + BLOCK, self.nbytes
        place = self._place_after(at)
        if place is not None:
            return *self._resume_by_index(place, at, begin), None
        if self.end is not None and at < self.end:
            limit = self.end
        else:
            found = self._next_block(begin, limit, lambda blocks: blocks.any(1), any)
            if found != begin:
                return None, None, None if found is None else self._next_header(found, limit)
        return self._search(at, begin, limit, self.end), None, None

    def _next_member(self, begin: int, limit: int, end: int | None, named: bool = True) -> int | None:
        """Return the offset of the first header in `[begin, limit)`, or `end` if zeros there come first; None if neither."""
        if end is not None and begin <= end:
            found = self._next_header(begin, end, named)
            if found is not None or (end % BLOCK == 0 and not self.read(end, end + BLOCK).strip(b"\0")):
                return end if found is None else found
        return self._next_header(begin, limit, named)

    def _next_header(self, begin: int, limit: int, named: bool = True) -> int | None:
        """Return the offset of the first header in `[begin, limit)`, or None; `named` skips headers without a sample's key."""

        def has_magic(blocks: Any) -> Any:
            return (blocks[:, _MAGIC_BEGIN : _MAGIC_BEGIN + len(_MAGIC)] == _MAGIC).all(1)

        return self._next_block(begin, limit, has_magic, lambda header: _is_header(header, named))

    def _next_block(
        self, begin: int, limit: int, find: Callable[[Any], Any], accept: Callable[[bytes], bool]
    ) -> int | None:
        """Return the offset of the first block in `[begin, limit)` that `find` selects and `accept` confirms, or None.

        `find` maps an array of blocks, uint8 `[n, 512]`, to bools `[n]`; `accept` gets the bytes of one block.
        """
        size = _MIN_CHUNK_NBYTES  # most searches end soon
        while begin + BLOCK <= limit:
            count = min(size, limit - begin) // BLOCK
            content = self.read(begin, begin + count * BLOCK)
            for number in np.flatnonzero(find(np.frombuffer(content, np.uint8).reshape(count, BLOCK))).tolist():
                if accept(content[number * BLOCK : (number + 1) * BLOCK]):
                    return begin + int(number) * BLOCK
            begin, size = begin + count * BLOCK, min(2 * size, _MAX_CHUNK_NBYTES)
        return None


def _is_header(header: bytes, named: bool) -> bool:
    if not is_header(header):
        return False
    name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return (
        not named or split_member(name) is not None or header[_TYPE_BEGIN] in _NAMING or header[_TYPE_BEGIN] == _COMMON
    )
