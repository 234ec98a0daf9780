"""`progress=` of `verify` and `repair`: a function or a bar of tqdm, which reaches the bytes of all shards."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, write


class Calls(list[tuple[int, int]]):
    """A function for `progress=` that records its calls, all of which must come from one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __call__(self, done: int, total: int) -> None:
        assert threading.get_ident() == self.thread
        self.append((done, total))

    def check(self, total: int) -> None:
        assert self[0] == (0, total)
        assert self[-1] == (total, total)
        assert self == sorted(set(self))
        assert {each for _, each in self} == {total}


def nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


@pytest.mark.parametrize("num_threads", [1, 5])
def test_functions(tmp_path: Path, num_threads: int) -> None:
    folder = tmp_path / "a"
    path = write(folder, 40, per_shard=10)
    calls = Calls()
    assert tc.verify(folder, num_threads=num_threads, progress=calls).ok
    calls.check(nbytes_of(folder))
    assert len(calls) >= 5  # the beginning, and each shard
    for begin, _ in members(path).values():
        flip(path, begin)  # this shard is read twice, and nothing of it is left to write
    (folder / "000001.tar").unlink()
    calls = Calls()
    report = tc.repair(folder, tmp_path / "b", num_threads=num_threads, progress=calls)
    assert report.num_samples_written == 20
    calls.check(2 * nbytes_of(folder))
    assert len(calls) >= 6


def test_an_error_of_the_function_ends_the_call(tmp_path: Path) -> None:
    write(tmp_path / "a", 30, per_shard=10)

    def fail(done: int, total: int) -> None:
        if done:
            raise OSError("not a fault of a shard")

    for num_threads in (1, 3):
        with pytest.raises(OSError, match="not a fault of a shard"):
            tc.verify(tmp_path / "a", num_threads=num_threads, progress=fail)
        with pytest.raises(OSError, match="not a fault of a shard"):
            tc.repair(tmp_path / "a", tmp_path / "b", num_threads=num_threads, progress=fail)
    assert not (tmp_path / "b").exists()


def test_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 30, per_shard=10)
    tc.verify(tmp_path / "a", progress=True)
    assert re.search("verify: 100%.*B/s", capsys.readouterr().err)
    tc.repair(tmp_path / "a", tmp_path / "b", progress=True)
    assert "repair: 100%" in capsys.readouterr().err
    tc.verify(tmp_path / "a")  # stderr is not a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    tc.verify(tmp_path / "a")
    assert not capsys.readouterr().err
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
        tc.verify(tmp_path / "a", progress=True)


def test_progress_within_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the end of the shard waits until progress was shown before it."""
    with tc.ShardWriter(tmp_path, footer=False, fsync=False) as sink:
        for i in range(3):
            sink.write(str(i), {"x": i}, bin=bytes(2 << 20))
    is_shown, preadv = threading.Event(), os.preadv

    def wait_and_read(fd: int, buffers: Any, begin: int) -> int:
        assert begin < 5 << 20 or is_shown.wait(20)
        return preadv(fd, buffers, begin)

    def note(done: int, total: int) -> None:
        if 0 < done < total:
            is_shown.set()

    monkeypatch.setattr(os, "preadv", wait_and_read)
    assert tc.verify(tmp_path, num_threads=1, progress=note).ok
    assert is_shown.is_set()
