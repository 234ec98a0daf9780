"""Tars with what no writer of caches puts there: links, odd names and sizes, bombs of pax records; in every reader."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import READERS, by_samples, by_stream
from tests.hostile.pickles import little_memory
from tests.shards.tars import build, build_with_tarfile, pax, raw_header, record

SKELETON, TENSORS = tc.encode_sample(torch.arange(5))
GOOD = build([("a.skel.pyd", SKELETON), ("a.safetensors", TENSORS)])[:-1024]
END = bytes(1024)
SIZE = b"%011o" % len(TENSORS)
CONTENT = TENSORS + bytes(-len(TENSORS) % 512)
SKEL = build([("a.skel.pyd", SKELETON)])[:-1024]


def tensors(size: bytes, *records: bytes, kind: bytes = b"0") -> bytes:
    """Return a shard whose tensors are in a member with this size field, after these pax records."""
    extended = pax(*records) if records else b""
    return SKEL + extended + raw_header(b"a.safetensors", kind, size) + CONTENT + END


REFUSED: dict[str, bytes] = {
    "negative size, base 256": tensors(b"\xff" * 11 + b"\xfe"),
    "size beyond the file": tensors(b"77777777777"),
    "GNU sparse": tensors(SIZE, kind=b"S"),
    "pax size of a million digits": tensors(SIZE, record(b"size", b"9" * 1_000_000)),
    # for webdataset's own pattern, half an hour
    "pax path of a megabyte": tensors(SIZE, record(b"path", b"a/" * 500_000)),
    "extended header of 2 GiB": SKEL + raw_header(b"pax", b"x", b"20000000000") + CONTENT + END,
    "global size": pax(record(b"size", b"1"), kind=b"g") + GOOD + END,
    "a path of a megabyte for all": pax(record(b"path", b"p" * 1_000_000), kind=b"g")
    + raw_header(b"b", b"0", b"0") * 20_000
    + END,
    "a key of 50,000 bytes": pax(record(b"path", b"k" * 50000 + b".txt")) + raw_header(b"b", b"0", b"0") + GOOD + END,
    "no end": GOOD,
    "the tensors are a link": tensors(SIZE, kind=b"2"),
    "the tensors are a hard link": SKEL + raw_header(b"a.safetensors", b"1", b"0") + END,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str, reader: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(REFUSED[what])
    peak = 10 * len(REFUSED[what]) + 80_000_000 * (reader == "stream") + 4_000_000
    with little_memory(peak), pytest.raises(tc.FormatError, match=r"x\.tar: "):
        READERS[reader](path)


def assert_right(path: Path) -> None:
    for found in (by_samples(path), [one["tensorcache"] for one in by_stream(path)]):
        assert [one.tolist() for one in found] == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("key", ["/etc/a", "../../a", "x/../a", "./a", "//a", "C:\\a", "a b", "a\nb", "é", "__a"])
def test_names_are_names_alone(tmp_path: Path, key: str) -> None:
    """Nothing is extracted: the key is what the tar has, but for a leading `./`, and no file but the shard is opened."""
    path = tmp_path / "x.tar"
    path.write_bytes(build_with_tarfile([(f"{key}.skel.pyd", SKELETON), (f"{key}.safetensors", TENSORS)]))
    assert_right(path)
    with tc.open(path) as cache:
        assert list(cache.keys()) == [key.removeprefix("./")]
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


def test_many_extended_headers(tmp_path: Path) -> None:
    """Each is read once, also if an index says that the member follows all of them."""
    bomb = pax(*[record(b"comment", b"c" * 90)] * 9_000)
    path = tmp_path / "x.tar"
    path.write_bytes(SKEL + bomb * 20 + raw_header(b"a.safetensors", b"0", SIZE) + CONTENT + END)
    started = time.process_time()
    assert_right(path)
    assert time.process_time() - started < 20
