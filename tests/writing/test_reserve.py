"""Samples whose bytes another process writes: the same shards, finished by a thread, in order and without gaps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.kills import COUNT, compare, sample
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard
from wds_tensorcache.writing.writer import ShardWriter

Reserved = tuple[UnfinishedShard, int, list[Any], int]


def reserve(writer: ShardWriter, key: str, value: Any, **members: Any) -> Reserved:
    packed = writer._pack(key, value, **members)
    shard, offset = writer._reserve(packed)
    return shard, offset, packed.parts, packed.nbytes


def write(writer: ShardWriter, reserved: Reserved) -> None:
    """Write reserved bytes, as another process does."""
    shard, offset, parts, nbytes = reserved
    file = os.open(shard.temporary, os.O_WRONLY)
    assert os.pwrite(file, b"".join(parts), offset) == nbytes
    os.close(file)
    writer._acknowledge(shard, nbytes)


@pytest.mark.parametrize("num_late", [0, 1, 7, COUNT])
def test_the_same_shards(tmp_path: Path, num_late: int) -> None:
    """In any order of the writes, and between samples that the writer writes itself."""
    with tc.ShardWriter(tmp_path / "expected" / "%03d.tar", max_samples=5) as writer:
        for i in range(COUNT):
            writer.write(f"{i:03d}", sample(i), txt=f"{i}")
    with tc.ShardWriter(tmp_path / "found" / "%03d.tar", max_samples=5) as writer:
        assert writer._can_reserve
        late: list[Reserved] = []
        for i in range(COUNT):
            if i % 4 == 3:
                writer.write(f"{i:03d}", sample(i), txt=f"{i}")
                continue
            late.append(reserve(writer, f"{i:03d}", sample(i), txt=f"{i}"))
            if len(late) > num_late:
                write(writer, late.pop())
        for each in late:
            write(writer, each)
    compare(tmp_path / "found", tmp_path / "expected")
    assert writer.num_finished == COUNT


def test_a_shard_that_cannot_be_finished(tmp_path: Path) -> None:
    """Later shards do not appear, and nothing temporary stays."""

    def work() -> None:
        with tc.ShardWriter(tmp_path, max_samples=2) as writer:
            for i in range(9):
                write(writer, reserve(writer, f"{i}", sample(i)))
                if i == 2:
                    (tmp_path / "000001.tar").mkdir()  # another program makes it meanwhile

    with pytest.raises(FileExistsError, match=r"000001\.tar"):
        work()
    assert sorted(os.listdir(tmp_path)) == ["000000.idx", "000000.tar", "000001.tar", "manifest.json"]


def test_bytes_that_never_came(tmp_path: Path) -> None:
    def work(max_samples: int) -> None:
        with tc.ShardWriter(tmp_path, max_samples=max_samples) as writer:
            reserve(writer, "a", sample(1))
            write(writer, reserve(writer, "b", sample(2)))

    for max_samples in (1, 4):
        with pytest.raises(ValueError, match="awaited"):
            work(max_samples)
        assert not os.listdir(tmp_path)


def test_an_error_of_the_other_process(tmp_path: Path) -> None:
    def work() -> None:
        with tc.ShardWriter(tmp_path) as writer:
            shard, *_ = reserve(writer, "a", sample(1))
            shard.fail(OSError(28, "No space left on device"))

    with pytest.raises(OSError, match="No space left") as caught:
        work()
    assert caught.value.errno == 28
    assert not os.listdir(tmp_path)


def test_a_key_that_is_there(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path) as writer:
        first = reserve(writer, "a", sample(1))
        with pytest.raises(tc.InvalidKeyError):
            reserve(writer, "a", sample(2))
        write(writer, first)
    with tc.open(tmp_path) as cache:
        assert list(cache.keys()) == ["a"]
