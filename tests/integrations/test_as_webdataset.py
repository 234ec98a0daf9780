"""For any tar by `tarfile` or GNU tar, our stage yields the same samples as webdataset's own stage."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

import wds_tensorcache as tc

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
TYPES = [
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.CONTTYPE,
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
    b"A",
    b"D",
    b"V",
]


def samples(stage: Any, content: bytes, **options: Any) -> Any:
    """Return the samples as lists of items, and "error" at an error."""
    found: list[Any] = []
    try:
        for sample in stage(**options)([{"url": "x.tar", "stream": io.BytesIO(content)}]):
            found.append(list(sample.items()))
    except ValueError:
        found.append("error")
    return found


def stock(**options: Any) -> Any:
    """Return webdataset's own stage without the part that opens shards."""

    def stage(shards: Any) -> Any:
        handler = {key: value for key, value in options.items() if key == "handler"}
        return group_by_keys(tar_file_expander(shards, **options), **handler)

    return stage


def assert_as_webdataset(content: bytes) -> list[Any]:
    ours = samples(tc.tarfile_to_samples, content)
    assert ours == samples(stock, content)
    kept = samples(tc.tarfile_to_samples, content, handler=wds.ignore_and_continue)
    assert kept == samples(stock, content, handler=wds.ignore_and_continue)
    return ours


def tar_of(members: list[tuple[str, bytes, bytes]], kind: int, **options: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, **options) as tar:
        for name, type_, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = type_, len(content)
            info.linkname = "0.txt" if type_ in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


part = st.sampled_from(["0", "1", "a", "__x__", "__", "___", "__bad__", "é", "\udcff", " ", "\n", "#", "x" * 60, "-"])
suffix = st.sampled_from(
    ["txt", "TXT", "Json", "json.gz", "", "__bad__", "__BAD__", "a.b", "__key__", "x y", "é", "\n"]
)
names = st.builds(
    lambda folders, base, suffixes: "/".join([*folders, ".".join([base, *suffixes])]),
    st.lists(part, max_size=3),
    part | st.just(""),
    st.lists(suffix, max_size=2),
)
members = st.lists(st.tuples(names, st.sampled_from([tarfile.REGTYPE] * 6 + TYPES), st.binary(max_size=9)), max_size=9)


@given(members, st.sampled_from(sorted(FORMATS)))
def test_any_members(members: list[tuple[str, bytes, bytes]], kind: str) -> None:
    empty = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
    # a V7 file whose name ends in a slash is read as a folder; see test_content_of_folders
    whole = [(n, t, b"" if t in empty or (t == tarfile.AREGTYPE and n.endswith("/")) else raw) for n, t, raw in members]
    assert_as_webdataset(tar_of(whole, FORMATS[kind]))


@pytest.mark.parametrize("kind", [tarfile.AREGTYPE, tarfile.DIRTYPE])
def test_content_of_folders(kind: bytes) -> None:
    """Read it as headers, like `tarfile`. If it is not a header, webdataset drops the rest of the shard silently."""

    def tar(content: bytes) -> bytes:
        members = [("a.txt", tarfile.REGTYPE, b"1"), ("d/", kind, content), ("b.txt", tarfile.REGTYPE, b"2")]
        return tar_of(members, tarfile.GNU_FORMAT)

    inner = tar_of([("z.txt", tarfile.REGTYPE, b"1")], tarfile.GNU_FORMAT)
    assert [dict(sample)["__key__"] for sample in assert_as_webdataset(tar(inner[:1024]))] == ["a", "z", "b"]
    with pytest.warns(UserWarning, match="after the end of the archive"):
        assert [dict(sample)["__key__"] for sample in assert_as_webdataset(tar(bytes(512)))] == ["a"]
    for content in (b"123", b"x" * 600):
        assert samples(tc.tarfile_to_samples, tar(content)) == ["error"]
        with pytest.raises(tc.TarFormatError, match=r"x\.tar: byte 1536: bad checksum"):
            list(tc.tarfile_to_samples()([{"url": "x.tar", "stream": io.BytesIO(tar(content))}]))


def test_bad_samples_are_left_out() -> None:
    def tar(*names: str) -> bytes:
        return tar_of([(name, tarfile.REGTYPE, b"" if "0" in name else b"1") for name in names], tarfile.PAX_FORMAT)

    for order in (["b.txt", "b.__bad__"], ["b.__bad__", "b.txt"], ["b.__BAD__"]):
        found = assert_as_webdataset(tar("a.txt", *order, "c.txt"))
        assert [sample[0] for sample in found] == [("__key__", "a"), ("__key__", "c")]
        assert len(assert_as_webdataset(tar(*order))) == 0
    assert len(assert_as_webdataset(tar("a.txt", "0.__bad__", "0.txt"))) == 2  # empty: not true


# --- sparse members ---


def old_sparse(name: str, parts: list[tuple[int, bytes]], size: int) -> bytes:
    stored = b"".join(content for _, content in parts)
    info = tarfile.TarInfo(name)
    info.size = len(stored)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    structs = [b"%011o\0%011o\0" % (begin, len(content)) for begin, content in parts]
    header[386:482] = b"".join(structs[:4]).ljust(96, b"\0")
    rest, blocks = structs[4:], b""
    header[482] = bool(rest)
    header[483:495] = b"%011o\0" % size
    while rest:
        blocks += b"".join(rest[:21]).ljust(504, b"\0") + bytes([len(rest) > 21]) + bytes(7)
        rest = rest[21:]
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    return bytes(header) + blocks + stored + bytes(-len(stored) % 512)


def pax_sparse(name: str, parts: list[tuple[int, bytes]], size: int, version: str) -> bytes:
    stored = b"".join(content for _, content in parts)
    numbers = [number for begin, content in parts for number in (begin, len(content))]
    records = [("GNU.sparse.name", name)]
    if version == "0.0":
        records += [("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(parts)))]
        for begin, content in parts:
            records += [("GNU.sparse.offset", str(begin)), ("GNU.sparse.numbytes", str(len(content)))]
    elif version == "0.1":
        records += [("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(parts)))]
        records += [("GNU.sparse.map", ",".join(map(str, numbers)))]
    else:
        records += [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", str(size))]
        text = "".join(f"{number}\n" for number in [len(parts), *numbers]).encode()
        stored = text + bytes(-len(text) % 512) + stored
    text = b""
    for key, value in records:
        record = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        length = len(record) + 1
        while len(str(length)) + len(record) != length:
            length += 1
        text += str(length).encode() + record
    extended = tarfile.TarInfo("PaxHeader")
    extended.type, extended.size = tarfile.XHDTYPE, len(text)
    info = tarfile.TarInfo("GNUSparseFile.0/x.txt")
    info.size = len(stored)
    return (
        extended.tobuf(tarfile.USTAR_FORMAT)
        + text
        + bytes(-len(text) % 512)
        + info.tobuf(tarfile.USTAR_FORMAT)
        + stored
        + bytes(-len(stored) % 512)
    )


def sparse(version: str, name: str, parts: list[tuple[int, bytes]], size: int) -> bytes:
    return old_sparse(name, parts, size) if version == "old" else pax_sparse(name, parts, size, version)


def placed(gaps: list[tuple[int, bytes]], tail: int) -> tuple[list[tuple[int, bytes]], int]:
    parts, at = [], 0
    for gap, content in gaps:
        parts.append((at + gap, content))
        at += gap + len(content)
    return parts, at + tail


VERSIONS = ["old", "0.0", "0.1", "1.0"]


@given(
    st.sampled_from(VERSIONS),
    st.lists(st.tuples(st.integers(1, 2000), st.binary(min_size=1, max_size=700)), min_size=1, max_size=60),
    st.integers(0, 3000),
    st.sampled_from(["b.bin", "d/b.TXT", "__b__", "b", "b.__bad__", "a.txt"]),
)
def test_sparse_members(version: str, gaps: list[tuple[int, bytes]], tail: int, name: str) -> None:
    parts, size = placed(gaps, tail)
    before, after = (tar_of([(each, tarfile.REGTYPE, b"1")], tarfile.PAX_FORMAT) for each in ("a.txt", "c.txt"))
    content = before[:1024] + sparse(version, name, parts, size) + after
    found = assert_as_webdataset(content)
    expected = bytearray(size)
    for begin, piece in parts:
        expected[begin : begin + len(piece)] = piece
    if name == "b.bin":
        assert dict(found[1])["bin"] == bytes(expected)
    only = samples(tc.tarfile_to_samples, content, select_files=lambda each: each != name)  # skipped entirely
    assert [dict(sample)["__key__"] for sample in only] == (["c"] if name == "a.txt" else ["a", "c"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("parts", [[], [(0, b"abc")], [(0, b"abc"), (9, b"")], [(7, b"")]], ids=str)
def test_odd_maps(version: str, parts: list[tuple[int, bytes]]) -> None:
    assert_as_webdataset(sparse(version, "b.bin", parts, 9) + bytes(1024))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([(0, b"abc")], 2),
        ([(0, b"abc"), (1, b"x")], 9),
        ([(5, b"abc"), (0, b"x")], 9),
        ([], 1 << 40),
        ([(8, b"x")], 1 << 62),
    ],
    ids=str,
)
def test_maps_with_wrong_sizes(version: str, parts: list[tuple[int, bytes]], size: int) -> None:
    if version == "old" and size > 8**11:
        size = 8**11 - 1
    content = sparse(version, "b.bin", parts, size) + bytes(1024)
    with pytest.raises(tc.FormatError, match=r"x\.tar: byte \d+: (.* )?a GNU sparse member"):
        list(tc.tarfile_to_samples()([{"url": "x.tar", "stream": io.BytesIO(content)}]))


@given(st.sampled_from(VERSIONS), st.data())
def test_any_change_of_a_sparse_member(version: str, data: st.DataObject) -> None:
    raw = bytearray(
        sparse(version, "b.bin", [(i * 900 + 1, bytes([i]) * 300) for i in range(30)], 30_000) + bytes(1024)
    )
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 2047))] = data.draw(st.integers(0, 255))
    for begin in (0, 512, 1024):  # headers, with corrected checksums
        if begin == 0 or (version != "old" and begin == 1024):
            raw[begin + 148 : begin + 156] = b" " * 8
            raw[begin + 148 : begin + 155] = b"%06o\0" % sum(raw[begin : begin + 512])
    found = samples(tc.tarfile_to_samples, bytes(raw))
    assert all(sample == "error" or sum(len(value) for _, value in sample) < 1 << 27 for sample in found)


@pytest.mark.parametrize("options", [["gnu"], ["pax", "0.0"], ["pax", "0.1"], ["pax", "1.0"]], ids=str)
def test_gnu_tar(tmp_path: Path, gnu_tar: str, options: list[str]) -> None:
    for name, count in (("a.bin", 3), ("b.bin", 30), ("l" * 90 + "/" + "o" * 90 + ".bin", 5)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with open(tmp_path / name, "wb") as file:
            for i in range(count):
                file.seek(i * 70_000)
                file.write(struct.pack("<Q", i) * 600)
            file.truncate(count * 70_000 + 12_345)
    (tmp_path / "c.txt").write_text("text")
    names = sorted(os.path.relpath(path, tmp_path) for path in tmp_path.rglob("*.*"))
    version = [f"--sparse-version={options[1]}"] if len(options) > 1 else []
    command = [gnu_tar, "-c", "-S", f"--format={options[0]}", *version, "-f", "x.tar", *names]
    subprocess.run(command, cwd=tmp_path, check=True)
    content = (tmp_path / "x.tar").read_bytes()
    found = assert_as_webdataset(content)
    assert b"GNU.sparse" in content or content[156:157] == b"S"
    files = [(tmp_path / name).read_bytes() for name in names if name.endswith(".bin")]
    assert [sample["bin"] for sample in map(dict, found) if "bin" in sample] == files
