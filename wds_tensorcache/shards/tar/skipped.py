"""Find members that belong to no sample: directories, links, metadata, and headers that apply to all later members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.tar.fields import parse_number
from wds_tensorcache.shards.tar.headers import BLOCK, Headers, is_extended, padding

__all__ = ["Skipped", "skipped_members"]

_KIND = 156
_NAMING = frozenset(b"xXL")  # extended headers that may contain the next member's name or size
_COMMON = ord("g")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Adjacent members, in bytes `[begin, end)`, that readers of samples skip: directories, links, metadata.

    `is_common` marks global headers, which apply to all later members. An archive must not end with a global header:
    readers expect a member after it.
    """

    begin: int
    end: int
    is_common: bool = False


def skipped_members(read: Callable[[int, int], bytes], nbytes: int, first: int, limit: int) -> list[Skipped]:
    """Return the members that `Scanner` skips, from byte `first` up to the header at byte `limit`.

    Extended headers directly before that header belong to it and are not returned, unless they apply to all following
    members.

    Args:
        read: `read(begin, end)` returns these bytes of the file.
        nbytes: Length of the file.
        first: End of the preceding member that the scanner does not skip, or 0.
        limit: Offset of the next header that the scanner does not skip.
    """
    skipped: list[Skipped] = []
    at = after = first
    with contextlib.suppress(FormatError, OSError):
        if limit < first + BLOCK or _end_of_extended(read, first) == limit:
            return []  # pax tars have an extended header before each member
        headers = Headers(read, nbytes)
        while at < limit and at + BLOCK <= nbytes:
            header, begin = read(at, at + BLOCK), at
            at += BLOCK
            size = headers.parse(header, begin).nbytes
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
