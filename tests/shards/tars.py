"""Tars of every kind, by hand and by `tarfile`, and what `tarfile` finds in them."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import wds_tensorcache as tc

BLOCK = 512

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
GIB = 1 << 30
_SPLIT = re.compile(r"((?:.*/)?[^./]+)(\.[^/]*)", re.DOTALL).fullmatch
_IS_SKIPPED = re.compile(r"__[^/]*__($|/)|___?\Z").match


def scan(archive: bytes) -> list[tuple[str, int, int]]:
    """Return name, offset and length of the members of samples, as an index of the archive lists them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        path.write_bytes(archive)
        return scan_file(path)


def scan_file(path: Path) -> list[tuple[str, int, int]]:
    index = tc.write_index(path, dali_index=False)
    keys, table = list(index.keys), index.members_in_order()
    columns = (column.tolist() for column in (table.rows, table.kinds, table.begins, table.sizes))
    return [(f"{keys[row]}.{table.suffixes[kind]}", *extent) for row, kind, *extent in zip(*columns, strict=True)]  # type: ignore[misc]


def of_samples(members: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return the members that webdataset puts into samples. Like webdataset, make their suffixes lower case."""
    named = [(_SPLIT(name), *extent) for name, *extent in members if not _IS_SKIPPED(name)]
    return [(split[1] + split[2].lower(), *extent) for split, *extent in named if split]


def by_tarfile(file: Any) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        return [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]


def by_tarfile_in(path: Path) -> list[tuple[str, int, int]]:
    with path.open("rb") as file:
        return by_tarfile(file)


def halves(key: str, sample: Any) -> list[tuple[str, bytes]]:
    """Return the two members of a sample with their names."""
    return list(zip((f"{key}.skel.pyd", f"{key}.safetensors"), tc.encode_sample(sample), strict=True))


def build(members: list[tuple[str, bytes]]) -> bytes:
    """Return a tar with the headers that webdataset and `ShardWriter` write."""
    parts = []
    for name, content in members:
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.uname, member.gname = len(content), 0o444, "bigdata", "bigdata"
        parts += [member.tobuf(tarfile.PAX_FORMAT), content, bytes(-len(content) % BLOCK)]
    return b"".join(parts) + bytes(2 * BLOCK)


def build_with_tarfile(members: list[Any], format: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    """Return a tar by the standard library, of (name, content) or of (TarInfo, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, **options) as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def fix_checksums(archive: bytes) -> bytes:
    """Return a tar with the checksum of each header as its changed bytes need it."""
    fixed = bytearray(archive)
    for at in range(0, len(fixed) - BLOCK + 1, BLOCK):
        if fixed[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + BLOCK])
    return bytes(fixed)


def special(name: str, kind: bytes, **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member, b""


def raw_header(name: bytes, kind: bytes, size: bytes, prefix: bytes = b"") -> bytes:
    """Return a header with fields that no library writes and a right checksum."""
    header = bytearray(name.ljust(100, b"\0") + b"0000444\0" + b"0000000\0" * 2 + size.ljust(12, b"\0"))
    header += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(80) + prefix.ljust(167, b"\0")
    assert len(header) == BLOCK
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    content = b"".join(records)
    return raw_header(b"pax", kind, b"%011o" % len(content)) + content + bytes(-len(content) % BLOCK)


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

LAST = raw_header(b"last.x", b"0", b"1") + b"1" + bytes(511) + bytes(1024)
A = raw_header(b"a.x", b"0", b"1") + bytes(512)
EMPTY = raw_header(b"a.x", b"0", b"0")
UNUSUAL = {
    "type NUL": raw_header(b"a.x", b"\0", b"1") + bytes(512),
    "a directory with a size": raw_header(b"a.x", b"5", b"1000"),
    "contiguous": raw_header(b"a.x", b"7", b"1") + bytes(512),
    "unknown type": raw_header(b"a.x", b"Z", b"1") + bytes(512),
    "prefix, twice": b"".join(raw_header(n, b"0", b"1", prefix=b"p/q").ljust(1024, b"\0") for n in (b"a.x", b"b.x")),
    "size ends with a space": raw_header(b"a.x", b"0", b"00000000001 ") + bytes(512),
    "size of 12 digits": raw_header(b"a.x", b"0", b"000000000001") + bytes(512),
    "size begins with spaces": raw_header(b"a.x", b"0", b"         1 ") + bytes(512),
    "size is empty": raw_header(b"a.x", b"0", b""),
    "base 256": raw_header(b"a.x", b"0", b"\x80" + bytes(10) + b"\x01") + bytes(512),
    "name of 100 bytes": raw_header(b"a" * 98 + b".x", b"0", b"1") + bytes(512),
    "bytes after the name": raw_header(b"a.x\0bc".ljust(100, b"d"), b"0", b"1") + bytes(512),
    "no name": raw_header(b"", b"0", b"1") + bytes(512),
    "not UTF-8": raw_header(b"\xff\xe9.json", b"0", b"1") + bytes(512),
    "pax path": pax(record(b"path", b"p" * 200 + b".x")) + A,
    "pax path with a slash": pax(record(b"path", b"p.x/")) + A,
    "pax path not UTF-8": pax(record(b"path", b"\xff\xe9.x")) + A,
    "pax path, a prefix": pax(record(b"path", b"p.x")) + raw_header(b"a.x", b"0", b"1", prefix=b"q") + bytes(512),
    "pax size": pax(record(b"size", b"600")) + EMPTY + bytes(1024),
    "pax size of a link": pax(record(b"size", b"600")) + raw_header(b"a.x", b"2", b"0"),
    "pax, twice the same key": pax(*(record(b"path", name) for name in (b"p.x", b"q.x")), record(b"size", b"1"))
    + EMPTY
    + bytes(512),
    "two pax headers": pax(record(b"path", b"p.x")) + pax(record(b"path", b"q.x")) + EMPTY,
    "Solaris's pax": pax(record(b"path", b"p.x"), kind=b"X") + A,
    "global comment": pax(record(b"comment", b"0123"), kind=b"g") + A,
    "pax and GNU": pax(record(b"path", b"p.x")) + pax(b"q.x\0", kind=b"L") + A,
    "GNU and pax": pax(b"q.x\0", kind=b"L") + pax(record(b"path", b"p.x")) + A,
    "GNU long name": pax(b"q" * 300 + b".x\0", kind=b"L") + raw_header(b"a.x", b"0", b"1", prefix=b"p") + bytes(512),
    "GNU long name without a NUL": pax(b"q" * 300 + b".x", kind=b"L") + A,
    "GNU long name of whole blocks": pax(b"q" * 510 + b".x", kind=b"L") + A,
    "GNU long link": pax(b"q" * 300 + b".x\0", kind=b"K") + raw_header(b"a.x", b"2", b"0"),
    "looks like bzip2": raw_header(b"BZh9.json", b"0", b"1") + bytes(512),
}
