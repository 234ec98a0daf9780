"""One writer of a pattern at a time, in one process and in several, however the first one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc


def begin(pattern: Path, key: str = "a", *, with_child: bool = False) -> tuple[int, int]:
    """Fork a process that writes there; return its pid, and that of a child which it forked then, or 0."""
    from_it, to_us = os.pipe()
    writer = os.fork()
    if writer:
        os.close(to_us)
        (child,) = struct.unpack("i", os.read(from_it, 4))
        os.close(from_it)
        return writer, child
    try:
        sink = tc.ShardWriter(pattern, fsync=False, resume=True)
        sink.write(key, {"x": 1})
        if not with_child:
            os.write(to_us, struct.pack("i", 0))
        elif os.fork() == 0:  # as a worker of torch's DataLoader would be
            os.write(to_us, struct.pack("i", os.getpid()))
        time.sleep(600)
    finally:
        os._exit(1)


def end(writer: int) -> None:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


def lock_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".lock"))


def write_one(pattern: Path, key: str, **options: Any) -> None:
    with tc.ShardWriter(pattern, fsync=False, **{"resume": True, **options}) as sink:
        sink.write(key, {"x": key})


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_a_second_one_in_a_process(tmp_path: Path, options: dict[str, Any]) -> None:
    with tc.ShardWriter(tmp_path / "%03d.tar", fsync=False) as first:
        first.write("a", {"x": 1})
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(FileExistsError, match=r"another writer is writing .*%03d\.tar; wait"):
            tc.ShardWriter(tmp_path / "%03d.tar", **options)
        assert sorted(os.listdir(tmp_path)) == before
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert not lock_files(tmp_path)
    write_one(tmp_path / "%03d.tar", "b")
    assert list(tc.open(tmp_path).keys()) == ["a", "b"]


def test_another_process(tmp_path: Path) -> None:
    first, _ = begin(tmp_path / "%03d.tar")
    with pytest.raises(FileExistsError, match=r"another writer is writing .*%03d\.tar; wait"):
        tc.ShardWriter(tmp_path / "%03d.tar", resume=True)
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
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(RuntimeError, match="forked child"):
                    sink.write("b", 0)
                sink.close()
                sink.__exit__(ValueError, ValueError(), None)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert [name for name in before if name.endswith(".lock")] == lock_files(tmp_path)
        with pytest.raises(FileExistsError, match="is writing"):
            tc.ShardWriter(tmp_path / "%03d.tar")


@pytest.mark.parametrize("ends", ["close", "error", "error in close", "collected", "constructor"])
def test_every_end_frees_it(tmp_path: Path, ends: str) -> None:
    pattern = tmp_path / "%d.tar"

    def first() -> None:
        sink = tc.ShardWriter(pattern, fsync=False)
        if ends == "close":
            sink.close()
        elif ends == "error":
            with sink:
                raise ZeroDivisionError
        elif ends == "error in close":
            sink.write("a", 0)
            (tmp_path / "0.tar").write_bytes(b"mine")
            with pytest.raises(FileExistsError, match="was created after this writer started"):
                sink.close()
            (tmp_path / "0.tar").unlink()

    if ends == "constructor":
        (tmp_path / "0.tar").write_bytes(b"no tar" * 200)
        with pytest.raises(tc.FormatError):
            tc.ShardWriter(pattern, resume=True)
        (tmp_path / "0.tar").unlink()
    elif ends == "error":
        with pytest.raises(ZeroDivisionError):
            first()
    else:
        first()
    assert not lock_files(tmp_path)
    write_one(pattern, "b")


def test_the_end_of_the_interpreter_frees_it(tmp_path: Path) -> None:
    code = f"import wds_tensorcache as tc; sink = tc.ShardWriter({str(tmp_path / '%d.tar')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert os.listdir(tmp_path) == []


def test_patterns_with_names_in_common(tmp_path: Path) -> None:
    """A shard never replaces that of another writer."""
    first = tc.ShardWriter(tmp_path / "%d.tar", fsync=False)
    second = tc.ShardWriter(tmp_path / "0.tar", fsync=False)
    second.write("b", 0)
    first.write("a", 0)
    first.close()
    with pytest.raises(FileExistsError, match="was created after this writer started"):
        second.close()
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert tc.verify(tmp_path).ok
    assert sorted(os.listdir(tmp_path)) == ["0.idx", "0.tar", "manifest.json"]


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [
        ("%06d.tar", "%06d.tar", True),
        ("x.tar", "x.tar", True),
        ("%06d.tar", "r0of2-%06d.tar", True),
        ("a-r0of2-%d.tar", "a-r1of3-%d.tar", True),
        ("r0of2-%d.tar", "r1of2-%d.tar", False),
        ("a-r0of2-%d.tar", "b-r1of3-%d.tar", False),
        ("train-r0-%06d.tar", "train-r1-%06d.tar", False),
        ("train-%d.tar", "val-%d.tar", False),
        ("%d.tar", "x.tar", False),
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


def test_another_folder(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "a" / "%d.tar", fsync=False), tc.ShardWriter(tmp_path / "b" / "%d.tar", fsync=False):
        pass


def test_indexes_are_written_while_writers_begin(tmp_path: Path) -> None:
    write_one(tmp_path / "%03d.tar", "a")
    indexing = os.fork()
    if indexing == 0:
        status = 1
        try:
            for _ in range(100):
                tc.write_index(tmp_path / "000.tar")
            status = 0
        finally:
            os._exit(status)
    ended, status = 0, 0
    while not ended:
        tc.ShardWriter(tmp_path / "%03d.tar", resume=True, fsync=False).close()
        ended, status = os.waitpid(indexing, os.WNOHANG)
    assert status == 0


# --- a folder that a stranger has locked ---

STRANGER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("holds", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def locking(folder: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STRANGER, str(folder), str(seconds)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "holds\n"
    try:
        yield running
    finally:
        running.kill()
        running.wait(60)
        assert running.stdout is not None
        running.stdout.close()


@pytest.mark.long
def test_a_folder_that_a_stranger_has_locked(tmp_path: Path) -> None:
    """A writer that changes the manifest gives up after a minute. Its shard stays."""
    with locking(tmp_path, 600), pytest.raises(FileExistsError, match="another process has locked the folder for 60 s"):
        write_one(tmp_path / "%d.tar", "a")
    assert sorted(os.listdir(tmp_path)) == ["0.idx", "0.tar"]
    write_one(tmp_path / "%d.tar", "a")
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["0.idx", "0.tar", "manifest.json"]


def test_a_folder_that_a_stranger_locks_for_a_moment(tmp_path: Path) -> None:
    """The lock is held longer than any pause between two attempts; the waiting writer continues by itself."""
    with locking(tmp_path, 1) as running:
        write_one(tmp_path / "%d.tar", "a")
        assert running.wait(60) == 0
    assert list(tc.open(tmp_path).keys()) == ["a"]


# --- builds ---


@pytest.fixture
def untouched() -> tuple[Callable[[list[Any]], Any], Any]:
    """A function and items that fail the test if they are looked at."""

    class Items:
        def __len__(self) -> int:
            return 400

        def __getitem__(self, i: int) -> int:
            raise AssertionError("read")

    def fn(items: list[Any]) -> Any:
        raise AssertionError("computed")

    return fn, Items()


@pytest.mark.parametrize("digest", [None, str])
def test_a_second_build_computes_nothing(tmp_path: Path, untouched: Any, digest: Any) -> None:
    fn, items = untouched

    def model(batch: list[int]) -> list[Any]:
        if batch[0] == 4:
            with pytest.raises(FileExistsError, match="is writing"):
                tc.build(items, fn, tmp_path, fingerprint={}, digest=digest)
        return [{"x": i} for i in batch]

    cache = tc.build(range(20), model, tmp_path, fingerprint={}, digest=digest, batch_size=4, fsync=False)
    assert [sample["x"] for sample in cache] == list(range(20))


def test_a_writer_of_an_overlapping_pattern_leaves_unfinished_shards_alone(tmp_path: Path) -> None:
    first = tc.ShardWriter(tmp_path / "%06d.tar")
    first.write("a", {"x": 3})
    tc.ShardWriter(tmp_path / "%d.tar", resume=True).close()
    first.close()
    assert list(tc.open(tmp_path).keys()) == ["a"]


def make_version(out: Path, revision: int, first: Callable[[], Any] = lambda: None, **reuse: Path) -> int:
    """Make a cache of 40 samples in a forked child, which calls `first` before it computes; return its pid.

    Its exit code is 0 if the build returned, 1 if it was refused, 3 if another version is there.
    """
    waiting = [first]

    def fn(items: list[int]) -> list[Any]:
        while waiting:
            waiting.pop()()
        return [{"x": i, "of": revision} for i in items]

    child = os.fork()
    if child:
        return child
    status = 2
    try:
        options: dict[str, Any] = {"digest": lambda i: f"{revision}", **reuse}
        tc.build(range(40), fn, out, fingerprint={}, batch_size=4, max_samples=5, fsync=False, **options).close()
        status = 0
    except FileExistsError:
        status = 1
    except tc.StaleCacheError:
        status = 3
    finally:
        os._exit(status)


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def revisions(folder: Path) -> list[int]:
    with tc.open(folder) as cache:
        return [sample["of"] for sample in cache]


def test_a_version_during_another_one(tmp_path: Path) -> None:
    """The second is refused, and the first is made."""
    old, out = tmp_path / "0", tmp_path / "1"
    assert code_of(make_version(old, 0)) == 0
    computes, says = os.pipe()
    waits, lets_go = os.pipe()

    def wait() -> None:
        os.write(says, b"1")
        os.read(waits, 1)

    first = make_version(out, 1, wait, reuse=old)
    assert os.read(computes, 1) == b"1"
    assert code_of(make_version(out, 2, (tmp_path / "computed").touch, reuse=old)) == 1
    assert not out.exists()
    os.write(lets_go, b"1")
    assert code_of(first) == 0
    assert code_of(make_version(out, 2, (tmp_path / "computed").touch, reuse=old)) == 3
    assert (revisions(old), revisions(out)) == ([0] * 40, [1] * 40)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    for end_of_pipe in (computes, says, waits, lets_go):
        os.close(end_of_pipe)


def test_two_versions_that_start_at_once(tmp_path: Path) -> None:
    """One of the two is made. The other process computes nothing, and says why."""
    assert code_of(make_version(tmp_path / "0", 0)) == 0
    for attempt in range(1, 6):
        out, computing = tmp_path / f"{attempt}", tmp_path / f"computing-{attempt}"
        computing.mkdir()

        def first(of: int, computing: Path = computing) -> None:
            (computing / f"{of}").touch()
            time.sleep(0.01)

        both = (2 * attempt, 2 * attempt + 1)
        old = tmp_path / f"{attempt - 1}"
        children = {of: make_version(out, of, partial(first, of), reuse=old) for of in both}
        codes = {of: code_of(child) for of, child in children.items()}
        (made,) = (of for of, code in codes.items() if code == 0)
        assert set(codes.values()) <= {0, 1, 3}
        assert revisions(out) == [made] * 40
        assert os.listdir(computing) == [f"{made}"]
        computing.joinpath(f"{made}").unlink()
        computing.rmdir()
    assert sorted(os.listdir(tmp_path)) == [f"{i}" for i in range(6)]


# --- the lock file as other programs see it, and other files in its place ---


def test_nothing_trips_over_it(tmp_path: Path) -> None:
    write_one(tmp_path / "a-%d.tar", "a")
    end(begin(tmp_path / "b-%d.tar", "b")[0])  # which leaves its lock
    assert len(lock_files(tmp_path)) == 1
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert tc.verify(tmp_path).ok
    tc.write_index(tmp_path / "a-0.tar")
    assert tc.repair(tmp_path, tmp_path / "mended").ok
    write_one(tmp_path / "b-%d.tar", "b")
    assert not lock_files(tmp_path)
