"""Foreign members of any name and type beside samples: no name decides what becomes of the samples."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.same import assert_same
from tests.shards.damage import sample
from tests.shards.tars import BLOCK, build, build_with_tarfile, halves, pax, raw_header, record, special

NAME = b"byte 7: truncated.x"
INNER = raw_header(b"777.json", b"0", b"1") + b"1".ljust(BLOCK, b"\0")
SPARSE = record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")
EMPTY = raw_header(NAME, b"0", b"0")


def damaged(header: bytes) -> bytes:
    """Return a header that lost a bit."""
    return header[:110] + bytes([header[110] ^ 1]) + header[111:]


FOREIGN: dict[str, bytes] = {
    # The content is the header of a sample's member.
    "sparse": raw_header(NAME, b"S", b"%011o" % len(INNER)) + INNER,
    "sparse, pax": pax(*SPARSE, record(b"GNU.sparse.name", NAME))
    + raw_header(NAME, b"0", b"%011o" % len(INNER))
    + INNER,
    "sparse, two extended headers": pax(*SPARSE) + pax(NAME + b"\0", kind=b"L") + EMPTY,
    "damaged": damaged(raw_header(NAME, b"0", b"00000000003")) + b"123".ljust(BLOCK, b"\0"),
    "a bad size": raw_header(NAME, b"0", b"12x4"),
    "a link": raw_header(NAME, b"2", b"0"),
    "a bad pax record": pax(NAME) + EMPTY,
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("at", [0, 3])
def test_no_sample_is_lost(tmp_path: Path, kind: str, at: int) -> None:
    """Also not in the middle of a sample."""
    whole = [build([half])[:-1024] for i in range(4) for half in halves(f"{i:03d}", sample(i))]
    path = tmp_path / "x.tar"
    path.write_bytes(b"".join([*whole[:at], FOREIGN[kind], *whole[at:]]) + bytes(1024))
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
    members = [half for i in range(4) for half in halves(f"{i:03d}", sample(i))]
    whole = build_with_tarfile([(special(name, tarfile.REGTYPE, mtime=12.5)[0], half) for name, half in members])
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
