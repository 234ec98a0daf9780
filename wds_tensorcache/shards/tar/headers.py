"""Build and scan tar headers (FORMAT.md 1). The scanner reads what `tarfile` reads, but faster, and with offsets."""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

from wds_tensorcache.errors import FormatError, TarFormatError
from wds_tensorcache.shards.tar.fields import (
    Records,
    check_checksum,
    check_length,
    parse_number,
    parse_records,
    refuse_compressed,
)

__all__ = [
    "BLOCK",
    "END_OF_ARCHIVE",
    "Header",
    "Headers",
    "Scanner",
    "build_tar_header",
    "is_extended",
    "is_meta_name",
    "names_of",
    "padding",
    "rebuild_header",
]

BLOCK = 512
END_OF_ARCHIVE = bytes(2 * BLOCK)

_MAX_OCTAL_NBYTES = 8**11  # 11 octal digits: from 8 GiB on, a pax record is needed
_MAX_RECORDS_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100
_MAX_NAME_NBYTES = 1 << 14  # limits names, since one in a global pax header costs time for each later member
_MAX_EXTENDED_BLOCKS = 10  # `names_of` searches fewer blocks than this before a member's content
_MAX_WINDOW_NBYTES = 1 << 18
_MIN_WINDOW_NBYTES = 1 << 13
_LARGE_MEMBER_NBYTES = 1 << 16

# the bytes that webdataset's TarWriter writes around name, size and checksum
_OWNER = b"0000444\0" + b"0000000\0" * 2
_TIME = bytes(1) + b"00000000000\0"
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + b"bigdata".ljust(32, b"\0") * 2 + bytes(183)
_BASE_SUM = sum(_OWNER + _TIME + b" " * 8 + _TAIL)
_PACK_HEADER = struct.Struct("100s24s11s13s8s356s").pack

# name, size, the byte after the size, checksum, and the rest, which starts with the typeflag
_SPLIT_HEADER = struct.Struct("100s24x11sB12x8s356s").unpack_from
_SPARSE = ord("S")
_FILE_TYPES = frozenset(b"0\x007")
_EMPTY_TYPES = frozenset(b"123456")  # links, devices, directories, FIFOs: no content, whatever the size field says
_LINK_TYPES = frozenset(b"12")  # hard and symbolic
_MAX_LINKS = 1000
_EXTENDED_TYPES = frozenset(b"xXgLK")  # pax records (x, X: of one member, g: of all), GNU long name (L) and link (K)
_IS_META = re.compile(r"__[^/]*__($|/)|___?\Z").match  # webdataset's tar_file_iterator skips these names


def padding(nbytes: int) -> int:
    """Return the number of zero bytes after `nbytes` bytes of content, up to the next multiple of 512."""
    return -nbytes % BLOCK


def is_meta_name(name: str) -> bool:
    """Return whether webdataset skips a member with this name as metadata."""
    return _IS_META(name) is not None


def is_extended(header: bytes) -> bool:
    """Return whether a header is extended: its content, pax records or a long name, describes later members."""
    return header[156] in _EXTENDED_TYPES


def build_tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of an ordinary file, byte for byte what webdataset's `TarWriter(mtime=0)` writes.

    Args:
        name: Name of the member, at most 100 ASCII bytes, as `names.check_suffixes` ensures.
        nbytes: Length of the content in bytes, not negative.

    Returns:
        512 bytes; for 8 GiB or more 1,536 bytes, since such a size needs a pax record before the header.
    """
    if nbytes >= _MAX_OCTAL_NBYTES:
        return _by_tarfile(name, nbytes, 0o444, "bigdata")
    path = name.encode("ascii")
    size = b"%011o" % nbytes
    # The lower half of Adler-32 is 1 + the sum of the bytes, modulo 65,521. The sum of up to 256 bytes is smaller than that.
    checksum = b"%06o\0 " % (_BASE_SUM - 1 + (adler32(path + size) & 0xFFFF))
    return _PACK_HEADER(path, _OWNER, size, _TIME, checksum, _TAIL)


def rebuild_header(name: str, nbytes: int) -> bytes:
    """Return a new header for a member whose header was lost, preceded by a pax header if the name does not fit."""
    if name.isascii() and len(name) <= _MAX_FIELD_NBYTES:
        return build_tar_header(name, nbytes)
    return _by_tarfile(name, nbytes)


def _by_tarfile(name: str, nbytes: int, mode: int = 0o644, owner: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = nbytes, mode, owner, owner
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class Header(NamedTuple):
    """A parsed header. The member's name and size may come from extended headers before it.

    Attributes:
        kind: Type of the member: the header's byte 156, the typeflag.
        name: Name, decoded as UTF-8 with surrogateescape.
        nbytes: Length of the content after the header, without padding.
        is_file: True for an ordinary file.
    """

    kind: int
    name: str
    nbytes: int
    is_file: bool


class Headers:
    """A parser of the headers of one tar, in order. It applies extended headers to the members that follow them.

    Args:
        read: `read(begin, end)` returns exactly those bytes of the tar.
        nbytes: Length of the tar.

    Attributes:
        own: Path and size for the next member, from extended headers.
        common: Path for all following members, from global headers.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int) -> None:
        self.own: Records = {}
        self.common: Records = {}
        self._read = read
        self._nbytes = nbytes
        self._expected_at = -1  # after an extended header, the offset at which a header must follow

    @property
    def are_global(self) -> bool:
        """True if a global header applies to the following members, so that they cannot be read without it."""
        return bool(self.common)

    def is_end(self, header: bytes, begin: int) -> bool:
        """Return whether the archive ends at byte `begin`; raise TarFormatError if an extended header precedes the end."""
        if header.count(0) < BLOCK:
            return False
        if begin == self._expected_at:
            raise TarFormatError("the archive ends after an extended header", offset=begin, kind="extended-header")
        return True

    def parse(self, header: bytes, begin: int) -> Header:
        """Parse the header at byte `begin`, and the content if it is extended; raise TarFormatError if either is damaged."""
        check_checksum(header, begin)
        kind, path, nbytes = header[156], header[:100].partition(b"\0")[0], parse_number(header[124:136])
        if kind == _SPARSE:
            raise TarFormatError(
                f"{path!r} is a GNU sparse member, expected one without holes", offset=begin, kind="sparse"
            )
        if kind == 0 and path.endswith(b"/"):
            kind = ord("5")  # a directory in V7 format
        if kind not in _EXTENDED_TYPES:
            prefix = header[345:500].partition(b"\0")[0]
            path = self.own.get(b"path", self.common.get(b"path", prefix + b"/" + path if prefix else path))
            nbytes = 0 if kind in _EMPTY_TYPES else int(self.own.get(b"size", nbytes))
            self.own.clear()
        what = None
        if len(path) > _MAX_NAME_NBYTES:
            what = f"the name has {len(path)} bytes, expected at most {_MAX_NAME_NBYTES}: {path!r:.120}"
        elif nbytes < 0:
            what = f"the size is {header[124:136]!r}, expected a non-negative number, octal or base 256"
        if what is not None:
            raise TarFormatError(what, offset=begin, kind="header")
        if nbytes > self._nbytes - begin - BLOCK:
            what = f"{path!r:.120} has {nbytes} bytes from byte {begin + BLOCK} on, but the file has {self._nbytes}"
            raise TarFormatError(f"truncated, or a wrong size: {what}", offset=begin, kind="truncated")
        if kind in _EXTENDED_TYPES:
            self._parse_extended(kind, begin, nbytes)
            self._expected_at = begin + BLOCK + nbytes + padding(nbytes)
        return Header(kind, path.decode("utf-8", "surrogateescape"), nbytes, kind in _FILE_TYPES)

    def _parse_extended(self, kind: int, header_begin: int, nbytes: int) -> None:
        begin = header_begin + BLOCK
        what, at = None, header_begin
        if nbytes > _MAX_RECORDS_NBYTES:
            what = f"the extended header has {nbytes} bytes, expected at most {_MAX_RECORDS_NBYTES}"
            raise TarFormatError(what, offset=at, kind="extended-header")
        content = self._read(begin, begin + nbytes)
        if kind == ord("L"):
            if b"\0" not in content:
                what, at = f"the long name has {nbytes} bytes, expected a NUL at its end", begin
            self.own.setdefault(b"path", content.partition(b"\0")[0])
        elif kind == ord("g"):
            self.common.update(parse_records(content, begin))
            if b"size" in self.common:
                what = "a global pax header declares one size for all members, expected a size per member"
        elif kind != ord("K"):
            # if two extended headers precede a member, tarfile uses the first
            self.own = parse_records(content, begin) | self.own
        if what is not None:
            raise TarFormatError(what, offset=at, kind="extended-header")


class Scanner:
    """The ordinary files of one uncompressed tar: iterating yields `(name, begin, nbytes)` for each.

    `begin` is the offset of the content in the tar and `nbytes` its length, both in bytes. Names are decoded as UTF-8,
    other bytes with surrogateescape. The scanner skips directories, links, devices and names that webdataset reserves for
    its own metadata (`__…__`). It reads headers in windows of 256 KiB; after a large member, it reads 8 KiB.

    Args:
        read: `read(begin, end)` returns exactly those bytes of the file.
        nbytes: Length of the file.
        begin: Offset of the first header.

    Raises:
        TarFormatError: The tar is compressed or truncated (stock readers accept a missing end-of-archive block), contains a
            sparse member, or breaks another rule of the format. Raised while iterating, with the offset in the tar.

    Attributes:
        links: Names of the symbolic and hard links that the last iteration has skipped so far, at most 1,000.

    Threads: not thread-safe; one iteration at a time.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int, begin: int = 0) -> None:
        self.links: list[str] = []
        self.end = -1  # offset of the end-of-archive block, once an iteration has reached it
        self.header_begin = begin  # offset of the last header that `Headers.parse` read or refused
        self._read = read
        self._nbytes = nbytes
        self._begin = begin
        self._window = b""
        self._window_begin = 0
        self._next_window_nbytes = _MAX_WINDOW_NBYTES

    def peek(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of the tar, from the window or by a read. Memory: a copy."""
        base = self._window_begin
        if base <= begin and end <= base + len(self._window):
            return self._window[begin - base : end - base]
        return self._read_exactly(begin, end)

    def _read_exactly(self, begin: int, end: int) -> bytes:
        content = self._read(begin, end)
        check_length(content, begin, end)
        return content

    def _move_window(self, begin: int) -> bytes:
        end = min(begin + self._next_window_nbytes, self._nbytes)
        if end - begin < BLOCK:
            if not begin and end:
                refuse_compressed(self._read_exactly(0, end))
            what = f"truncated: the file ends at byte {self._nbytes}, without an end-of-archive block"
            what = what if self._nbytes else "the file is empty, expected a tar"
            raise TarFormatError(what, offset=begin, kind="truncated")
        self._window, self._window_begin = self._read_exactly(begin, end), begin
        self._next_window_nbytes = min(2 * self._next_window_nbytes, _MAX_WINDOW_NBYTES)
        return self._window

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        # Hot path: with small members, the number of Python operations determines the speed, so an ordinary header takes one
        # struct, one int and one checksum. `Headers.parse` handles each header whose fields after the checksum (type, link,
        # owner, prefix) differ from those of the last ordinary header, and all that are unusual in another way.
        headers = Headers(self.peek, self._nbytes)
        window, base, last = b"", 0, -1  # `last`: the last offset at which the window contains a whole header
        known_rest, known_sum = b"", 0
        total, header_begin, nbytes = self._nbytes, self._begin, 0
        self.end = -1
        self.links = []
        self._next_window_nbytes = _MAX_WINDOW_NBYTES
        while True:
            if header_begin > last:
                if nbytes > _LARGE_MEMBER_NBYTES:
                    self._next_window_nbytes = _MIN_WINDOW_NBYTES
                window, base = self._move_window(header_begin), header_begin
                last = base + len(window) - BLOCK
            at = header_begin - base
            begin = header_begin + BLOCK
            path, size, size_end, checksum, rest = _SPLIT_HEADER(window, at)
            # NUL, or BSD tar's space, follows the size
            if rest == known_rest and not size_end & 0xDF and not headers.own:
                try:
                    name = path.partition(b"\0")[0].decode()
                    nbytes = int(size, 8)
                except ValueError:
                    checksum = b""
                if checksum == b"%06o\0 " % (known_sum + (adler32(window[at : at + 148]) & 0xFFFF)):
                    if 0 <= nbytes <= total - begin:
                        if path[0] != 95 or not _IS_META(name):
                            yield name, begin, nbytes
                        header_begin = begin + nbytes + -nbytes % BLOCK
                        continue
            header = window[at : at + BLOCK]
            if headers.is_end(header, header_begin):
                self.end = header_begin
                return
            self.header_begin = header_begin
            kind, name, nbytes, is_file = headers.parse(header, header_begin)
            if is_file and not _IS_META(name):
                yield name, begin, nbytes
            elif kind in _LINK_TYPES and len(self.links) < _MAX_LINKS:
                self.links.append(name)
            header_begin = begin + nbytes + padding(nbytes)
            if kind in _EXTENDED_TYPES:
                known_rest = known_rest if not headers.common else b""
            elif rest != known_rest and kind == ord("0") and not header[345] and not headers.common:
                known_rest, known_sum = rest, sum(rest) + 8 * 32 - 1


def names_of(read: Callable[[int, int], bytes], begin: int, nbytes: int) -> Iterator[bytes]:
    """Yield the possible names of the member whose content starts at byte `begin` in a file of `nbytes` bytes.

    It is unknown how many extended headers precede the member's header; each number may give another name.
    """
    for blocks in range(1, _MAX_EXTENDED_BLOCKS):
        at, headers = begin - blocks * BLOCK, Headers(read, nbytes)
        try:
            while 0 <= at < begin:
                block = read(at, at + BLOCK)
                if is_extended(block) and parse_number(block[124:136]) > begin - at - 2 * BLOCK:
                    break  # the content could be a megabyte for each member, so it is not read
                header = headers.parse(block, at)
                at += BLOCK
                if at == begin and header.is_file:
                    yield header.name.encode("utf-8", "surrogateescape")
                if header.kind not in _EXTENDED_TYPES:
                    break
                at += header.nbytes + padding(header.nbytes)
        except FormatError:
            continue  # these bytes are not a header
