"""Hostile shards that make a tool repeat its work. Only counters inside the package show that, in reasonable time."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, write
from tests.shards.tars import raw_header, record
from wds_tensorcache.shards.tar import BLOCK, names_of
from wds_tensorcache.storage.files import ShardFile


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

    assert [name for name, *_ in names_of(read, len(front) + BLOCK, len(content))] == [b"a.json"]
    assert max(reads) == BLOCK


def test_an_index_is_not_read_twice_for_each_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is damaged, the headers that an index lists are looked at a few times."""
    path = write(tmp_path, 100, dali_index=False, manifest=False)
    for name, (begin, _) in members(path).items():
        if name.endswith(("jpg", "json")):
            flip(path, begin - 300)
    count, read = 0, ShardFile.read

    def counted(self: ShardFile, begin: int, end: int) -> bytes:
        nonlocal count
        count += 1
        return read(self, begin, end)

    monkeypatch.setattr(ShardFile, "read", counted)
    assert tc.verify(path, num_threads=1).num_samples == 100
    assert count <= 10 * 400
