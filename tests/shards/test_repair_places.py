"""`repair` where it cannot write, of shards that are not there, and of those that nobody sees yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import write


def test_where_it_cannot_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", 2)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here", tmp_path / "here"):
        with pytest.raises(FileExistsError, match="is the current folder"):
            tc.repair(path, out)
    with pytest.raises(ValueError, match="out=''"):
        tc.repair(path, "")
    tc.repair(path, os.fsencode(tmp_path / "bytes"))
    assert tc.verify(tmp_path / "bytes")


def test_a_rebuild_that_was_broken_off(tmp_path: Path) -> None:
    """What readers do not see is nothing wrong, and not taken along."""

    def fn(items: list[int]) -> list[int]:
        if fails and 7 in items:
            raise ZeroDivisionError
        return [{"x": item + fails} for item in items]

    fails = 0
    options = {"fingerprint": {}, "max_samples": 2, "batch_size": 2}
    tc.build(range(9), fn, tmp_path / "a", digest=str, **options).close()
    fails = 1
    with pytest.raises(ZeroDivisionError):
        tc.build(range(9), fn, tmp_path / "a", digest=lambda item: f"{item}+1", **options)
    assert len(list((tmp_path / "a").glob("*.tar"))) > 5
    assert tc.verify(tmp_path / "a")
    assert tc.repair(tmp_path / "a", tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert [cache[f"{i:09d}"]["x"] for i in range(9)] == list(range(9))
        assert len(cache) == 9


def test_shards_that_are_not_there_are_lost_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 6, per_shard=2)
    path.unlink()
    for source in (tmp_path / "a", tmp_path / "a" / "manifest.json"):
        with pytest.raises(tc.FormatError, match="drop=False"):
            tc.repair(source, tmp_path / "out", drop=False)
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(tc.FormatError, match="drop=False"):
        tc.repair(tmp_path / "a", tmp_path / "out", drop=False)
    assert not (tmp_path / "out").exists()
    assert tc.repair(tmp_path / "a", tmp_path / "out").num_lost == 2
    assert len(tc.open(tmp_path / "out")) == 4
