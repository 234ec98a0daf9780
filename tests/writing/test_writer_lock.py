"""One writer of a pattern at a time, in one process and in several, however the first one ends."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child, start, switching_often


def begin(pattern: Path, *, with_child: bool = False) -> tuple[int, int]:
    """Fork a process that writes there; return its pid, and that of a child which it forked then, or 0."""
    from_it, to_us = os.pipe()

    def write() -> None:
        sink = tc.ShardWriter(pattern, fsync=False, resume=True)
        sink.write("a", {"x": 1})
        if not with_child:
            os.write(to_us, struct.pack("i", 0))
        elif os.fork() == 0:  # as a worker of torch's DataLoader would be
            os.write(to_us, struct.pack("i", os.getpid()))
        time.sleep(600)

    writer = start(write)
    (child,) = struct.unpack("i", os.read(from_it, 4))
    os.close(from_it)
    os.close(to_us)
    return writer, child


def end(writer: int) -> None:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


def lock_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".lock"))


def write_one(pattern: Path, key: str, **options: Any) -> None:
    with tc.ShardWriter(pattern, fsync=False, **{"resume": True, **options}) as sink:
        sink.write(key, {"x": key})


def test_a_second_one_in_a_process(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%03d.tar", fsync=False) as first:
        first.write("a", {"x": 1})
        before = sorted(os.listdir(tmp_path))
        message = r"an unfinished writer of this process is writing .*%03d\.tar; close"
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match=message):
                tc.ShardWriter(tmp_path / "%03d.tar", **options)
        with pytest.raises(FileNotFoundError, match="a writer in this process has not finished its first shard"):
            tc.open(tmp_path)
        assert sorted(os.listdir(tmp_path)) == before
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert not lock_files(tmp_path)
    write_one(tmp_path / "%03d.tar", "b")
    assert list(tc.open(tmp_path).keys()) == ["a", "b"]


def test_a_second_one_while_other_threads_write(tmp_path: Path) -> None:
    """Their files come and go while this thread looks for the writer that holds the lock."""
    is_done = threading.Event()

    def write_elsewhere() -> None:
        while not is_done.is_set():
            tc.ShardWriter(tmp_path / "b" / "%03d.tar", fsync=False, overwrite=True).close()

    other = threading.Thread(target=write_elsewhere)
    with tc.ShardWriter(tmp_path / "a" / "%03d.tar", fsync=False), switching_often():
        other.start()
        try:
            for _ in range(15):
                with pytest.raises(FileExistsError, match="an unfinished writer of this process"):
                    tc.ShardWriter(tmp_path / "a" / "%03d.tar")
        finally:
            is_done.set()
            other.join()


def test_another_process(tmp_path: Path) -> None:
    first, _ = begin(tmp_path / "%03d.tar")
    with pytest.raises(FileExistsError, match=r"another writer is writing .*%03d\.tar; wait"):
        tc.ShardWriter(tmp_path / "%03d.tar", resume=True)
    with pytest.raises(FileNotFoundError, match="a writer in another process has not finished its first shard"):
        tc.open(tmp_path)
    end(first)
    write_one(tmp_path / "%03d.tar", "b")  # at once
    assert list(tc.open(tmp_path).keys()) == ["b"]
    assert sorted(os.listdir(tmp_path)) == ["000.idx", "000.tar", "manifest.json"]


def test_children_do_not_keep_the_lock_of_one_that_was_killed(tmp_path: Path) -> None:
    first, child = begin(tmp_path / "%03d.tar", with_child=True)
    end(first)
    os.kill(child, 0)  # it lives
    try:
        write_one(tmp_path / "%03d.tar", "b")
    finally:
        os.kill(child, signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == ["000.idx", "000.tar", "manifest.json"]


def test_a_child_cannot_write_and_takes_nothing_along(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%03d.tar", fsync=False) as sink:
        sink.write("a", 0)
        before = sorted(os.listdir(tmp_path))

        def work() -> None:
            with pytest.raises(RuntimeError, match="forked child"):
                sink.write("b", 0)
            sink.close()
            sink.__exit__(ValueError, ValueError(), None)

        assert run_in_child(work) == 0
        assert [name for name in before if name.endswith(".lock")] == lock_files(tmp_path)
        with pytest.raises(FileExistsError, match="is writing"):
            tc.ShardWriter(tmp_path / "%03d.tar")


@pytest.mark.parametrize("end", ["close", "collected", "error", "error in close", "constructor"])
def test_every_end_frees_it(tmp_path: Path, end: str) -> None:
    pattern, shard = tmp_path / "%d.tar", tmp_path / "0.tar"
    if end == "constructor":
        shard.write_bytes(b"no tar" * 200)
        with pytest.raises(tc.FormatError):
            tc.ShardWriter(pattern, resume=True)
    elif end == "error":
        with pytest.raises(ZeroDivisionError), tc.ShardWriter(pattern, fsync=False):
            raise ZeroDivisionError
    else:
        sink = tc.ShardWriter(pattern, fsync=False)
        if end == "error in close":
            sink.write("a", 0)
            shard.write_bytes(b"mine")
            with pytest.raises(FileExistsError, match="was created after this writer started"):
                sink.close()
        elif end == "close":
            sink.close()
        del sink
    assert not lock_files(tmp_path)
    shard.unlink(missing_ok=True)
    write_one(pattern, "b")


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [
        ("%06d.tar", "r0of2-%06d.tar", True),
        ("a-r0of2-%d.tar", "a-r1of3-%d.tar", True),
        ("r0of2-%d.tar", "r1of2-%d.tar", False),
    ],
)
def test_other_patterns(tmp_path: Path, one: str, other: str, is_refused: bool) -> None:
    """Ranks of one build with different numbers of ranks would compute the same samples."""
    with tc.ShardWriter(tmp_path / one, fsync=False) as first:
        if is_refused:
            with pytest.raises(FileExistsError, match="is writing"):
                tc.ShardWriter(tmp_path / other, resume=True)
        else:
            with tc.ShardWriter(tmp_path / other, fsync=False) as second:
                first.write("a", 0)
                second.write("b", 0)
    assert not lock_files(tmp_path)


def test_a_folder_that_another_program_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that changes the manifest waits, and gives up in the end. Its shard stays."""
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # a second for each look
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(FileExistsError, match="another process has locked the folder for 60 s"):
        write_one(tmp_path / "%d.tar", "a")
    os.close(folder)
    assert sorted(os.listdir(tmp_path)) == ["0.idx", "0.tar"]
    write_one(tmp_path / "%d.tar", "a")
    assert list(tc.open(tmp_path).keys()) == ["a"]
