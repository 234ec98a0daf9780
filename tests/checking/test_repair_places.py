"""`repair` where it cannot write, and of shards that are missing."""

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
    assert tc.verify(tmp_path / "bytes").ok


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
