"""Tar headers (FORMAT.md 1). The scanner is faster and stricter than `tarfile`, and yields offsets."""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

from wds_tensorcache.errors import FormatError, Kind, TarFormatError

HIDDEN_REMEDY = (
    "if tars were concatenated, keep each as a shard, or join caches with `tensorcache merge` (tc.merge); if a header was "
    "lost, `tensorcache repair` (tc.repair) saves all other samples"
)
BLOCK = 512
END_OF_ARCHIVE = bytes(2 * BLOCK)
Records = dict[bytes, bytes]

_MAX_OCTAL_NBYTES = 8**11  # 11 octal digits: from 8 GiB on, a pax record is needed
_MAX_RECORDS_NBYTES = 1 << 20
_MAX_FIELD_NBYTES = 100
_MAX_NAME_NBYTES = 1 << 14  # a longer name in a global pax header would cost time for each later member
_MAX_EXTENDED_BLOCKS = 10  # `names_of` searches fewer blocks than this before a member's content
_MAX_WINDOW_NBYTES = 1 << 18
_MIN_WINDOW_NBYTES = 1 << 13
_LARGE_MEMBER_NBYTES = 1 << 16
_CHUNK_NBYTES = 1 << 20
_MAX_LINKS = 1000
_PERHAPS_NO_TAR = (
    "; the file is not a tar, or its beginning is damaged: check the path, or copy the file again; if it is damaged, "
    "`tensorcache repair` (tc.repair) saves its other samples"
)

# the bytes that webdataset's TarWriter writes around name, size and checksum
_OWNER = b"0000444\0" + b"0000000\0" * 2
_TIME = bytes(1) + b"00000000000\0"
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + b"bigdata".ljust(32, b"\0") * 2 + bytes(183)
_BASE_SUM = sum(_OWNER + _TIME + b" " * 8 + _TAIL)
_PACK_HEADER = struct.Struct("100s24s11s13s8s356s").pack

# name, size, the byte after the size, checksum, and the rest, which starts with the typeflag
_SPLIT_HEADER = struct.Struct("100s24x11sB12x8s356s").unpack_from
_FILE_TYPES = frozenset(b"0\x007")
_LINK_TYPES = frozenset(b"12")  # hard and symbolic
_EMPTY_TYPES = frozenset(b"123456")  # links, devices, directories, FIFOs: no content, whatever the size field says
_EXTENDED_TYPES = frozenset(b"xXgLK")  # pax records (x, X: of one member, g: of all), GNU long name (L) and link (K)
_GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = b"gLKS"
_MAGIC, _MAGIC_BEGIN = b"ustar", 257
_IS_META = re.compile(r"__[^/]*__($|/)|___?\Z").match  # webdataset's tar_file_iterator skips these names
_OCTAL = re.compile(rb"[0-7]*").fullmatch
_RECORD_LENGTH = re.compile(rb"([0-9]{1,19}) ")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_UNPACKERS = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz", "zstd": "unzstd", "lz4": "unlz4"}
_AGAIN, _IMPORT = (
    "download the shard again",
    "`tensorcache import` (tc.import_cache) makes shards of a folder of such files",
)
# pattern of the first bytes -> kind of the file, and the remedy
_OTHER_FILES = {
    re.compile(pattern, re.DOTALL | re.IGNORECASE).match: advice
    for pattern, advice in {
        rb"version https://git-lfs": ("a pointer of Git LFS, not the file itself", "run `git lfs pull`"),
        rb"\s*(<!doctype html|<html)": ("a web page, perhaps of a login or an error", f"check the url, and {_AGAIN}"),
        rb"\s*<\?xml|\s*<error": ("XML, perhaps the error of an object store", f"check the url, and {_AGAIN}"),
        rb".{6}\0\0\{": ("a .safetensors file", _IMPORT),
        rb"PK\x03\x04": ("a zip, as .npz, .pt and .zip files are", _IMPORT),
        rb"\x93NUMPY": ("a .npy file", _IMPORT),
        rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF.{4}WEBP": (
            "a picture, as .png, .jpg, .gif and .webp files are",
            "check the path",
        ),
        rb"\s*[{\[]": ("JSON", "pass a shard, or the folder of the shards"),
    }.items()
}


def padding(nbytes: int) -> int:
    """Return the number of zeros that follow `nbytes` bytes of content."""
    return -nbytes % BLOCK


def is_meta_name(name: str) -> bool:
    """Return whether webdataset skips a member with this name as metadata."""
    return _IS_META(name) is not None


def is_extended(header: bytes) -> bool:
    """Return whether a header's content describes later members (pax, GNU long names)."""
    return header[156] in _EXTENDED_TYPES


def is_header(block: bytes) -> bool:
    return len(block) == BLOCK and parse_number(block[148:156]) == _sum_of(block)


def build_tar_header(name: str, nbytes: int) -> bytes:
    """Return the header of an ordinary file, as webdataset's `TarWriter(mtime=0)` writes it.

    `name` must have at most 100 bytes, all ASCII. The header has 512 bytes, or 1,536 bytes for a file of 8 GiB or more, whose
    size needs a pax record.
    """
    if nbytes >= _MAX_OCTAL_NBYTES:
        return _build_by_tarfile(name, nbytes, 0o444, "bigdata")
    path = name.encode("ascii")
    size = b"%011o" % nbytes
    # The lower half of Adler-32 is 1 + the sum of the bytes, modulo 65,521. The sum of up to 256 bytes is smaller than that.
    checksum = b"%06o\0 " % (_BASE_SUM - 1 + (adler32(path + size) & 0xFFFF))
    return _PACK_HEADER(path, _OWNER, size, _TIME, checksum, _TAIL)


def rebuild_header(name: str, nbytes: int) -> bytes:
    """Return a new header for a member whose header was lost. A pax header precedes it if name or size do not fit."""
    if name.isascii() and len(name) <= _MAX_FIELD_NBYTES:
        return build_tar_header(name, nbytes)
    return _build_by_tarfile(name, nbytes)


def _build_by_tarfile(name: str, nbytes: int, mode: int = 0o644, owner: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = nbytes, mode, owner, owner
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def check_length(content: bytes, begin: int, end: int) -> None:
    """Raise TarFormatError unless `content` contains all of the bytes `[begin, end)`."""
    if len(content) < end - begin:
        raise _error(f"truncated: expected {end - begin} bytes, got {len(content)}", begin, "truncated")


def parse_number(field: bytes) -> int:
    """Parse a number field, octal or GNU's base 256. Return 0 if it is blank, -1 if it is neither."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = field.partition(b"\0")[0].strip()
    return int(digits or b"0", 8) if _OCTAL(digits) else -1


def parse_records(content: bytes, begin: int) -> Records:
    """Return path and size in pax records. Raise TarFormatError for malformed records and sparse members."""
    records: Records = {}
    at = 0
    while at < len(content):
        # a record is `LENGTH KEY=VALUE` and a line feed
        length = _RECORD_LENGTH.match(content, at)
        end = at + int(length[1]) if length else 0
        key, equals, value = content[length.end() : end - 1].partition(b"=") if length else (b"", b"", b"")
        if not key or not equals or content[end - 1 : end] != b"\n":
            raise _error(f"malformed pax record {content[at : at + 40]!r}", begin + at, "extended-header")
        if key.startswith(b"GNU.sparse."):
            raise _error("a GNU sparse member, expected one without holes", begin + at, "sparse")
        if key in (b"path", b"size"):
            if not (value.strip(b"/") if key == b"path" else value.isdigit() and len(value) < 20):
                problem = f"the pax record of a {key.decode()} has an impossible value {value[:40]!r}"
                raise _error(problem, begin + at, "extended-header")
            records[key] = value.rstrip(b"/")
        at = end
    return records


def _sum_of(header: bytes) -> int:
    """Return the checksum of a header, with spaces in its own field."""
    halves = (adler32(header[:256]) & 0xFFFF) + (adler32(header[256:]) & 0xFFFF) - 2
    return halves - sum(header[148:156]) + 8 * 32


def _refuse_other_file(head: bytes) -> None:
    """Raise TarFormatError if the first bytes show another kind of file."""
    # Call this only if the bytes are not a header: the first member of a tar may have the name `BZh9.json`.
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise _error(
                f"{name}: a compressed tar cannot be indexed; {unpack_remedy(name, 'it', 'PATH')}", 0, "compressed"
            )
    for matches, (kind, remedy) in _OTHER_FILES.items():
        if matches(head):
            raise _error(f"the file is not a tar, but seems to be {kind}; {remedy}", 0, "checksum")


def unpack_remedy(compression: str, tars: str, source: str) -> str:
    """Return the remedy for compressed tars. `source` is their path or pattern in a Python call."""
    # streams expand the formats that Python's own modules can expand
    source = source if compression in ("gzip", "bzip2", "xz") else f"['pipe:{compression} -dc PATH', …]"
    return f"unpack {tars} with `{_UNPACKERS[compression]}`, or read {tars} as a stream: tc.ResumablePipeline({source})"


def _error(problem: str, offset: int, kind: Kind) -> TarFormatError:
    return TarFormatError(problem, offset=offset, kind=kind)


class Header(NamedTuple):
    """A parsed header. The member's name and size may come from extended headers before it."""

    kind: int  # the typeflag, byte 156
    name: str  # decoded as UTF-8 with surrogateescape
    nbytes: int  # length of the content, without padding
    is_file: bool  # True for an ordinary file


class Headers:
    """A parser of a tar's headers, in order.

    The tar has `nbytes` bytes, and `read(begin, end)` must return exactly its bytes `[begin, end)`.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int) -> None:
        self.own: Records = {}  # path and size for the next member, from extended headers
        self.common: Records = {}  # path for all following members, from global headers
        self._read = read
        self._nbytes = nbytes
        self._expected_at = -1  # after an extended header, the offset at which another header must follow

    def is_end(self, header: bytes, begin: int) -> bool:
        """Return whether the archive ends at byte `begin`. Raise TarFormatError if an extended header precedes the end."""
        if header.count(0) < BLOCK:
            return False
        if begin == self._expected_at:
            raise _error("the archive ends after an extended header", begin, "extended-header")
        return True

    def parse(self, header: bytes, begin: int) -> Header:
        """Parse the header at byte `begin`, with its content if extended. Raise TarFormatError if either breaks a rule."""
        checksum = _sum_of(header)
        if parse_number(header[148:156]) != checksum:
            if not begin:
                _refuse_other_file(header)
            problem = f"bad checksum: the bytes add up to {checksum:06o}, the header has {header[148:156]!r}"
            raise _error(problem if begin else problem + _PERHAPS_NO_TAR, begin, "checksum")
        kind, path, nbytes = header[156], header[:100].partition(b"\0")[0], parse_number(header[124:136])
        if kind == _SPARSE:
            raise _error(f"{path!r} is a GNU sparse member, expected one without holes", begin, "sparse")
        if kind not in _EXTENDED_TYPES:
            prefix = header[345:500].partition(b"\0")[0]
            path = self.own.get(b"path", self.common.get(b"path", prefix + b"/" + path if prefix else path))
            nbytes = 0 if kind in _EMPTY_TYPES else int(self.own.get(b"size", nbytes))
            self.own.clear()
        if len(path) > _MAX_NAME_NBYTES:
            problem = f"the name has {len(path)} bytes, expected at most {_MAX_NAME_NBYTES}: {path!r:.120}"
            raise _error(problem, begin, "header")
        if nbytes < 0:
            problem = f"the size is {header[124:136]!r}, expected a non-negative number, octal or base 256"
            raise _error(problem, begin, "header")
        if nbytes > self._nbytes - begin - BLOCK:
            problem = f"{path!r:.120} has {nbytes} bytes from byte {begin + BLOCK} on, but the file has {self._nbytes}"
            raise _error(f"truncated, or a wrong size: {problem}", begin, "truncated")
        if kind in _EXTENDED_TYPES:
            self._apply(kind, begin, nbytes)
            self._expected_at = begin + BLOCK + nbytes + padding(nbytes)
        return Header(kind, path.decode("utf-8", "surrogateescape"), nbytes, kind in _FILE_TYPES)

    def _apply(self, kind: int, header_begin: int, nbytes: int) -> None:
        if nbytes > _MAX_RECORDS_NBYTES:
            problem = f"the extended header has {nbytes} bytes, expected at most {_MAX_RECORDS_NBYTES}"
            raise _error(problem, header_begin, "extended-header")
        begin = header_begin + BLOCK
        content = self._read(begin, begin + nbytes)
        if kind == _LONG_NAME:
            self.own.setdefault(b"path", content.partition(b"\0")[0])
        elif kind == _GLOBAL:
            self.common.update(parse_records(content, begin))
            if b"size" in self.common:
                problem = "a global pax header declares one size for all members, expected a size per member"
                raise _error(problem, header_begin, "extended-header")
        elif kind != _LONG_LINK:
            # if two extended headers precede a member, tarfile uses the first
            self.own = parse_records(content, begin) | self.own


class Scanner:
    """The ordinary files of one uncompressed tar. Iterating yields name, offset and length of the content of each file.

    The scanner skips directories, links, devices and names that webdataset reserves for its own metadata (`__…__`). It reads
    headers in windows of 256 KiB; after a large member, it reads 8 KiB. Only one iteration may run at a time.

    Args:
        read: Function that returns the bytes `[begin, end)` of the file.
        nbytes: Length of the file.
        begin: Offset of the first header.

    Raises:
        TarFormatError: The tar is compressed or truncated (stock readers accept a missing end-of-archive block), contains a
            sparse member, or breaks another rule of the format. Raised while iterating, with the offset in the tar.
    """

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int, begin: int = 0) -> None:
        self.links: list[str] = []  # names of the first 1,000 links that were skipped
        self.end = -1  # offset of the end-of-archive block, once an iteration has reached it
        self.header_begin = begin  # offset of the last header that `Headers.parse` read or refused
        self._read = read
        self._nbytes = nbytes
        self._begin = begin
        self._window = b""
        self._window_begin = 0
        self._next_window_nbytes = _MAX_WINDOW_NBYTES

    def peek(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of the tar, read if needed. Memory: a copy."""
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
                _refuse_other_file(self._read_exactly(0, end))
            problem = f"truncated: the file ends at byte {self._nbytes}, without an end-of-archive block"
            problem += "" if begin else _PERHAPS_NO_TAR
            raise _error(problem if self._nbytes else "the file is empty, expected a tar", begin, "truncated")
        self._window, self._window_begin = self._read_exactly(begin, end), begin
        self._next_window_nbytes = min(2 * self._next_window_nbytes, _MAX_WINDOW_NBYTES)
        return self._window

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        # Hot path: with small members, the number of Python operations determines the speed, so an ordinary header takes one
        # struct, one int and one checksum. `Headers.parse` handles all unusual headers. A header is unusual if its fields after
        # the checksum (type, link, owner, prefix) differ from those of the last ordinary header.
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
            # NUL, or BSD tar's space, follows the size; `int` would also accept signs, underscores and prefixes
            if rest == known_rest and size.isdigit() and not size_end & 0xDF and not headers.own:
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


def names_of(read: Callable[[int, int], bytes], begin: int, nbytes: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the possible names, lengths and header offsets of one member.

    Its content starts at byte `begin` of a file of `nbytes` bytes.
    """
    # extended headers may change the name, and their number is unknown, so each possible first header is tried
    for blocks in range(1, _MAX_EXTENDED_BLOCKS):
        first, headers = begin - blocks * BLOCK, Headers(read, nbytes)
        at = first
        try:
            while 0 <= at < begin:
                block = read(at, at + BLOCK)
                if is_extended(block) and parse_number(block[124:136]) > begin - at - 2 * BLOCK:
                    break  # the content could be a megabyte for each member, so it is not read
                header = headers.parse(block, at)
                at += BLOCK
                if at == begin and header.is_file:
                    yield header.name.encode("utf-8", "surrogateescape"), header.nbytes, first
                if header.kind not in _EXTENDED_TYPES:
                    break
                at += header.nbytes + padding(header.nbytes)
        except FormatError:
            continue  # these bytes are not a header


def find_header(
    read: Callable[[int, int], bytes], begin: int, end: int, accept: Callable[[bytes], bool] = is_header
) -> int | None:
    """Return the offset of the first tar header in `[begin, end)`.

    `begin` is the offset of a block. `accept` returns whether a block with the magic `ustar` is such a header.
    """
    for at in range(begin, end, _CHUNK_NBYTES):
        header_begin = find_header_in(read(at, min(at + _CHUNK_NBYTES, end)), accept)
        if header_begin is not None:
            return at + header_begin
    return None


def find_header_in(blocks: bytes, accept: Callable[[bytes], bool] = is_header) -> int | None:
    """Return the offset in `blocks` of the first tar header. `accept` is as in `find_header`."""
    at = blocks.find(_MAGIC)
    while at >= 0:
        begin = at - _MAGIC_BEGIN
        if begin % BLOCK == 0 and accept(blocks[begin : begin + BLOCK]):
            return begin
        at = blocks.find(_MAGIC, at + 1)
    return None


def hidden_members(end: int, offset: int) -> TarFormatError:
    """Return the error for a tar header after the archive's end."""
    problem = f"a tar header after the end of the archive at byte {end}: readers see no member from here on"
    return _error(f"{problem}; {HIDDEN_REMEDY}", offset, "trailing")
