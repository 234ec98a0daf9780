"""Headers are webdataset's own bytes; what the scanner finds is what `tarfile` finds, or an error with its offset."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from wds_tensorcache.shards import tar

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
    """Return a tar of our own headers."""
    parts = [tar.build_header(n, len(c)) + c + bytes(tar.padding(len(c))) for n, c in members]
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


@pytest.fixture
def gnu_tar() -> str:
    path = shutil.which("tar")
    if path is None or "GNU tar" not in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("GNU tar is missing: apt install tar")
    return path


# --- headers ---


@given(
    st.dictionaries(st.from_regex(r"[a-z0-9/-]{1,80}\.[a-z.]{1,19}", fullmatch=True), st.integers(0, 2000), max_size=5)
)
def test_headers_are_those_of_webdataset(sizes: dict[str, int]) -> None:
    file = io.BytesIO()
    sink = wds.TarWriter(file, encoder=False, mtime=0)
    members = [(name, bytes(nbytes)) for name, nbytes in sizes.items()]
    for name, content in members:
        key, _, suffix = name.partition(".")
        sink.write({"__key__": key, suffix: content})
    sink.close()
    expected = file.getvalue()
    archive = build(members)
    assert archive == expected[: len(archive)]
    assert not any(expected[len(archive) :])
    assert scan(archive) == by_tarfile(io.BytesIO(archive))


@pytest.mark.parametrize("nbytes", [0, 1, 8**11 - 1, 8**11, 10**10 - 1, 10**10, 123 * 1024 * GIB])
@pytest.mark.parametrize("name", ["a.b", "d/" + "x" * 92 + ".json", "x" * 90 + "." + "y" * 9])
def test_headers_of_every_size(name: str, nbytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = nbytes, 0o444, "bigdata", "bigdata"
    assert tar.build_header(name, nbytes) == member.tobuf(tarfile.PAX_FORMAT)


def test_padding() -> None:
    assert [tar.padding(nbytes) for nbytes in (0, 1, 511, 512, 513, 1 << 40)] == [0, 511, 1, 0, 511, 0]


# --- what is found ---

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


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_kind_of_member(format: int) -> None:
    archive = build_with_tarfile(ZOO, format)
    found = scan(archive)
    assert found == by_tarfile(io.BytesIO(archive))
    assert [name for name, _, _ in found] == [name for name, _ in ZOO if isinstance(name, str)]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize(
    "name", ["é" * 40, "é" * 400, "x" * 101, "x" * 5000, "a b\tc", "\udcff\udc80.json", "d/./x//y"]
)
def test_names(name: str, format: int) -> None:
    archive = build_with_tarfile([("a", b"1"), (name, b"22"), ("b", b"333")], format, encoding="utf-8")
    assert scan(archive) == by_tarfile(io.BytesIO(archive))
    assert [name for name, _, _ in scan(archive)] == ["a", name, "b"]


@pytest.mark.parametrize("mtime", [0, None, 1.5])
def test_stock_shards(mtime: float | None) -> None:
    file = io.BytesIO()  # without mtime=0, each member has a pax header of its time
    sink = wds.TarWriter(file, encoder=False, mtime=mtime)
    for i in range(100):
        sink.write({"__key__": f"{i:03d}", "json": bytes(7 * i), "txt": bytes(i)})
    sink.close()
    assert scan(file.getvalue()) == by_tarfile(io.BytesIO(file.getvalue()))
    assert len(scan(file.getvalue())) == 200


def test_names_that_webdataset_skips() -> None:
    names = [
        "__",
        "___",
        "__a__",
        "__a__/b.txt",
        "__a__.txt",
        "__a.txt",
        "_a__",
        "a/__b__",
        "__a/b__/c",
        "____",
        "__\n",
    ]
    archive = build_with_tarfile([(name, b"1") for name in names])
    stock = [member["fname"] for member in wds.tariterators.tar_file_iterator(io.BytesIO(archive))]
    assert [name for name, _, _ in scan(archive)] == stock
    assert "__a__.txt" in stock
    assert "__a__" not in stock


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_gnu_tar(tmp_path: Path, gnu_tar: str, format: str) -> None:
    folder = tmp_path / "in" / "x" / ("y" * (20 if format == "v7" else 90))
    folder.mkdir(parents=True)
    for i in range(20):
        (folder / f"{i:03d}.json").write_bytes(bytes(1000 * i))
    (folder / "link.json").symlink_to("000.json")
    (tmp_path / "in" / "x" / "a.json").write_bytes(b"{}")
    (tmp_path / "in" / "x" / "b.json").hardlink_to(tmp_path / "in" / "x" / "a.json")
    path = tmp_path / "x.tar"
    subprocess.run([gnu_tar, "-cf", path, f"--format={format}", "--sort=name", "-C", tmp_path / "in", "x"], check=True)
    found = scan_file(path)
    assert found == by_tarfile_in(path)
    assert len(found) == 21


@pytest.mark.parametrize("format", ["oldgnu", "gnu", "posix"])
def test_sizes_above_8_gib_by_gnu_tar(tmp_path: Path, gnu_tar: str, format: str) -> None:
    big, small, archive = tmp_path / "a.bin", tmp_path / "b.bin", tmp_path / "x.tar"
    big.touch()
    os.truncate(big, 9 * GIB)
    small.write_bytes(b"1")
    command = [gnu_tar, "-c", f"--format={format}", "-C", str(tmp_path), "a.bin", "b.bin"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        head = process.stdout.read(1 << 14)
        process.kill()
    # The header as GNU tar writes it; the 9 GiB behind it stay a hole.
    begin = 512 if head[156:157] == b"0" else 3 * 512
    tail = tar.build_header("b.bin", 1) + b"1" + bytes(511) + tar.END_OF_ARCHIVE
    with archive.open("wb") as file:
        file.write(head[:begin])
        file.seek(begin + 9 * GIB)
        file.write(tail)
    assert scan_file(archive) == [("a.bin", begin, 9 * GIB), ("b.bin", begin + 9 * GIB + 512, 1)]
    assert scan_file(archive) == by_tarfile_in(archive)


def test_our_own_sizes_above_8_gib(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        for name, nbytes in [("a.bin", 8 * GIB - 1), ("b.bin", 8 * GIB), ("c.bin", 12 * GIB + 5), ("d.bin", 3)]:
            file.write(tar.build_header(name, nbytes))
            file.seek(nbytes + tar.padding(nbytes), os.SEEK_CUR)
        file.write(tar.END_OF_ARCHIVE)
    assert scan_file(path) == by_tarfile_in(path)
    assert [nbytes for _, _, nbytes in scan_file(path)] == [8 * GIB - 1, 8 * GIB, 12 * GIB + 5, 3]


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
    "bytes behind the name": raw_header(b"a\0bc".ljust(100, b"d"), b"0", b"1") + bytes(512),
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


@pytest.mark.parametrize("first", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_members(first: bytes) -> None:
    for archive in (first + LAST, LAST[:1024] + first + LAST):
        assert scan(archive) == by_tarfile(io.BytesIO(archive))


def test_end_of_archive() -> None:
    archive = build([("a", b"1"), ("b", b"2")])
    end = len(archive) - 1024
    for tail in (bytes(512), bytes(1024), bytes(10240), bytes(512) + b"garbage", bytes(1024) + archive):
        scanned = scanner(archive[:end] + tail)
        assert scanned.end == -1
        assert len(list(scanned)) == 2
        assert scanned.end == end
        assert len(list(scanned)) == 2
    empty = scanner(bytes(1024))
    assert (list(empty), empty.end) == ([], 0)


# --- windows ---


class Reads:
    """Counts what a scan reads."""

    def __init__(self, archive: bytes) -> None:
        self.archive = archive
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, begin: int, end: int) -> bytes:
        assert 0 <= begin < end <= len(self.archive)
        self.ranges.append((begin, end))
        return self.archive[begin:end]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def test_small_members_are_read_in_large_windows() -> None:
    archive = build([(f"{i:05d}.json", bytes(i % 3000)) for i in range(3000)])
    read = Reads(archive)
    assert len(list(tar.Scanner(read, len(archive)))) == 3000
    assert read.nbytes < 1.1 * len(archive)
    assert len(read.ranges) == pytest.approx(len(archive) / (1 << 18), rel=0.1)


def test_large_members_are_not_read() -> None:
    members = [(f"{i:03d}.{suffix}", bytes(n)) for i in range(50) for suffix, n in (("pyd", 600), ("bin", 450_000))]
    archive = build(members)
    read = Reads(archive)
    assert len(list(tar.Scanner(read, len(archive)))) == 100
    assert len(read.ranges) <= 52
    assert read.nbytes < (1 << 18) + 51 * (1 << 13)


def test_peek() -> None:
    archive = build([(f"{i:03d}", os.urandom(50 + 999 * (i % 5) + 90_000 * (i % 3))) for i in range(60)])
    read = Reads(archive)
    scanned = tar.Scanner(read, len(archive))
    for _, begin, nbytes in scanned:
        before = len(read.ranges)
        assert scanned.peek(begin, begin + 40) == archive[begin : begin + 40]
        assert len(read.ranges) <= before + 1
        assert scanned.peek(begin, begin + nbytes) == archive[begin : begin + nbytes]
        assert scanned.peek(max(begin - 600, 0), begin) == archive[max(begin - 600, 0) : begin]


def test_peek_costs_no_read_in_the_window() -> None:
    archive = build([(f"{i:03d}", bytes(100)) for i in range(200)])
    read = Reads(archive)
    scanned = tar.Scanner(read, len(archive))
    assert all(scanned.peek(begin, begin + nbytes) == bytes(100) for _, begin, nbytes in scanned)
    assert len(read.ranges) == 1


# --- refusals ---

GOOD = raw_header(b"a", b"0", b"1") + bytes(512)
SPARSE = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
HUGE = raw_header(b"pax", b"x", b"%o" % (1 << 21)) + bytes(1 << 21)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "byte 0: the file is empty, expected a tar"),
    "gzip": (gzip.compress(GOOD + LAST), "byte 0: gzip: compressed tars have no index; read them as streams"),
    "bzip2": (bz2.compress(os.urandom(2000)), "byte 0: bzip2: compressed tars"),
    "xz": (lzma.compress(os.urandom(2000)), "byte 0: xz: compressed tars"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), "byte 0: zstd: compressed tars"),
    "text": (b"hello" * 200, r"byte 0: bad checksum: the bytes add up to \d+, the header has b'\w+'"),
    "checksum": (GOOD + GOOD[:3] + b"x" + GOOD[4:] + LAST, "byte 1024: bad checksum: the bytes add up to 005325, the"),
    "checksum is no number": (GOOD + GOOD[:148] + b"\xfe2345678" + GOOD[156:] + LAST, "byte 1024: bad checksum"),
    "short": (b"abc", "byte 0: truncated: the file ends at 3, without an end-of-archive block"),
    "ends behind a member": (GOOD * 3, "byte 3072: truncated: the file ends at 3072, without an end-of-archive block"),
    "ends in padding": (GOOD * 3 + GOOD[:700], "byte 4096: truncated: the file ends at 3772"),
    "ends in a header": (GOOD * 3 + GOOD[:100], "byte 3072: truncated: the file ends at 3172"),
    "ends in zeros": (GOOD * 3 + bytes(511), "byte 3072: truncated: the file ends at 3583"),
    "ends in content": (
        GOOD + raw_header(b"b", b"0", b"1750") + bytes(999),
        "byte 1024: truncated, or a wrong size: b'b' has 1000 bytes from 1536 on, the file 2535",
    ),
    "negative size": (
        raw_header(b"a", b"0", b"-7") + LAST,
        "byte 0: the size is b'-7.*', expected octal digits or base 256",
    ),
    "negative size, known owner": (
        GOOD + raw_header(b"a", b"0", b"-00000000001") + LAST,
        "byte 1024: the size is b'-00",
    ),
    "negative base 256": (
        raw_header(b"a", b"0", b"\xff" * 11 + b"\xfe") + LAST,
        "byte 0: the size is b'.*, not negative",
    ),
    "size is no number": (
        raw_header(b"a", b"0", b"12x4") + LAST,
        "byte 0: the size is b'12x4.*', expected octal",
    ),
    "size of 2^88": (raw_header(b"a", b"0", b"\x80" + b"\xff" * 11) + LAST, f"byte 0: .* b'a' has {2**88 - 1} bytes"),
    "sparse": (raw_header(b"a", b"S", b"0") + LAST, "byte 0: b'a' is a GNU sparse member, expected one without holes"),
    "sparse, pax": (GOOD + pax(SPARSE) + GOOD + LAST, "byte 1536: a GNU sparse member, expected one without holes"),
    "sparse, global": (pax(SPARSE, kind=b"g") + GOOD + LAST, "byte 512: a GNU sparse member"),
    "large records": (HUGE + LAST, "byte 0: an extended header of 2097152 bytes, expected at most 1048576"),
    "large name": (
        raw_header(b"name", b"L", b"%o" % (1 << 21)) + b"q" * (1 << 21) + GOOD + LAST,
        "byte 0: an extended header of 2097152 bytes, expected at most 1048576",
    ),
    "long name without end": (pax(b"qqq", kind=b"L") + GOOD + LAST, "byte 512: a long name of 3 bytes, expected a NUL"),
    "records end the archive": (
        GOOD + pax(record(b"a", b"b")) + bytes(1024),
        "byte 2048: the archive ends behind an ext",
    ),
    "records end the file": (GOOD + pax(record(b"a", b"b")), "byte 2048: truncated: the file ends at 2048, without an"),
    "global size": (
        pax(record(b"size", b"1"), kind=b"g") + GOOD + LAST,
        "byte 0: a global pax header has a size, for all",
    ),
    "pax size is negative": (pax(record(b"size", b"-1")) + GOOD + LAST, "byte 512: the pax record of a size is b'-1'"),
    "pax size is long": (pax(record(b"size", b"9" * 20)) + GOOD + LAST, "byte 512: the pax record of a size is b'9+'"),
    "pax size is empty": (pax(record(b"size", b"")) + GOOD + LAST, "byte 512: the pax record of a size is b''"),
    "pax size beyond": (pax(record(b"size", b"99999")) + GOOD + LAST, "byte 1024: truncated, .* b'a' has 99999 bytes"),
    "pax path is empty": (pax(record(b"path", b"/")) + GOOD + LAST, "byte 512: the pax record of a path is b'/'"),
    **{
        f"records {records!r}": (
            pax(records) + GOOD + LAST,
            f"byte 512: malformed pax record {re.escape(repr(records))}",
        )
        for records in (
            b"x",
            b"0 a=b\n",
            b"5 a=b\n",
            b"7 a=b\n",
            b"6 a-b\n",
            b"5 =b\n",
            b" 6 a=b",
            b"-6 a=b\n",
            b"99999999999999999999 a=b\n",
            b"9999999999999999999 a=b\n",
            b"6 a=b\0",
            b"3 \n",
        )
    },
    "second record": (pax(record(b"a", b"b"), b"9 a=b\n") + GOOD + LAST, "byte 518: malformed pax record b'9 a=b"),
}


@pytest.mark.parametrize(("archive", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(archive: bytes, message: str) -> None:
    with pytest.raises(tc.FormatError, match=f"^{message}"):
        scan(archive)


@pytest.mark.parametrize("options", [["--format=gnu"], ["--format=posix"], ["--format=posix", "--sparse-version=0.1"]])
def test_sparse_files_by_gnu_tar(tmp_path: Path, gnu_tar: str, options: list[str]) -> None:
    (tmp_path / "hole.bin").touch()
    os.truncate(tmp_path / "hole.bin", 1 << 22)
    path = tmp_path / "x.tar"
    subprocess.run([gnu_tar, "-cSf", path, *options, "-C", tmp_path, "hole.bin"], check=True)
    with pytest.raises(tc.FormatError, match=r"GNU sparse member, expected one without holes"):
        scan_file(path)


def test_a_file_that_shrinks() -> None:
    archive = build([("a", bytes(10))])
    with pytest.raises(tc.FormatError, match=r"^byte 0: truncated: expected 2048 bytes, got 1000"):
        list(tar.Scanner(lambda begin, end: archive[begin : min(end, 1000)], len(archive)))


# --- mutations ---

SOURCES = [
    build([(f"{i}.json", bytes([i]) * (70 * i)) for i in range(12)]),
    *[build_with_tarfile(ZOO[:10], format) for format in FORMATS.values()],
    *[first + LAST for first in UNUSUAL.values()],
]


def fix_checksums(archive: bytearray) -> None:
    """Make mutated headers pass the first guard."""
    for begin in range(0, len(archive) - 511, 512):
        header = archive[begin : begin + 512]
        if header[257:262] == b"ustar":
            header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 256)
            archive[begin : begin + 512] = header


def assert_right_or_refused(archive: bytes) -> None:
    found, refusal = [], ""
    try:
        found = scan(archive)
    except tc.FormatError as error:
        refusal = str(error)
    if refusal:
        assert re.match(r"byte \d+: ", refusal)
        return
    for _, begin, nbytes in found:
        assert 0 <= begin <= begin + nbytes <= len(archive)
    try:
        expected = by_tarfile(io.BytesIO(archive))
    except (tarfile.TarError, ValueError, OverflowError):
        return  # it parses owner, mode and time too
    assert found[: len(expected)] == [m for m in expected if not re.match(r"__[^/]*__($|/)|___?\Z", m[0])]


@settings(max_examples=500)
@given(st.integers(0, len(SOURCES) - 1), st.data(), st.booleans())
def test_any_bytes_may_change(source: int, data: st.DataObject, checksums: bool) -> None:
    archive = bytearray(SOURCES[source])
    blocks = st.integers(0, len(archive) // 512 - 1).map(lambda block: 512 * block)
    places = st.one_of(
        st.integers(0, 511), st.sampled_from([0, 99, 124, 135, 148, 156, 345, 510, 511]), st.integers(0, 40)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(blocks) + data.draw(places)
        replacement = data.draw(
            st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from([*b"0157SLKxgX \xff\x80"]))
        )
        replacement = bytes([replacement]) if isinstance(replacement, int) else replacement
        archive[at : at + len(replacement)] = replacement
    if checksums:
        fix_checksums(archive)
    if data.draw(st.booleans()):
        del archive[data.draw(st.integers(0, len(archive))) :]
    assert_right_or_refused(bytes(archive))


@given(st.lists(st.sampled_from([*UNUSUAL.values(), pax(SPARSE), bytes(512)]), max_size=6), st.binary(max_size=600))
def test_any_members_in_any_order(members: list[bytes], tail: bytes) -> None:
    assert_right_or_refused(b"".join(members) + tail)
    assert_right_or_refused(b"".join(members) + LAST)


@pytest.mark.parametrize(
    "content",
    [b"6 a=b\n" * 150_000, b"1" * 1_000_000, b"1 " * 500_000, b"=" * 1_000_000, b"1000000 " + b"a" * 999_992],
    ids=["records", "digits", "short", "no length", "no equals sign"],
)
def test_large_records_take_no_time(content: bytes) -> None:
    begin = time.perf_counter()
    assert_right_or_refused(pax(content) + LAST)
    assert time.perf_counter() - begin < 5
