"""Shards that are replaced or cut short while a process reads them: an error, never other bytes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.shards import shard as one_shard


@pytest.fixture
def no_files() -> Iterator[None]:
    yield
    one_shard._unpickled_files.clear()


@pytest.mark.usefixtures("no_files")
def test_a_shard_that_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def write(value: int) -> Any:
        with tc.ShardWriter("x.tar", overwrite=True) as sink:
            sink.write("a", torch.full((50_000,), value))
        return tc.open("x.tar", max_open_files=8)

    first = write(1)
    pickled = pickle.dumps(first[0])
    assert len(pickled) < 500
    monkeypatch.chdir("/")  # where they come from is known by its absolute path
    lazy = pickle.loads(pickled)
    assert int(lazy.load()[0]) == 1
    assert int(pickle.loads(pickle.dumps(lazy)).load(copy=False)[9]) == 1
    os.chdir(tmp_path)
    for value in (2, 3):
        again = write(value)
        new = pickle.loads(pickle.dumps(again[0]))
        assert int(new.load()[0]) == value
        with pytest.raises(tc.FormatError, match=r"x\.tar: the shard was changed since this lazy tensor was made"):
            lazy.load()
        assert int(new[7]) == value
        again.close()
        lazy = new
    assert int(first[0].load()[0]) == 1  # its file is open still
    first.close()


def test_a_shard_that_is_replaced_under_a_cache(tmp_path: Path) -> None:
    for name in "ab":
        with tc.ShardWriter(tmp_path / f"{name}.tar") as sink:
            sink.write(name, torch.tensor(1))
    cache = tc.open(tmp_path, max_open_files=1)
    lazy = cache[0]
    assert [int(sample) for sample in cache] == [1, 1]
    with tc.ShardWriter(tmp_path / "a.tar", overwrite=True) as sink:
        sink.write("a", torch.tensor(2))
    for use in (lambda: cache[0], lazy.load, lambda: cache.read_batch([1, 0])):
        with pytest.raises(tc.FormatError, match=r"a\.tar: the shard was changed since it was opened; open it"):
            use()
    assert int(cache[1]) == 1
    cache.close()


def test_a_shard_cut_short_under_a_cache(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        for i in range(2):
            sink.write(str(i), {"x": torch.full((10,), i), "large": torch.full((20_000,), i)})
    for io in ("pread", "auto"):
        cache = tc.open(tmp_path / "x.tar", io=io)
        assert int(cache[1]["x"][0]) == 1
        lazy = cache[0]["large"]
        shard = (tmp_path / "x.tar").read_bytes()
        os.truncate(tmp_path / "x.tar", 2000)
        for use in (lazy.load, lambda cache=cache: cache[1]["large"].load(), lambda cache=cache: cache.read_batch([1])):
            with pytest.raises(tc.FormatError, match=r"x\.tar: .*cut short"):
                use()
        cache.close()
        (tmp_path / "x.tar").write_bytes(shard)
