"""Shards have webdataset's own bytes, and any tar gives the members that `tarfile` finds in it, at their places."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.shards import tars
from tests.shards.tars import FORMATS, GIB, A, build_with_tarfile, by_tarfile, pax, raw_header, record, scan, special
from wds_tensorcache.shards.tar import build_tar_header


def test_shards_have_the_bytes_of_webdataset(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    keys = ["a", "000017", "folder/with-a/name_1", "k" * 88]
    with tc.ShardWriter(path, footer=False, manifest=False, dali_index=False) as writer:
        for number, key in enumerate(keys):
            writer.write(key, {"x": torch.zeros(number, 300)}, json={"i": number}, txt="t" * (511 + number), e=b"")
    file = io.BytesIO()
    with tarfile.open(path) as archive, wds.TarWriter(file, encoder=False, mtime=0) as sink:
        for member in archive:
            content = archive.extractfile(member)
            key, _, suffix = member.name.partition(".")
            assert content is not None
            sink.write({"__key__": key, suffix: content.read()})
    expected = file.getvalue().rstrip(b"\0")
    assert path.read_bytes().rstrip(b"\0") == expected
    assert path.stat().st_size == len(expected) + -len(expected) % 512 + 1024


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_kind_of_member(format: int) -> None:
    archive = build_with_tarfile(tars.ZOO, format)
    members = scan(archive)
    assert members == by_tarfile(io.BytesIO(archive))
    assert [name for name, _, _ in members] == [name for name, _ in tars.ZOO if isinstance(name, str)]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("name", ["é" * 40, "é" * 400, "x" * 101, "x" * 5000, "a b\tc", "\udcff\udc80", "d/./x//y"])
def test_names(name: str, format: int) -> None:
    members = [("a.x", b"1"), (f"{name}.json", b"22"), ("b.x", b"333")]
    archive = build_with_tarfile(members, format, encoding="utf-8")
    assert scan(archive) == by_tarfile(io.BytesIO(archive))
    assert [name for name, _, _ in scan(archive)] == [name for name, _ in members]


def test_names_that_webdataset_skips() -> None:
    names = ["__a__/b.txt", "__a__.txt", "__a.txt", "_a__.x", "a/__b__.x", "__a/b__/c.x", "____.x", "__x.__"]
    archive = build_with_tarfile([(name, b"1") for name in names])
    stock = [member["fname"] for member in wds.tariterators.tar_file_iterator(io.BytesIO(archive))]
    assert [name for name, _, _ in scan(archive)] == stock
    assert "__a__.txt" in stock
    assert "__a__/b.txt" not in stock


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
    with archive.open("wb") as file:
        file.write(head[:begin])
        file.seek(begin + 9 * GIB)
        file.write(raw_header(b"b.bin", b"0", b"1") + b"1" + bytes(511) + bytes(1024))
    assert tars.scan_file(archive) == [("a.bin", begin, 9 * GIB), ("b.bin", begin + 9 * GIB + 512, 1)]
    assert tars.scan_file(archive) == tars.by_tarfile_in(archive)


@pytest.mark.parametrize("kind", tars.UNUSUAL)
@pytest.mark.filterwarnings("ignore:.*links to other files are not followed")
def test_unusual_members(kind: str) -> None:
    first = tars.UNUSUAL[kind]
    for archive in (first + tars.LAST, raw_header(b"z.x", b"0", b"1") + bytes(512) + first + tars.LAST):
        assert scan(archive) == tars.of_samples(by_tarfile(io.BytesIO(archive)))


def test_global_names() -> None:
    archive = b"".join(pax(record(b"path", name), kind=b"g") + A for name in (b"p.x", b"q.x")) + bytes(1024)
    assert scan(archive) == by_tarfile(io.BytesIO(archive))
    assert [name for name, _, _ in scan(archive)] == ["p.x", "q.x"]


@pytest.mark.parametrize("nbytes", [0, 1, 8**11 - 1, 8**11, 10**10 - 1, 10**10, 123 * 1024 * GIB])
@pytest.mark.parametrize("name", ["a.b", "d/" + "x" * 92 + ".json"])
def test_headers_of_members_that_are_too_large_for_a_test(name: str, nbytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = nbytes, 0o444, "bigdata", "bigdata"
    assert build_tar_header(name, nbytes) == member.tobuf(tarfile.PAX_FORMAT)


# --- streams that begin at a member


def tar_of(kind: int, **options: Any) -> bytes:
    members: list[Any] = []
    for i in range(12):
        members.append((f"{'é' * (30 * (i % 3))}{'long/' * (20 * (i % 2))}{i}.txt", bytes([i]) * (700 * i)))
        members.append(special(f"other{i}", tarfile.SYMTYPE if i % 2 else tarfile.DIRTYPE, linkname="0.txt" * (i % 2)))
    return build_with_tarfile(members, kind, **options)


def keys_and_texts(samples: object) -> list[tuple[str, bytes]]:
    return [(sample["__key__"], sample["txt"]) for sample in samples]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_every_start(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(kind, pax_headers={"comment": "of all members"}))
    whole = keys_and_texts(tc.ResumablePipeline([path]))
    assert len(whole) == 12
    for at in range(12):
        first, second = tc.ResumablePipeline([path]), tc.ResumablePipeline([path])
        samples = iter(first)
        assert keys_and_texts(next(samples) for _ in range(at)) == whole[:at]
        second.load_state_dict(first.state_dict())
        assert keys_and_texts(second) == whole[at:]
