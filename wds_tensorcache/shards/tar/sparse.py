"""Expand GNU sparse members, in all four formats that `tarfile` reads: a map lists the stored parts; the rest is zeros."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from wds_tensorcache.errors import TarFormatError
from wds_tensorcache.shards.tar.fields import parse_number
from wds_tensorcache.shards.tar.headers import BLOCK

__all__ = ["SparseMap", "read_map"]

_MAX_DIGITS = 19
_OLD = ord("S")


@dataclass(frozen=True, slots=True)
class SparseMap:
    """The stored parts of an expanded file, as `(begin, nbytes)` in that file, ascending. Its other bytes are zeros."""

    parts: list[tuple[int, int]]
    nbytes: int  # length of the expanded file

    def expand(self, stored: bytes) -> bytes:
        """Return the content of the expanded file; `stored` contains the parts without gaps."""
        content, at = io.BytesIO(), 0  # BytesIO fills gaps with zeros, and `getvalue` does not copy
        if self.nbytes:
            content.seek(self.nbytes - 1)
            content.write(b"\0")
        for begin, nbytes in self.parts:
            content.seek(begin)
            content.write(stored[at : at + nbytes])
            at += nbytes
        return content.getvalue()


def read_map(
    header: bytes, records: list[tuple[bytes, bytes]], nbytes: int, take: Callable[[int], bytes]
) -> tuple[SparseMap, int]:
    """Return the map of a sparse member, and the number of bytes of the member that follow the map.

    Args:
        header: Header of the member, 512 bytes.
        records: Pax records of the member: names without the prefix `GNU.sparse.`, and values.
        nbytes: Length of the member in the tar.
        take: Function that returns the next n bytes after the header.

    Raises:
        TarFormatError: The map is damaged.
    """
    said = dict(records)
    if header[156] == _OLD:
        found, left = _read_old(header, take), nbytes
    elif b"map" in said:
        found, left = SparseMap(_pairs(said[b"map"].split(b",")), _size(said)), nbytes
    elif b"size" in said:
        begins, sizes = (_numbers([v for k, v in records if k == name]) for name in (b"offset", b"numbytes"))
        found, left = SparseMap(list(zip(begins, sizes, strict=False)), _size(said)), nbytes
    elif (said.get(b"major"), said.get(b"minor")) == (b"1", b"0"):
        parts, taken = _read_parts(nbytes, take)
        found, left = SparseMap(parts, _size(said)), nbytes - taken
    else:
        raise TarFormatError(f"a GNU sparse member has an unknown major version, {said.get(b'major')!r:.40}")
    _check(found, left)
    return found, left


def _read_old(header: bytes, take: Callable[[int], bytes]) -> SparseMap:
    parts = _read_structs(header[386:482])
    is_extended = header[482]
    while is_extended:
        block = take(BLOCK)
        parts += [part for part in _read_structs(block[:504]) if all(part)]
        is_extended = block[504]
    return SparseMap(parts, parse_number(header[483:495]))


def _read_structs(fields: bytes) -> list[tuple[int, int]]:
    parts = []
    for at in range(0, len(fields), 24):
        part = parse_number(fields[at : at + 12]), parse_number(fields[at + 12 : at + 24])
        if min(part) < 0:
            break
        parts.append(part)
    return parts


def _read_parts(nbytes: int, take: Callable[[int], bytes]) -> tuple[list[tuple[int, int]], int]:
    """Return the parts in a map, and the map's length in bytes. The map is lines of decimal numbers before the content."""
    text, taken, lines, wanted = b"", 0, 0, 1
    while lines < wanted:
        if taken + BLOCK > nbytes + -nbytes % BLOCK or len(text.rpartition(b"\n")[2]) > _MAX_DIGITS:
            raise TarFormatError("the map of a GNU sparse member is cut short")
        block = take(BLOCK)
        if not lines and b"\n" in block:
            wanted = 1 + 2 * _numbers([block.partition(b"\n")[0]])[0]
        text, taken, lines = text + block, taken + BLOCK, lines + block.count(b"\n")
    return _pairs(text.split(b"\n", wanted)[1:wanted]), taken


def _pairs(texts: list[bytes]) -> list[tuple[int, int]]:
    numbers = _numbers(texts)
    return list(zip(numbers[::2], numbers[1::2], strict=False))


def _numbers(texts: list[bytes]) -> list[int]:
    for text in texts:
        if not text.isdigit() or len(text) > _MAX_DIGITS:
            raise TarFormatError(f"the map of a GNU sparse member contains {text[:40]!r}, expected a number")
    return list(map(int, texts))


def _size(said: dict[bytes, bytes]) -> int:
    return _numbers([said.get(b"realsize", said.get(b"size", b""))])[0]


def _check(found: SparseMap, left: int) -> None:
    end = 0
    for begin, length in found.parts:
        if begin < end and length:
            raise TarFormatError(f"two parts of a GNU sparse member overlap at byte {begin}")
        end = max(end, begin + length)
    if end > found.nbytes or sum(length for _, length in found.parts) > left:
        raise TarFormatError(
            f"a GNU sparse member has {found.nbytes} bytes, {left} stored, but its parts are longer or end at byte {end}"
        )
