"""Writers that resume after killed writers: no finished shard is lost, and the bytes are those of an uninterrupted run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.kills import COUNT, check, compare, sample, write_until_killed


def write(folder: Path, count: int = COUNT, **options: Any) -> list[str]:
    """Write all samples, and return the keys that were not there."""
    new, error = [], options.pop("error", None)
    with tc.ShardWriter(folder / "%03d.tar", max_samples=5, fsync=False, **options) as sink:
        for i in range(count):
            if f"{i:03d}" not in sink:
                new.append(f"{i:03d}")
            sink.write(f"{i:03d}", sample(i), json={"i": i})
        if error is not None:
            raise error
    return new


class Killed(Exception):
    pass


@pytest.mark.parametrize("options", [{}, {"footer": False}, {"dali_index": False}, {"manifest": False}], ids=str)
@pytest.mark.parametrize("at", [0, 1, 5, 12, COUNT])
def test_broken_by_an_exception(tmp_path: Path, at: int, options: dict[str, Any]) -> None:
    write(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        write(tmp_path / "x", at, error=Killed, **options)
    finished = max(0, at - 1) // 5 * 5
    assert write(tmp_path / "x", resume=True, **options) == [f"{i:03d}" for i in range(finished, COUNT)]
    compare(tmp_path / "x", tmp_path / "whole")
    assert write(tmp_path / "x", resume=True, **options) == []
    compare(tmp_path / "x", tmp_path / "whole")


@pytest.mark.parametrize("lost", ["001.idx", "manifest.json", "000.idx manifest.json"])
def test_what_is_written_behind_a_shard(tmp_path: Path, lost: str) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "x")
    for name in lost.split():
        (tmp_path / "x" / name).unlink()
    assert write(tmp_path / "x", resume=True) == []
    compare(tmp_path / "x", tmp_path / "whole")


# a writer that was killed after it had named a shard has not listed it
@pytest.mark.filterwarnings("ignore:.*manifest.json does not list 1 of the shards:UserWarning")
@pytest.mark.long
def test_killed_at_random(tmp_path: Path) -> None:
    """Real processes, really killed; `python -m tests.kills 1000` does it as often as one likes."""
    write_until_killed(tmp_path, 50, seed=0)


def test_temporary_files(tmp_path: Path) -> None:
    strays = [".000.tar.123.tmp", ".007.tar.99999.tmp", ".000.idx.0a1b2c3d.tmp"]
    others = [".000-b.tar.1.tmp", ".000.tar.tmp", ".x.tar.1.tmp", "000.tar.1.tmp", ".000-b.idx.0a1b2c3d.tmp"]
    for name in [*strays, *others]:
        (tmp_path / name).write_bytes(b"half")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        for name in strays:
            (tmp_path / name).write_bytes(b"half")
        write(tmp_path, count=3, **options)  # what killed writers of this pattern left goes at every start
        assert sorted(os.listdir(tmp_path)) == sorted(["000.idx", "000.tar", "manifest.json", *others])
        check(tmp_path)


def test_one_shard(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar", fsync=False) as sink:
        sink.write("a", {"x": 1})
    with tc.ShardWriter(tmp_path / "x.tar", fsync=False, resume=True) as sink:
        assert "a" in sink
        sink.write("a", {"x": 1})
        with pytest.raises(FileExistsError, match=r"x\.tar is finished; for more shards, use a pattern with a number"):
            sink.write("b", {"x": 1})
    assert list(tc.open(tmp_path).keys()) == ["a"]


def test_more_samples_than_before(tmp_path: Path) -> None:
    write(tmp_path, count=7)
    assert write(tmp_path, count=9, resume=True) == ["007", "008"]
    shards = json.loads((tmp_path / "manifest.json").read_text())["shardlist"]
    assert [(shard["url"], shard["nsamples"]) for shard in shards] == [("000.tar", 5), ("001.tar", 2), ("002.tar", 2)]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass only one of them"):
        tc.ShardWriter(tmp_path / "%d.tar", overwrite=True, resume=True)
    write(tmp_path)
    os.truncate(tmp_path / "001.tar", 4000)
    with pytest.raises(tc.FormatError, match=r"001\.tar"):
        tc.ShardWriter(tmp_path / "%03d.tar", resume=True)
