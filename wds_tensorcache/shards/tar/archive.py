"""Tar headers, built and scanned here because offsets and speed matter; what is read is what `tarfile` reads (FORMAT.md 1)."""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from zlib import adler32

from wds_tensorcache.errors import FormatError, TarFormatError
from wds_tensorcache.shards.tar.fields import (
    Pairs,
    Records,
    check_checksum,
    parse_number,
    parse_records,
    refuse_compressed,
)

__all__ = [
    "BLOCK",
    "END_OF_ARCHIVE",
    "Scanner",
    "build_header",
    "is_extended",
    "is_meta_name",
    "names_of",
    "padding",
    "rebuild_header",
]

BLOCK = 512
END_OF_ARCHIVE = bytes(2 * BLOCK)

_MAX_OCTAL_NBYTES = 8**11  # 11 digits: 8 GiB and more need a pax record
_MAX_RECORDS_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100
_MAX_NAME_NBYTES = 1 << 14  # a global pax header names all members that follow, and each name takes its time
_MAX_EXTENDED_BLOCKS = 10  # before a header, as far as `names_of` looks back
_MAX_WINDOW_NBYTES = 1 << 18
_MIN_WINDOW_NBYTES = 1 << 13
_LARGE_MEMBER_NBYTES = 1 << 16

# What webdataset's TarWriter writes around name, size and checksum.
_OWNER = b"0000444\0" + b"0000000\0" * 2
_TIME = bytes(1) + b"00000000000\0"
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + b"bigdata".ljust(32, b"\0") * 2 + bytes(183)
_BASE_SUM = sum(_OWNER + _TIME + b" " * 8 + _TAIL)
_PACK_HEADER = struct.Struct("100s24s11s13s8s356s").pack

_SPLIT_HEADER = struct.Struct("100s24x11sB12x8s356s").unpack_from  # name, size, its end, checksum, from typeflag on
_FILE_TYPES = frozenset(b"0\x007")
_EMPTY_TYPES = frozenset(b"123456")  # links, devices, directories, FIFOs: their size field counts no content
_EXTENDED_TYPES = frozenset(b"xXgLK")  # pax records of one member, Solaris's, of all members; GNU long name and link
_IS_META = re.compile(r"__[^/]*__($|/)|___?\Z").match  # webdataset's tar_file_iterator skips these names


def padding(nbytes: int) -> int:
    """Return how many zero bytes follow `nbytes` bytes of content, up to the next multiple of 512."""
    return -nbytes % BLOCK


def is_meta_name(name: str) -> bool:
    """Return whether webdataset takes a member of this name for metadata, and skips it."""
    return _IS_META(name) is not None


def is_extended(header: bytes) -> bool:
    """Return whether a header is of pax records or a long name: what they are of follows."""
    return header[156] in _EXTENDED_TYPES


def build_header(name: str, nbytes: int) -> bytes:
    """Return the header of an ordinary file, byte for byte what webdataset's `TarWriter(mtime=0)` writes.

    Args:
        name: Member name, at most 100 ASCII bytes: `names.check_suffixes` has seen to that.
        nbytes: Length of the content in bytes, not negative.

    Returns:
        512 bytes; from 8 GiB on 1,536 bytes, since such a size needs a pax record in front.
    """
    if nbytes >= _MAX_OCTAL_NBYTES:
        return _build_pax_size(nbytes) + build_header(name, 0)
    path = name.encode("ascii")
    size = b"%011o" % nbytes
    # Adler-32 begins with 1 + the sum of the bytes, modulo 65,521 that at most 256 bytes cannot reach.
    checksum = b"%06o\0 " % (_BASE_SUM - 1 + (adler32(path + size) & 0xFFFF))
    return _PACK_HEADER(path, _OWNER, size, _TIME, checksum, _TAIL)


def rebuild_header(name: str, nbytes: int) -> bytes:
    """Return the headers of an ordinary file of any name, for a member that has lost its own."""
    if name.isascii() and len(name) <= _MAX_FIELD_NBYTES:
        return build_header(name, nbytes)
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _build_pax_size(nbytes: int) -> bytes:
    record = b"%d size=%d\n" % (len(str(nbytes)) + 9, nbytes)  # 10 to 19 digits: the length itself has 2
    header = bytearray(b"././@PaxHeader".ljust(100, b"\0") + b"0000000\0" * 3)
    header += b"%011o" % len(record) + _TIME + b" " * 8 + b"x" + bytes(100) + b"ustar\x0000" + bytes(247)
    header[148:155] = b"%06o\0" % sum(header)
    return bytes(header) + record.ljust(BLOCK, b"\0")


class Scanner:
    """The ordinary files of one uncompressed tar: iterating yields `(name, begin, nbytes)` for each.

    `begin` is the offset of the content in the tar and `nbytes` its length, both in bytes. Names are decoded as UTF-8,
    other bytes with surrogateescape. Directories, links, devices and names that webdataset takes for its own metadata
    (`__…__`) are skipped. Content is not read unless it lies between headers that are near each other: small members
    are scanned in windows of 256 KiB, and large ones cost a read of 8 KiB each.

    Args:
        read: `read(begin, end)` returns exactly those bytes of the file.
        nbytes: Length of the file.
        begin: Of the first header.

    Raises:
        TarFormatError: While iterating, with the offset in the tar. The tar is compressed, truncated (stock readers take a
            missing end-of-archive block for the end), sparse, or breaks a rule of its format.

    Threads: not safe; one iteration at a time.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int, begin: int = 0) -> None:
        self.end = -1  # offset of the end-of-archive block, when an iteration has reached it
        self.header_begin = begin  # of the last header that was not like the one before it, or could not be read
        self._read = read
        self._nbytes = nbytes
        self._begin = begin
        self._window = b""
        self._window_begin = 0
        self._next_window_nbytes = _MAX_WINDOW_NBYTES

    def peek(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of the tar: from the scanner's window if they are there, else by a read.

        Raises:
            FormatError: The file has fewer bytes than it had.

        Memory: a copy.
        """
        base = self._window_begin
        if base <= begin and end <= base + len(self._window):
            return self._window[begin - base : end - base]
        return self._read_exactly(begin, end)

    def _read_exactly(self, begin: int, end: int) -> bytes:
        content = self._read(begin, end)
        if len(content) != end - begin:
            raise TarFormatError(
                f"truncated: expected {end - begin} bytes, got {len(content)}", offset=begin, kind="truncated"
            )
        return content

    def _move_window(self, begin: int) -> bytes:
        end = min(begin + self._next_window_nbytes, self._nbytes)
        if end - begin < BLOCK:
            if not self._nbytes:
                raise TarFormatError("the file is empty, expected a tar", offset=0, kind="truncated")
            if not begin:
                refuse_compressed(self._read_exactly(0, end))
            raise TarFormatError(
                f"truncated: the file ends at {self._nbytes}, without an end-of-archive block",
                offset=begin,
                kind="truncated",
            )
        self._window = self._read_exactly(begin, end)
        self._window_begin = begin
        self._next_window_nbytes = min(2 * self._next_window_nbytes, _MAX_WINDOW_NBYTES)
        return self._window

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        # Hot path: what counts for small members is the number of Python's operations, so one header is one
        # struct, one int and one checksum. Every header that differs behind its checksum from the last ordinary one
        # (type, link, owner, prefix), or in any other way, goes to _read_header.
        own: dict[bytes, bytes] = {}  # path and size of the next member, where an extended header has them
        common: dict[bytes, bytes] = {}  # path of all members, likewise
        window, base, last = b"", 0, -1  # `last`: where the last header begins that is whole in the window
        known_rest, known_sum, expected_at = b"", 0, -1
        total, header_begin, nbytes = self._nbytes, self._begin, 0
        self.end = -1
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
            if rest == known_rest and not size_end & 0xDF and not own:  # NUL, or BSD tar's space
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
            if header.count(0) == BLOCK:
                if header_begin == expected_at:
                    raise TarFormatError(
                        "the archive ends behind an extended header", offset=header_begin, kind="extended-header"
                    )
                self.end = header_begin
                return
            kind, name, nbytes = self._read_header(header, header_begin, own, common)
            if kind in _FILE_TYPES and not _IS_META(name):
                yield name, begin, nbytes
            header_begin = begin + nbytes + padding(nbytes)
            if kind in _EXTENDED_TYPES:
                expected_at = header_begin
                known_rest = known_rest if not common else b""
            elif rest != known_rest and kind == ord("0") and not header[345] and not common:
                known_rest, known_sum = rest, sum(rest) + 8 * 32 - 1

    def read_header(
        self, header: bytes, header_begin: int, own: Records, common: Records, sparse: Pairs | None = None
    ) -> tuple[bool, str, int]:
        """Return whether a header is an ordinary file's, name and length of content.

        Put into `own` and `common` what extended headers say, which is of the next member and of all of them; into `sparse` the
        records of GNU sparse members, which are refused without it.

        Raises:
            FormatError: It is not a header that this reads.
        """
        kind, name, nbytes = self._read_header(header, header_begin, own, common, sparse)
        return kind in _FILE_TYPES or kind == ord("S"), name, nbytes

    def _read_header(
        self, header: bytes, header_begin: int, own: Records, common: Records, sparse: Pairs | None = None
    ) -> tuple[int, str, int]:
        """Return type, name and length of content; put into `own` and `common` what extended headers say, and use it."""
        self.header_begin = header_begin
        check_checksum(header, header_begin)
        begin, kind = header_begin + BLOCK, header[156]
        path = header[:100].partition(b"\0")[0]
        nbytes = parse_number(header[124:136])
        if kind == ord("S") and sparse is None:
            raise TarFormatError(
                f"{path!r} is a GNU sparse member, expected one without holes", offset=header_begin, kind="sparse"
            )
        if kind == 0 and path.endswith(b"/"):
            kind = ord("5")  # a directory, as V7 wrote it
        if kind not in _EXTENDED_TYPES:
            prefix = header[345:500].partition(b"\0")[0] if kind != ord("S") else b""  # there is its map
            path = own.get(b"path", common.get(b"path", prefix + b"/" + path if prefix else path))
            nbytes = 0 if kind in _EMPTY_TYPES else int(own.get(b"size", nbytes))
            own.clear()
        if len(path) > _MAX_NAME_NBYTES:
            raise TarFormatError(
                f"a name of {len(path)} bytes, expected at most {_MAX_NAME_NBYTES}: {path!r:.120}",
                offset=header_begin,
                kind="header",
            )
        if nbytes < 0:
            field = header[124:136]
            raise TarFormatError(
                f"the size is {field!r}, expected octal digits or base 256, not negative",
                offset=header_begin,
                kind="header",
            )
        if nbytes > self._nbytes - begin:
            raise TarFormatError(
                f"truncated, or a wrong size: {path!r:.120} has {nbytes} bytes from {begin} on, "
                f"the file {self._nbytes}",
                offset=header_begin,
                kind="truncated",
            )
        if kind in _EXTENDED_TYPES:
            if nbytes > _MAX_RECORDS_NBYTES:
                raise TarFormatError(
                    f"an extended header of {nbytes} bytes, expected at most {_MAX_RECORDS_NBYTES}",
                    offset=header_begin,
                    kind="extended-header",
                )
            content = self.peek(begin, begin + nbytes)
            if kind == ord("L"):
                if b"\0" not in content:
                    raise TarFormatError(
                        f"a long name of {nbytes} bytes, expected a NUL after it", offset=begin, kind="extended-header"
                    )
                own.setdefault(b"path", content.partition(b"\0")[0])
            elif kind == ord("g"):
                common.update(parse_records(content, begin))
                if b"size" in common:
                    raise TarFormatError(
                        "a global pax header has a size, for all members", offset=header_begin, kind="extended-header"
                    )
            elif kind != ord("K"):
                for key, value in parse_records(content, begin, sparse).items():
                    own.setdefault(key, value)  # of two extended headers tarfile obeys the first
        return kind, path.decode("utf-8", "surrogateescape"), nbytes


def names_of(read: Callable[[int, int], bytes], begin: int, nbytes: int) -> Iterator[bytes]:
    """Yield the names that the member whose content begins at byte `begin` may have: by its header, and by extended ones.

    Args:
        read: Returns the bytes `[begin, end)` of the file.
        begin: Of the content.
        nbytes: Length of the file.
    """
    scanner = Scanner(read, nbytes)
    for blocks in range(1, _MAX_EXTENDED_BLOCKS):
        at, own = begin - blocks * BLOCK, dict[bytes, bytes]()
        try:
            while 0 <= at < begin:
                header = read(at, at + BLOCK)
                if is_extended(header) and parse_number(header[124:136]) > begin - at - 2 * BLOCK:
                    break  # before it is read: it may be a megabyte, and each member may have one
                kind, name, size = scanner._read_header(header, at, own, {})
                at += BLOCK
                if at == begin and kind in _FILE_TYPES:
                    yield name.encode("utf-8", "surrogateescape")
                if kind not in _EXTENDED_TYPES:
                    break
                at += size + padding(size)
        except FormatError:
            continue  # no header at this place
