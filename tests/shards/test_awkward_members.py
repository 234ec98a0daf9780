"""Foreign members of any name and type beside samples: no name decides what becomes of the samples."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.same import assert_same
from tests.shards.damage import sample
from tests.shards.tars import BLOCK, build, build_with_tarfile, pax, raw_header, record, special

NAMES = ["compressed.bin", "truncated.txt", "pax record", "byte 7: a long name.x"]


def sparse(name: bytes) -> bytes:
    """Return a GNU sparse member whose content is the header of a sample's member."""
    header = raw_header(name, b"S", b"%011o" % (2 * BLOCK))
    return header + raw_header(b"777.json", b"0", b"1") + b"1".ljust(BLOCK, b"\0")


def pax_sparse(name: bytes) -> bytes:
    """Return a sparse member as pax has it, its name once more before the records."""
    records = record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0"), record(b"GNU.sparse.name", name)
    content = raw_header(b"777.json", b"0", b"1") + b"1".ljust(BLOCK, b"\0")
    return pax(*records) + raw_header(name, b"0", b"%011o" % len(content)) + content


def damaged(name: bytes) -> bytes:
    """Return a member with a header that lost a bit."""
    header = bytearray(raw_header(name, b"0", b"00000000003"))
    header[110] ^= 1
    return bytes(header) + b"123".ljust(BLOCK, b"\0")


FOREIGN: dict[str, Any] = {
    "sparse": sparse,
    "sparse, pax": pax_sparse,
    "sparse, two extended headers": lambda name: (
        pax(record(b"GNU.sparse.size", b"9"), record(b"comment", name))
        + pax(name + b"\0", kind=b"L")
        + raw_header(name, b"0", b"0")
    ),
    "damaged": damaged,
    "a bad size": lambda name: raw_header(name, b"0", b"12x4"),
    "a link": lambda name: raw_header(name, b"2", b"0"),
    "a bad pax record": lambda name: pax(name) + raw_header(name, b"0", b"0"),
    "a long name without end": lambda name: pax(name, kind=b"L") + raw_header(name, b"0", b"0"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("at", [0, 3])
def test_no_sample_is_lost(tmp_path: Path, kind: str, name: str, at: int) -> None:
    """Also not in the middle of a sample."""
    halves = [
        build([(f"{i:03d}.{suffix}", half)])[:-1024]
        for i in range(4)
        for suffix, half in zip(("skel.pyd", "safetensors"), tc.encode_sample(sample(i)), strict=True)
    ]
    path = tmp_path / "x.tar"
    path.write_bytes(b"".join([*halves[:at], FOREIGN[kind](name.encode()), *halves[at:]]) + bytes(1024))
    report = tc.verify(path, num_threads=1)
    assert (report.num_samples, report.num_damaged, report.num_lost) in {(4, 0, 0), (5, 0, 0)}, report
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out" / "x.tar") as cache:
        assert list(cache.keys()) == [f"{i:03d}" for i in range(4)]
        for i in range(4):
            assert_same(tc.realize(cache[i]), sample(i))
    assert "777.json" not in tarfile.open(tmp_path / "out" / "x.tar").getnames()


@pytest.mark.parametrize("damage", ["flip", "zeros", "noise"])
def test_an_extended_header_of_times_alone(tmp_path: Path, damage: str) -> None:
    """webdataset's writers put one before each member: a member that has lost it is whole."""
    parts: list[Any] = []
    for i in range(4):
        for suffix, half in zip(("skel.pyd", "safetensors"), tc.encode_sample(sample(i)), strict=True):
            parts.append((special(f"{i:03d}.{suffix}", tarfile.REGTYPE, mtime=12.5)[0], half))
    whole = build_with_tarfile(parts, tarfile.PAX_FORMAT)
    for number, begin in enumerate(at for at in range(0, len(whole), BLOCK) if whole[at + 156 : at + 157] == b"x"):
        content = bytearray(whole)
        if damage == "flip":
            content[begin + 100] ^= 1
        else:
            content[begin : begin + BLOCK] = bytes(BLOCK) if damage == "zeros" else bytes(range(256)) * 2
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        tc.repair(path, tmp_path / f"out{number}")
        with tc.open(tmp_path / f"out{number}" / path.name) as cache:
            assert [tc.realize(value)["prompt"] for value in cache] == [f"photo {i}" for i in range(4)]
    assert number == 7
