"""Go through a tar that may be damaged: its members, and where none could be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar import BLOCK, Scanner, check_checksum, is_extended, padding, parse_number

__all__ = ["Break", "End", "Member", "Skipped", "walk"]

_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 1 << 13, 1 << 20
_MAGIC, _MAGIC_BEGIN = b"ustar", 257
_KIND = 156
_NAMING = frozenset(b"xXL")  # extended headers that may hold the next member's name or size
_OFFSET = re.compile(r"byte (\d+): ")
_RECORD = re.compile(rb"[0-9]+ [^=\n]+=")

_Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """An ordinary file: its headers begin at byte `first`, its content at `begin`; its padding ends at byte `end`."""

    name: str
    first: int
    begin: int
    nbytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Whole members `[begin, end)` that tar readers of samples skip: directories, links, metadata."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Break:
    """From byte `offset` on, up to `end`, no member could be read; the two are one where the file ends too soon."""

    offset: int
    end: int
    what: str


@dataclass(frozen=True, slots=True)
class End:
    """The end-of-archive marker is at byte `offset`; `behind` it, if there are any, the first member no reader sees."""

    offset: int
    behind: int | None = None


def walk(read: _Read, nbytes: int, end: int | None = None) -> Iterator[Member | Skipped | Break | End]:
    """Yield what is in a tar, in its order.

    Behind a header that is damaged it goes on at the next block that is one: with a right checksum, and a member's name. So
    members of a tar that is a member itself, and whose own header is damaged, count as members.

    Stock readers end at the first block of zeros. Here zeros are damage, and the walk goes on behind them, where an index says
    that the archive ends later, and where it is but one block with members behind it: a header that was lost. Members behind
    two blocks and more, such as those of a second tar, are in no reader's archive.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        nbytes: Of the file.
        end: Where an index says that the archive ends. What is behind that is not searched if there are zeros.
    """
    at: int | None = 0
    while at is not None:
        scanner = Scanner(read, nbytes, at)
        first, members = at, None
        try:
            for name, begin, size in scanner:
                if begin - first > BLOCK:
                    behind = _skip(read, nbytes, first, begin - BLOCK)
                    if behind > first:
                        yield Skipped(first, behind)
                    first = behind
                end_of_member = begin + size + padding(size)
                yield Member(name, first, begin, size, end_of_member)
                first = end_of_member
        except FormatError as exc:
            what = str(exc)
            match = _OFFSET.match(what)
            limit = int(match[1]) if match else first
            try:
                at = _resume(read, nbytes, end, first, limit, what)
            except (OSError, FormatError):
                at = None
        except OSError as exc:
            yield Break(min(first, nbytes), nbytes, f"byte {first}: cannot be read: {exc}")
            return
        else:
            limit, at = scanner.end, None
            with contextlib.suppress(OSError, FormatError):
                at, members = _behind_zeros(read, nbytes, end, limit)
            what = "" if at is None else f"byte {limit}: zeros, where the archive does not end"
        behind = _skip(read, nbytes, first, limit)
        if behind > first:
            yield Skipped(first, behind)
        if what:
            yield Break(min(behind, nbytes), nbytes if at is None else at, what)
        else:
            yield End(limit, members)


def _skip(read: _Read, nbytes: int, first: int, limit: int) -> int:
    """Return where the members end that the scanner skips from byte `first` on, up to the header at byte `limit`.

    Extended headers that are of that header belong to it; those of all members that follow do not.
    """
    at = behind = first
    with contextlib.suppress(FormatError, OSError):
        if limit < first + BLOCK or _end_of_extended(read, first) == limit:
            return first  # pax tars have one in front of each member
        scanner, own = Scanner(read, nbytes), dict[bytes, bytes]()
        while at < limit and at + BLOCK <= nbytes:
            header, begin = read(at, at + BLOCK), at
            at += BLOCK
            size = scanner.read_header(header, begin, own, {})[2]
            at += size + padding(size)
            if not is_extended(header) or (header[_KIND] == ord("g") and behind == begin):
                behind = at
    return behind


def _end_of_extended(read: _Read, begin: int) -> int | None:
    header = read(begin, begin + BLOCK)
    if header[_KIND] not in _NAMING:
        return None
    size = parse_number(header[124:136])
    return begin + BLOCK + size + padding(size)


def _resume(read: _Read, nbytes: int, end: int | None, first: int, offset: int, what: str) -> int | None:
    """Return where members go on behind a break, None if they do not."""
    if not what.startswith("byte ") or "truncated" in what or "compressed" in what:
        return None  # what is left is the inside of a member
    at = offset // BLOCK * BLOCK
    if at + BLOCK > nbytes:
        return None
    header = read(at, at + BLOCK)
    of_next = "pax record" in what or "long name" in what or header[_KIND] in _NAMING
    found = _go_on(read, max(at, first) + BLOCK, nbytes, end, named=not of_next)
    # without its extended header, the next member has another name, cut short perhaps, or another size
    return _behind_member(read, found, nbytes, end) if of_next and found not in (None, end) else found


def _behind_zeros(read: _Read, nbytes: int, end: int | None, at: int) -> tuple[int | None, int | None]:
    """Return where an archive goes on behind zeros at byte `at`, or where there are members though it does not."""
    if at == end:
        return None, None
    begin = at + BLOCK
    if end is not None and at < end:
        nbytes = end
    else:
        behind = _next_block(read, begin, nbytes, lambda blocks: blocks.any(1), any)
        if behind != begin:
            return None, None if behind is None else _next_header(read, behind, nbytes)
    found = _go_on(read, begin, nbytes, end, named=False)
    if found is None or found == end:
        return found, None
    content = read(begin, min(found, begin + BLOCK))
    if _RECORD.match(content) or b"\0" not in read(found, found + 100):  # zeros where its extended header was
        return _behind_member(read, found, nbytes, end), None
    return _go_on(read, found, nbytes, end), None


def _behind_member(read: _Read, header: int, nbytes: int, end: int | None) -> int | None:
    """Return where members go on behind the one whose header is at byte `header`."""
    size = parse_number(read(header + 124, header + 136))
    return _go_on(read, header + BLOCK + max(0, size + padding(size)), nbytes, end)


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
    try:
        check_checksum(header, BLOCK)
    except FormatError:
        return False
    name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return not named or split_member(name) is not None or header[_KIND] in _NAMING or header[_KIND] == ord("g")
