"""Go through a tar that may be damaged: its members, and where none could be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.checking.places import Place, Places
from wds_tensorcache.errors import FormatError, Kind
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar.archive import BLOCK, Scanner, is_extended, padding
from wds_tensorcache.shards.tar.fields import adds_up, parse_number, parse_records
from wds_tensorcache.shards.tar.skipped import Skipped, skipped_members

__all__ = ["Break", "End", "Member", "walk"]

_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 1 << 13, 1 << 20
_MAGIC, _MAGIC_BEGIN = b"ustar", 257
_KIND = 156
_NAMING = frozenset(b"xXL")  # extended headers that may hold the next member's name or size
_EMPTY = frozenset(b"123456")  # links, devices, directories, FIFOs
_SPARSE, _COMMON = ord("S"), ord("g")
_IS_EXTENDED, _IS_EXTENDED_BEHIND = 482, 504  # flags of a sparse member's header, and of the blocks after it
_MAX_RECORDS_NBYTES = 1 << 20
_NOTHING: Kind = "format"
_IN_EXTENDED = frozenset({"extended-header", "sparse"})  # the header itself is whole
_RECORD = re.compile(rb"[0-9]+ [^=\n]+=")

_Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """An ordinary file: its headers begin at byte `first`, its content at `begin`; its padding ends at byte `end`.

    One that `is_rebuilt` has no header that could be read: an index has its name and place, and digests confirm its bytes.
    """

    name: str
    first: int
    begin: int
    nbytes: int
    end: int
    is_rebuilt: bool = False


@dataclass(frozen=True, slots=True)
class Break:
    """From byte `offset` on, up to `end`, no member could be read; the two are one where the file ends too soon."""

    offset: int
    end: int
    reason: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class End:
    """The end-of-archive marker is at byte `offset`; `behind` it, if there are any, the first member no reader sees."""

    offset: int
    behind: int | None = None


def walk(
    read: _Read, nbytes: int, end: int | None = None, places: Places | None = None
) -> Iterator[Member | Skipped | Break | End]:
    """Yield what is in a tar, in its order.

    After a damaged header, it resumes where an index has the next member. Without an index, it resumes at the next
    block that is a header: with a right checksum, and a member's name. So members of a tar that is a member itself, and whose
    own header is damaged, count as members then.

    Stock readers end at the first block of zeros. Here zeros are damage, and the walk goes on behind them, where an index says
    that the archive ends later, and where it is but one block with members behind it: a header that was lost. Members behind
    two blocks and more, such as those of a second tar, are in no reader's archive.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        nbytes: Of the file.
        end: Where an index says that the archive ends. What is behind that is not searched if there are zeros.
        places: Where an index says that members are.
    """
    at: int | None = 0
    while at is not None:
        scanner = Scanner(read, nbytes, at)
        first, members, place = at, None, None
        reason, kind = "", _NOTHING
        try:
            for name, begin, size in scanner:
                if begin - first > BLOCK:
                    skipped = skipped_members(read, nbytes, first, begin - BLOCK)
                    yield from skipped
                    first = skipped[-1].end if skipped else first
                end_of_member = begin + size + padding(size)
                yield Member(name, first, begin, size, end_of_member)
                first = end_of_member
        except (FormatError, OSError) as exc:
            limit, reason, kind = first, f"cannot be read: {exc}", "unreadable"
            if isinstance(exc, FormatError):
                limit, reason, kind = first if exc.offset is None else exc.offset, exc.reason, exc.kind
            failed = scanner.header_begin if kind in _IN_EXTENDED else limit
            at = None
            with contextlib.suppress(OSError, FormatError):
                at, place = _resume(read, nbytes, end, places, max(first, failed), limit, kind)
        else:
            limit, at = scanner.end, None
            with contextlib.suppress(OSError, FormatError):
                at, place, members = _behind_zeros(read, nbytes, end, places, limit)
            if at is not None:
                reason, kind = "zeros, where the archive does not end", "zeros"
        skipped = skipped_members(read, nbytes, first, limit)
        yield from skipped
        behind = skipped[-1].end if skipped else first
        if not reason:
            yield End(limit, members)
            return
        rebuilt = place if place is not None and place.is_confirmed else None
        stop = nbytes if at is None else at if rebuilt is None else rebuilt.begin
        yield Break(min(behind, nbytes), stop, reason, kind)
        if rebuilt is not None:
            yield Member(rebuilt.name, rebuilt.begin, rebuilt.begin, rebuilt.nbytes, rebuilt.end, True)


def _resume(
    read: _Read, nbytes: int, end: int | None, places: Places | None, failed: int, limit: int, kind: Kind
) -> tuple[int | None, Place | None]:
    """Return where members resume after the header at byte `failed`, None if they do not; and the place that an index has."""
    failed = failed // BLOCK * BLOCK
    begin = failed + BLOCK
    is_whole = kind in _IN_EXTENDED and begin <= nbytes and _is_header(read(failed, begin), False)
    if is_whole:  # its own size is right
        begin = max(begin, _after(read, nbytes, failed))
    place = None if places is None else places.after(limit)
    if place is not None:
        return _guided(read, nbytes, end, place, failed, begin)
    if kind in ("truncated", "compressed", "unreadable") or begin > nbytes:
        return None, None  # what is left is the inside of a member
    if is_whole and begin + BLOCK <= nbytes:
        block = read(begin, begin + BLOCK)
        if not block.strip(b"\0") or _is_header(block, False):
            return begin, None
        failed, begin = begin, begin + BLOCK  # the header that it is of is damaged, too
    return _search(read, nbytes, end, failed, begin), None


def _guided(
    read: _Read, nbytes: int, end: int | None, place: Place, failed: int, begin: int
) -> tuple[int | None, Place | None]:
    """Return where members resume from byte `begin` on, before the next one that an index has, at it, or after it."""
    if place.is_next_to_last:
        # these bytes are of no sample, or a member of a member
        while begin < place.begin:
            found = _next_header(read, begin, place.begin, named=False)
            if found is None:
                break
            begin = _leads(read, nbytes, found, place)
            if begin < 0:
                return found, None
    else:
        found = _search(read, place.begin, None, failed, begin)
        if found is not None and found < place.begin:
            return found, None
    if place.has_header:
        return place.begin - BLOCK, None
    return place.end, place


def _leads(read: _Read, nbytes: int, found: int, place: Place) -> int:
    """Return -1 if the members from the header at byte `found` on lead to a place, else where to look for other headers."""
    scanner = Scanner(read, nbytes, found)
    try:
        for name, begin, _ in scanner:
            if begin >= place.begin:
                split, wanted = split_member(name), split_member(place.name)
                is_it = begin == place.begin and split is not None and wanted is not None
                is_it = is_it and (split[0], split[1].lower()) == wanted  # type: ignore[index]
                return -1 if is_it else max(found + BLOCK, place.begin)
    except FormatError as exc:
        return max(found, exc.offset or 0) + BLOCK
    return -1 if not place.name and scanner.end == place.begin else max(found, scanner.end) + BLOCK


def _search(read: _Read, nbytes: int, end: int | None, failed: int, begin: int) -> int | None:
    """Return the next header from byte `begin` on that no damaged header was of."""
    found = _go_on(read, begin, nbytes, end, named=False)
    if found is None or found == end:
        return found
    if _names_next(read, failed, found):
        # without its extended header, the next member has another name, cut short perhaps, or another size
        return _go_on(read, _after(read, nbytes, found), nbytes, end)
    return _go_on(read, found, nbytes, end)


def _names_next(read: _Read, failed: int, found: int) -> bool:
    """Return whether the damaged header at byte `failed` may hold name or size of the member whose header is at `found`."""
    header = read(failed, failed + BLOCK)
    content = read(failed + BLOCK, min(found, failed + _MAX_RECORDS_NBYTES)).rstrip(b"\0")
    has_magic = header[_MAGIC_BEGIN : _MAGIC_BEGIN + len(_MAGIC)] == _MAGIC
    is_naming = has_magic and header[_KIND] in _NAMING
    if not is_naming and not _RECORD.match(content) and b"\0" in read(found, found + 100):
        return False
    try:
        return not content or bool(parse_records(content, 0))  # most are of times alone
    except FormatError:
        return True


def _after(read: _Read, nbytes: int, at: int) -> int:
    """Return where the member ends whose headers begin at byte `at`: as far as they can be read."""
    while at + BLOCK <= nbytes:
        header = read(at, at + BLOCK)
        if not _is_header(header, False):
            return at
        at += BLOCK
        is_map = header[_KIND] == _SPARSE and header[_IS_EXTENDED] != 0
        while is_map and at + BLOCK <= nbytes:  # of holes
            is_map = read(at + _IS_EXTENDED_BEHIND, at + _IS_EXTENDED_BEHIND + 1) != b"\0"
            at += BLOCK
        size = max(0, parse_number(header[124:136])) if header[_KIND] not in _EMPTY else 0
        at += size + padding(size)
        if header[_KIND] == _COMMON or not is_extended(header):
            break
    return at


def _behind_zeros(
    read: _Read, nbytes: int, end: int | None, places: Places | None, at: int
) -> tuple[int | None, Place | None, int | None]:
    """Return where an archive goes on behind zeros at byte `at`, or where there are members though it does not."""
    if at == end:
        return None, None, None
    begin = at + BLOCK
    place = None if places is None else places.after(at)
    if place is not None:
        return *_guided(read, nbytes, end, place, at, begin), None
    if end is not None and at < end:
        nbytes = end
    else:
        behind = _next_block(read, begin, nbytes, lambda blocks: blocks.any(1), any)
        if behind != begin:
            return None, None, None if behind is None else _next_header(read, behind, nbytes)
    return _search(read, nbytes, end, at, begin), None, None


def _go_on(read: _Read, begin: int, nbytes: int, end: int | None, named: bool = True) -> int | None:
    """Return the next header from byte `begin` on; behind all of them `end`, if the archive ends there."""
    if end is not None and begin <= end:
        found = _next_header(read, begin, end, named)
        if found is not None or (end % BLOCK == 0 and not read(end, end + BLOCK).strip(b"\0")):
            return end if found is None else found
    return _next_header(read, begin, nbytes, named)


def _next_header(read: _Read, begin: int, nbytes: int, named: bool = True) -> int | None:
    """Return the first block from byte `begin` on that is a header, `named` as a member is; None if there is none."""
    magic = np.frombuffer(_MAGIC, np.uint8)

    def has_magic(blocks: Any) -> Any:
        return (blocks[:, _MAGIC_BEGIN : _MAGIC_BEGIN + len(_MAGIC)] == magic).all(1)

    return _next_block(read, begin, nbytes, has_magic, lambda header: _is_header(header, named))


def _next_block(
    read: _Read, begin: int, nbytes: int, find: Callable[[Any], Any], accept: Callable[[bytes], bool]
) -> int | None:
    """Return the first block from byte `begin` on that `accept` takes, of those that `find` finds in an array of blocks."""
    size = _MIN_CHUNK_NBYTES  # what is sought is near, most times
    while begin + BLOCK <= nbytes:
        count = min(size, nbytes - begin) // BLOCK
        content = read(begin, begin + count * BLOCK)
        for number in np.flatnonzero(find(np.frombuffer(content, np.uint8).reshape(count, BLOCK))).tolist():
            if accept(content[number * BLOCK : (number + 1) * BLOCK]):
                return begin + int(number) * BLOCK
        begin, size = begin + count * BLOCK, min(2 * size, _MAX_CHUNK_NBYTES)
    return None


def _is_header(header: bytes, named: bool) -> bool:
    if not adds_up(header):
        return False
    name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return not named or split_member(name) is not None or header[_KIND] in _NAMING or header[_KIND] == _COMMON
