"""Attacks of hostile shards on the tools that check, repair and index shards."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, sample, write
from tests.shards.forged_index import put_footer, swap_keys
from tests.shards.tars import build, raw_header, record
from wds_tensorcache.checking.indexed_places import find_places
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.tar import BLOCK, names_of
from wds_tensorcache.storage.files import ShardFile


def test_an_index_that_swaps_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 4, dali_index=False, manifest=False)
    content = path.read_bytes()
    put_footer(path, swap_keys(scan_shard(lambda begin, end: content[begin:end], len(content))))
    places = members(path)
    for name in ("001.skel.pyd", "001.safetensors"):
        flip(path, places[name][0] - 300)
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert [(key, value["prompt"]) for key, value in zip(cache.keys(), cache, strict=True)] == [
            (key, f"photo {int(key)}") for key in ("000", "002", "003")
        ]


def test_zeros_in_place_of_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, 4, dali_index=False, manifest=False, footer=False)
    begin = members(path)["001.skel.pyd"][0] - BLOCK
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(BLOCK) + content[begin + BLOCK :])
    before = path.read_bytes()
    with pytest.raises(tc.FormatError, match=r"tc\.repair"):
        tc.write_index(path)
    assert path.read_bytes() == before


def test_a_foreign_member_called_like_an_error(tmp_path: Path) -> None:
    inner = build([("000.json", b"1"), ("900.json", b"2")])
    foreign = raw_header(b"compressed.bin", b"S", b"%011o" % len(inner)) + inner
    cache = [("000.skel.pyd", tc.encode_sample(sample(0))[0]), ("000.safetensors", tc.encode_sample(sample(0))[1])]
    (tmp_path / "x.tar").write_bytes(build([("a.json", b"1")])[:-1024] + foreign + build(cache))
    assert tc.verify(tmp_path / "x.tar").num_samples == 2
    tc.repair(tmp_path / "x.tar", tmp_path / "out")
    assert list(members(tmp_path / "out" / "x.tar")) == ["a.json", "000.skel.pyd", "000.safetensors"]


@pytest.mark.parametrize("blocks", range(2, 10))
def test_extended_headers_that_are_read_for_each_member(blocks: int) -> None:
    """Some blocks before a member is a header, too, of records that are a megabyte long."""
    size = (1 << 20) - BLOCK
    large = raw_header(b"pax", b"x", b"%011o" % size)
    front = large + bytes((blocks - 2) * BLOCK)
    content = front + raw_header(b"a.json", b"0", b"0") + record(b"comment", b"x" * 2000) + bytes(1 << 20)
    reads: list[int] = []

    def read(begin: int, end: int) -> bytes:
        reads.append(end - begin)
        return content[begin:end]

    assert list(names_of(read, len(front) + BLOCK, len(content))) == [b"a.json"]
    assert max(reads) == BLOCK


def test_an_index_is_not_read_twice_for_each_break(tmp_path: Path) -> None:
    """Whatever is damaged, headers are looked at once, and the memory is that of the index."""
    path = write(tmp_path, 200, dali_index=False, manifest=False)
    places = find_places(ShardFile(str(path)))
    assert places is not None
    count = 0
    read = places._read

    def counted(begin: int, end: int) -> bytes:
        nonlocal count
        count += 1
        return read(begin, end)

    places._read = counted
    tracemalloc.start()
    for offset in range(0, path.stat().st_size, BLOCK):
        places.after(offset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count <= 800 + 1
    assert peak < 200_000
