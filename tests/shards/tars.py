"""Tars of every kind, by hand and by `tarfile`, and what `tarfile` finds in them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

from wds_tensorcache.shards.tar import headers as tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
GIB = 1 << 30


def scanner(archive: bytes) -> tar.Scanner:
    return tar.Scanner(lambda begin, end: archive[begin:end], len(archive))


def scan(archive: bytes) -> list[tuple[str, int, int]]:
    return list(scanner(archive))


def scan_file(path: Path) -> list[tuple[str, int, int]]:
    with path.open("rb") as file:
        return list(tar.Scanner(lambda begin, end: os.pread(file.fileno(), end - begin, begin), path.stat().st_size))


def by_tarfile(file: Any) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        return [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]


def by_tarfile_in(path: Path) -> list[tuple[str, int, int]]:
    with path.open("rb") as file:
        return by_tarfile(file)


def build(members: list[tuple[str, bytes]]) -> bytes:
    """Return a tar with our headers."""
    parts = [tar.build_tar_header(n, len(c)) + c + bytes(tar.padding(len(c))) for n, c in members]
    return b"".join(parts) + tar.END_OF_ARCHIVE


def build_with_tarfile(members: list[Any], format: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    """Return a tar by the standard library, of (name, content) or of (TarInfo, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, **options) as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def special(name: str, kind: bytes, **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member, b""


def raw_header(name: bytes, kind: bytes, size: bytes, prefix: bytes = b"", signed: bool = False) -> bytes:
    """Return a header with fields that no library writes and a right checksum."""
    header = bytearray(name.ljust(100, b"\0") + b"0000444\0" + b"0000000\0" * 2 + size.ljust(12, b"\0"))
    header += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(80) + prefix.ljust(167, b"\0")
    assert len(header) == 512
    checksum = sum(byte - 256 * (signed and byte > 127) for byte in header)
    header[148:156] = b"%06o\0 " % checksum
    return bytes(header)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    content = b"".join(records)
    return raw_header(b"pax", kind, b"%011o" % len(content)) + content + bytes(tar.padding(len(content)))


def record(key: bytes, value: bytes) -> bytes:
    nbytes = len(key) + len(value) + 3
    while len(b"%d" % nbytes) + len(key) + len(value) + 3 != nbytes:
        nbytes += 1
    return b"%d %b=%b\n" % (nbytes, key, value)


LONG = "d" * 60 + "/" + "e" * 60 + "/f.json"
ZOO: list[Any] = [
    ("000.json", b"{}"),
    special("d", tarfile.DIRTYPE, mode=0o755),
    ("d/001.json", b"x" * 512),
    special("d/link", tarfile.SYMTYPE, linkname="001.json"),
    special("d/hard", tarfile.LNKTYPE, linkname="d/001.json"),
    special("d/device", tarfile.CHRTYPE, devmajor=1, devminor=3),
    special("d/fifo", tarfile.FIFOTYPE),
    (LONG, b"y" * 1000),
    special("long link", tarfile.SYMTYPE, linkname="/".join("x" * 30 for _ in range(3))),
    ("g.empty", b""),
    ("g.json", bytes(300_000)),
    ("h.json", bytes(70_000)),
    ("i.json", b"z"),
]

LAST = raw_header(b"last", b"0", b"1") + b"1" + bytes(511) + bytes(1024)
UNUSUAL = {
    "type NUL": raw_header(b"a", b"\0", b"1") + bytes(512),
    "type NUL, a directory": raw_header(b"a/", b"\0", b"1"),
    "a directory with a size": raw_header(b"a", b"5", b"1000"),
    "contiguous": raw_header(b"a", b"7", b"1") + bytes(512),
    "unknown type": raw_header(b"a", b"Z", b"1") + bytes(512),
    "prefix": raw_header(b"a", b"0", b"1", prefix=b"p/q") + bytes(512),
    "prefix, twice": (raw_header(b"a", b"0", b"1", prefix=b"p/q") + bytes(512)) * 2,
    "size ends with a space": raw_header(b"a", b"0", b"00000000001 ") + bytes(512),
    "size of 12 digits": raw_header(b"a", b"0", b"000000000001") + bytes(512),
    "size begins with spaces": raw_header(b"a", b"0", b"         1 ") + bytes(512),
    "size is empty": raw_header(b"a", b"0", b""),
    "base 256": raw_header(b"a", b"0", b"\x80" + bytes(10) + b"\x01") + bytes(512),
    "name of 100 bytes": raw_header(b"a" * 100, b"0", b"1") + bytes(512),
    "bytes after the name": raw_header(b"a\0bc".ljust(100, b"d"), b"0", b"1") + bytes(512),
    "no name": raw_header(b"", b"0", b"1") + bytes(512),
    "not UTF-8": raw_header(b"\xff\xe9.json", b"0", b"1") + bytes(512),
    "signed checksum": raw_header(b"\xff\xe9.json", b"0", b"1", signed=True) + bytes(512),
    "pax path": pax(record(b"path", b"p" * 200)) + raw_header(b"a", b"0", b"1") + bytes(512),
    "pax path with a slash": pax(record(b"path", b"p/")) + raw_header(b"a", b"0", b"1") + bytes(512),
    "pax path not UTF-8": pax(record(b"path", b"\xff\xe9")) + raw_header(b"a", b"0", b"1") + bytes(512),
    "pax path, a prefix": pax(record(b"path", b"p")) + raw_header(b"a", b"0", b"1", prefix=b"q") + bytes(512),
    "pax size": pax(record(b"size", b"600")) + raw_header(b"a", b"0", b"0") + bytes(1024),
    "pax size of a link": pax(record(b"size", b"600")) + raw_header(b"a", b"2", b"0"),
    "pax, twice the same key": pax(record(b"path", b"p"), record(b"path", b"q"), record(b"size", b"1"))
    + raw_header(b"a", b"0", b"0")
    + bytes(512),
    "two pax headers": pax(record(b"path", b"p")) + pax(record(b"path", b"q")) + raw_header(b"a", b"0", b"0"),
    "Solaris's pax": pax(record(b"path", b"p"), kind=b"X") + raw_header(b"a", b"0", b"1") + bytes(512),
    "global comment": pax(record(b"comment", b"0123")) + raw_header(b"a", b"0", b"1") + bytes(512),
    "global path": LAST[:1024]
    + pax(record(b"path", b"p"), kind=b"g")
    + (raw_header(b"a", b"0", b"1") + bytes(512)) * 2
    + pax(record(b"path", b"q"))
    + raw_header(b"a", b"0", b"1")
    + bytes(512),
    "pax and GNU": pax(record(b"path", b"p")) + pax(b"q\0", kind=b"L") + raw_header(b"a", b"0", b"1") + bytes(512),
    "GNU and pax": pax(b"q\0", kind=b"L") + pax(record(b"path", b"p")) + raw_header(b"a", b"0", b"1") + bytes(512),
    "GNU long name": pax(b"q" * 300 + b"\0", kind=b"L") + raw_header(b"a", b"0", b"1", prefix=b"p") + bytes(512),
    "GNU long link": pax(b"q" * 300 + b"\0", kind=b"K") + raw_header(b"a", b"2", b"0"),
    "looks like bzip2": raw_header(b"BZh9.json", b"0", b"1") + bytes(512),
}
