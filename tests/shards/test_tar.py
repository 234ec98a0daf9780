"""Headers are webdataset's own bytes; what the scanner finds is what `tarfile` finds, or an error with its offset."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from tests.shards.tars import (
    FORMATS,
    GIB,
    LAST,
    UNUSUAL,
    ZOO,
    build,
    build_with_tarfile,
    by_tarfile,
    by_tarfile_in,
    scan,
    scan_file,
    scanner,
)
from wds_tensorcache.shards.tar import headers as tar

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
    assert tar.build_tar_header(name, nbytes) == member.tobuf(tarfile.PAX_FORMAT)


def test_padding() -> None:
    assert [tar.padding(nbytes) for nbytes in (0, 1, 511, 512, 513, 1 << 40)] == [0, 511, 1, 0, 511, 0]


# --- what is found ---


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
    # The header as GNU tar writes it; the 9 GiB after it stay a hole.
    begin = 512 if head[156:157] == b"0" else 3 * 512
    tail = tar.build_tar_header("b.bin", 1) + b"1" + bytes(511) + tar.END_OF_ARCHIVE
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
            file.write(tar.build_tar_header(name, nbytes))
            file.seek(nbytes + tar.padding(nbytes), os.SEEK_CUR)
        file.write(tar.END_OF_ARCHIVE)
    assert scan_file(path) == by_tarfile_in(path)
    assert [nbytes for _, _, nbytes in scan_file(path)] == [8 * GIB - 1, 8 * GIB, 12 * GIB + 5, 3]


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
