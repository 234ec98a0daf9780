"""Go through a tar that may be damaged: its members, and where none could be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar import BLOCK, Scanner, check_checksum, padding, parse_number

__all__ = ["Break", "End", "Member", "walk"]

_CHUNK_NBYTES = 1 << 20
_MAGIC, _MAGIC_BEGIN = b"ustar", 257
_KIND = 156
_NAMING = frozenset(b"xXL")  # extended headers that may hold the next member's name or size
_OFFSET = re.compile(r"byte (\d+): ")


class Member(NamedTuple):
    """An ordinary file: its headers begin at byte `first`, its content at `begin`; its padding ends at byte `end`."""

    name: str
    first: int
    begin: int
    nbytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Break:
    """From byte `offset` on, up to `end`, no member could be read."""

    offset: int
    end: int
    what: str


@dataclass(frozen=True, slots=True)
class End:
    """The end-of-archive marker is at byte `offset`; since `first` there were no ordinary files."""

    first: int
    offset: int


def walk(read: Callable[[int, int], bytes], nbytes: int, end: int | None = None) -> Iterator[Member | Break | End]:
    """Yield what is in a tar, in its order.

    Behind a header that is damaged it goes on at the next block that is one: with a right checksum, and a member's name. So
    members of a tar that is a member itself, and whose own header is damaged, count as members.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        nbytes: Of the file.
        end: Where the archive is said to end: zeros in front of that are damage if members follow.
    """
    at: int | None = 0
    while at is not None:
        scanner = Scanner(read, nbytes, at)
        first = at
        try:
            for name, begin, size in scanner:
                end_of_member = begin + size + padding(size)
                yield Member(name, first, begin, size, end_of_member)
                first = end_of_member
        except FormatError as exc:
            try:
                at = _resume(read, nbytes, first, str(exc))
            except OSError:
                at = None
            yield Break(first, nbytes if at is None else at, str(exc))
        except OSError as exc:
            yield Break(first, nbytes, f"byte {first}: cannot be read: {exc}")
            return
        else:
            at = None
            if end is not None and scanner.end < end:
                with contextlib.suppress(OSError):
                    at = _next_header(read, scanner.end + BLOCK, min(end, nbytes))
            if at is None:
                yield End(first, scanner.end)
            else:
                yield Break(first, at, f"byte {scanner.end}: zeros, where the archive does not end")


def _resume(read: Callable[[int, int], bytes], nbytes: int, first: int, what: str) -> int | None:
    """Return where members go on behind a break, None if they do not."""
    match = _OFFSET.match(what)
    if match is None or "truncated" in what or "compressed" in what:
        return None  # what is left is the inside of a member
    at = int(match[1]) // BLOCK * BLOCK
    if at + BLOCK > nbytes:
        return None
    header = read(at, at + BLOCK)
    is_extended = "pax record" in what or "long name" in what or header[_KIND] in _NAMING
    found = _next_header(read, max(at, first) + BLOCK, nbytes, named=not is_extended)
    if found is not None and is_extended:
        # without its extended header, the next member has another name, cut short perhaps, or another size
        size = parse_number(read(found + 124, found + 136))
        found = _next_header(read, found + BLOCK + max(0, size + padding(size)), nbytes)
    return found


def _next_header(read: Callable[[int, int], bytes], begin: int, nbytes: int, named: bool = True) -> int | None:
    """Return the first block from byte `begin` on that is a header, `named` as a member is; None if there is none."""
    for chunk_begin in range(begin, nbytes - BLOCK + 1, _CHUNK_NBYTES):
        count = (min(chunk_begin + _CHUNK_NBYTES, nbytes) - chunk_begin) // BLOCK
        content = read(chunk_begin, chunk_begin + count * BLOCK)
        blocks = np.frombuffer(content, np.uint8).reshape(count, BLOCK)
        magic = blocks[:, _MAGIC_BEGIN : _MAGIC_BEGIN + len(_MAGIC)] == np.frombuffer(_MAGIC, np.uint8)
        for number in np.flatnonzero(magic.all(1)).tolist():
            header = content[number * BLOCK : (number + 1) * BLOCK]
            if _is_header(header, named):
                return chunk_begin + int(number) * BLOCK
    return None


def _is_header(header: bytes, named: bool) -> bool:
    try:
        check_checksum(header, BLOCK)
    except FormatError:
        return False
    name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return not named or split_member(name) is not None or header[_KIND] in _NAMING or header[_KIND] == ord("g")
