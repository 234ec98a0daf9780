"""Members of a tar that are of no sample: directories, links, metadata, and headers of all members that follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.tar.archive import BLOCK, Scanner, is_extended, padding
from wds_tensorcache.shards.tar.fields import parse_number

__all__ = ["Skipped", "skipped_members"]

_KIND = 156
_NAMING = frozenset(b"xXL")  # extended headers that may hold the next member's name or size
_COMMON = ord("g")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Whole members `[begin, end)` that tar readers of samples skip: directories, links, metadata.

    One that `is_common` is headers of all members that follow. An archive MUST NOT end with it: readers expect a member.
    """

    begin: int
    end: int
    is_common: bool = False


def skipped_members(read: Callable[[int, int], bytes], nbytes: int, first: int, limit: int) -> list[Skipped]:
    """Return the members that `Scanner` skips from byte `first` on, up to the header at byte `limit`.

    Extended headers of that header belong to it; those of all members that follow are returned.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        nbytes: Length of the file.
        first: End of the member before, or 0.
        limit: Offset of the next header that the scanner does not skip.
    """
    skipped: list[Skipped] = []
    at = after = first
    with contextlib.suppress(FormatError, OSError):
        if limit < first + BLOCK or _end_of_extended(read, first) == limit:
            return []  # pax tars have one before each member
        scanner, own = Scanner(read, nbytes), dict[bytes, bytes]()
        while at < limit and at + BLOCK <= nbytes:
            header, begin = read(at, at + BLOCK), at
            at += BLOCK
            size = scanner.read_header(header, begin, own, {})[2]
            at += size + padding(size)
            is_common = header[_KIND] == _COMMON and after == begin
            if is_common or not is_extended(header):
                if skipped and skipped[-1].is_common == is_common:
                    skipped[-1] = Skipped(skipped[-1].begin, at, is_common)
                else:
                    skipped.append(Skipped(after, at, is_common))
                after = at
    return skipped


def _end_of_extended(read: Callable[[int, int], bytes], begin: int) -> int | None:
    header = read(begin, begin + BLOCK)
    if header[_KIND] not in _NAMING:
        return None
    size = parse_number(header[124:136])
    return begin + BLOCK + size + padding(size)
