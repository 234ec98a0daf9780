"""Repairs that are killed: `out` is not there, or complete, and the next call does it all."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.kills import compare, is_killed, stop_at
from tests.shards.damage import flip, members, write


def damaged(folder: Path) -> Path:
    path = write(folder, 12, per_shard=4)
    flip(path, members(path)["002.skel.pyd"][1] - 1)
    return folder


@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_at_every_step(tmp_path: Path, is_there: bool) -> None:
    source, whole, out = damaged(tmp_path / "a"), tmp_path / "whole", tmp_path / "b" / "out"
    tc.repair(source, whole)
    (tmp_path / "b").mkdir()
    if is_there:
        out.mkdir()

    def repair() -> None:
        stop_at(step, ("mkdir", "writev", "fsync", "replace", "rename"))
        tc.repair(source, out, num_threads=1)

    step = 0
    while is_killed(repair):
        if out.exists() and os.listdir(out):
            compare(out, whole)
            break  # renamed, but not on disk yet
        assert out.exists() == is_there
        strays = [name for name in os.listdir(tmp_path / "b") if name != "out"]
        assert len(strays) == (step > 1)  # after both calls of `mkdir`; the folder of the killed call before is gone
        step += 1
    assert step >= 20
    if not os.path.exists(out / "manifest.json"):
        tc.repair(source, out)
    compare(out, whole)
    with pytest.raises(FileExistsError, match="is not empty"):
        tc.repair(source, out)
    assert os.listdir(tmp_path / "b") == ["out"]


def test_a_folder_that_appears_during_the_call(tmp_path: Path) -> None:
    source, out = damaged(tmp_path / "a"), tmp_path / "out"

    def write_file(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "file").write_bytes(b"theirs")

    with pytest.raises(OSError, match="not an empty folder"):
        tc.repair(source, out, progress=write_file)
    assert sorted(os.listdir(tmp_path)) == ["a", "out"]
    assert os.listdir(out) == ["file"]


def test_strays(tmp_path: Path) -> None:
    source, out = damaged(tmp_path / "a"), tmp_path / "x.y"
    strays = [".x.y.0123abcd.tmp", ".x.y.99999999.tmp"]
    others = [".x.y.tmp", ".x.y.0123abcd.tmp2", ".xzy.0123abcd.tmp", ".y.0123abcd.tmp", "x.y.0123abcd.tmp"]
    for name in [*strays, *others]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "000000.tar").touch()
    others += [".x.y.bbbbbbbb.tmp", ".x.y.cccccccc.tmp"]
    os.mkfifo(tmp_path / others[-2])
    (tmp_path / others[-1]).symlink_to(tmp_path / others[0])
    held = os.open(tmp_path / strays[0], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as a living repair does
    tc.repair(source, out)
    os.close(held)
    assert sorted(os.listdir(tmp_path)) == sorted(["a", "x.y", strays[0], *others])


def test_links(tmp_path: Path) -> None:
    source = damaged(tmp_path / "a")
    (tmp_path / "there" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    tc.repair(source, tmp_path / "link")
    assert tc.verify(tmp_path / "link").ok
    assert os.listdir(tmp_path / "there") == ["out"]
    assert (tmp_path / "link").is_symlink()
