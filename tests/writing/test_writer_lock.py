"""One writer of a pattern at a time, in one process and in several, however the first one ends."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import finish, start
from wds_tensorcache.storage import locks
from wds_tensorcache.writing import pattern_lock
from wds_tensorcache.writing.pattern import ShardPattern


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
        with pytest.raises(FileExistsError, match=f"process {os.getpid()} on {platform.node()} is writing"):
            tc.ShardWriter(tmp_path / "%03d.tar", **options)
        assert sorted(os.listdir(tmp_path)) == before
    assert list(tc.open(tmp_path).keys()) == ["a"]
    assert not lock_files(tmp_path)
    write_one(tmp_path / "%03d.tar", "b")
    assert list(tc.open(tmp_path).keys()) == ["a", "b"]


def test_many_threads_begin_at_once(tmp_path: Path) -> None:
    ready, found = threading.Barrier(8), list[Any]()

    def work(number: int) -> None:
        ready.wait(60)
        try:
            sink = tc.ShardWriter(tmp_path / "%03d.tar", fsync=False)
        except FileExistsError as exc:
            found.append(exc)
            return
        found.append(sink)
        sink.write(f"{number}", 0)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    (writer,) = [each for each in found if isinstance(each, tc.ShardWriter)]
    assert len(found) == 8
    writer.close()
    assert len(tc.open(tmp_path)) == 1


def test_another_process(tmp_path: Path) -> None:
    first, _ = begin(tmp_path / "%03d.tar")
    with pytest.raises(FileExistsError, match=f"process {first} on {platform.node()} is writing .*%03d.tar"):
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


def test_a_child_that_ends_takes_nothing_along(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%03d.tar", fsync=False) as sink:
        sink.write("a", 0)
        before = sorted(os.listdir(tmp_path))
        child = os.fork()
        if child == 0:
            sink.__exit__(ValueError, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert [name for name in before if name.endswith(".lock")] == lock_files(tmp_path)
        with pytest.raises(FileExistsError, match="is writing"):
            tc.ShardWriter(tmp_path / "%03d.tar")


def test_a_manifest_is_not_locked_by_a_child_forked_meanwhile(tmp_path: Path) -> None:
    """Workers that are forked while another thread changes the manifest live as long as the writer."""
    held = locks.Held(str(tmp_path), os.O_RDONLY)
    assert held.lock()
    go_on, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(send)
        os.read(go_on, 1)
        os._exit(0)
    held.close()
    with locks.Held(str(tmp_path), os.O_RDONLY) as again:
        assert again.lock()
    os.close(send)
    os.waitpid(child, 0)


def test_a_lock_that_is_forgotten(tmp_path: Path) -> None:
    """As where an interrupt comes before it is closed."""
    before = set(locks._OPEN)
    held = locks.Held(str(tmp_path), os.O_RDONLY)
    assert held.lock()
    fd = held.fd
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with locks.Held(str(tmp_path), os.O_RDONLY) as again:
        assert again.lock()
    again.close()
    assert set(locks._OPEN) == before


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


OVERLAPS = [
    ("%06d.tar", "%06d.tar", True),
    ("%d.tar", "%03d.tar", True),
    ("%d.tar", "7.tar", True),
    ("a-%d.tar", "a-1%d.tar", True),
    ("a%d5.tar", "a5%d.tar", True),
    ("a%db1.tar", "a3b%d.tar", True),
    ("x.tar", "x.tar", True),
    ("%06d.tar", "r0of2-%06d.tar", True),
    ("a-r0of2-%d.tar", "a-r1of3-%03d.tar", True),
    ("r0of2-%d.tar", "r1of2-%d.tar", False),
    ("a-r0of2-%d.tar", "b-r1of3-%d.tar", False),
    ("r0of1-%d.tar", "%d.tar", False),
    ("%d-a.tar", "%d-b.tar", False),
    ("train-r0-%06d.tar", "train-r1-%06d.tar", False),
    ("train-r1-%06d.tar", "train-r10-%06d.tar", False),
    ("train-%d.tar", "val-%d.tar", False),
    ("train-%d.tar", "train-x-%d.tar", False),
    ("x.tar", "y.tar", False),
    ("%d.tar", "x.tar", False),
    ("%d.tar", "%d.tar.gz", False),
]


@pytest.mark.parametrize(("one", "other", "do"), OVERLAPS)
def test_patterns_with_names_in_common(tmp_path: Path, one: str, other: str, do: bool) -> None:
    assert ShardPattern(one).overlaps(other) == ShardPattern(other).overlaps(one) == do
    with tc.ShardWriter(tmp_path / one, fsync=False) as first:
        if do:
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


@pytest.mark.parametrize("name", [".000.idx.0123abcd.tmp", ".000.tar.77.tmp", ".manifest.json.0123abcd.tmp"])
def test_what_a_living_process_writes_stays(tmp_path: Path, name: str) -> None:
    """`tc.write_index` writes beside shards without being their writer."""
    with locks.Held(str(tmp_path / name), os.O_WRONLY | os.O_CREAT) as file:
        assert file.lock()
        write_one(tmp_path / "%03d.tar", "a")
        assert (tmp_path / name).exists()
    write_one(tmp_path / "%03d.tar", "b")
    assert not (tmp_path / name).exists()


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


def writer_that_begins(folder: Path) -> None:
    tc.ShardWriter(folder / "%d.tar")


def build(folder: Path) -> None:
    tc.build(range(4), lambda items: sys.exit("computed"), folder, fingerprint={})


def index(folder: Path) -> None:
    tc.write_index(folder / "x.tar")


def test_a_folder_that_a_stranger_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each act gives up after ten seconds, here two; all of them wait at the same time."""
    assert locks._WAIT_S == 10
    monkeypatch.setattr(locks, "_WAIT_S", 2.0)

    def wait(act: Callable[[Path], None], folder: Path) -> None:
        with pytest.raises(FileExistsError) as caught:
            act(folder)
        (tmp_path / f"{act.__name__}.txt").write_text(str(caught.value))

    with contextlib.ExitStack() as stack:
        waiting = []
        for act in (writer_that_begins, build, index):
            folder = tmp_path / act.__name__
            folder.mkdir()
            if act is index:
                write_one(folder / "x.tar", "a", resume=False, footer=False)
            before = sorted(os.listdir(folder))
            holder = stack.enter_context(locking(folder, 600))
            waiting.append((act, folder, before, holder.pid))
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=wait, args=each[:2], daemon=True) for each in waiting]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        for act, folder, before, pid in waiting:
            said = (tmp_path / f"{act.__name__}.txt").read_text()
            assert said.startswith(f"{folder}: locked for 2 s, now by process {pid}; ")
            assert sorted(os.listdir(folder)) == before


def test_a_folder_that_a_stranger_locks_for_a_moment(tmp_path: Path) -> None:
    """The lock is held longer than any pause between two attempts; the waiting writer continues by itself."""
    with locking(tmp_path, 1) as running:
        write_one(tmp_path / "%d.tar", "a")
        assert running.wait(60) == 0
    assert list(tc.open(tmp_path).keys()) == ["a"]


def test_a_lock_of_a_folder_in_which_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that take turns may together need longer than one of them may be still."""
    monkeypatch.setattr(locks, "_WAIT_S", 0.3)
    stop = threading.Event()

    def change() -> None:
        while not stop.wait(0.01):
            (tmp_path / "file").touch()
            (tmp_path / "file").unlink()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with locking(tmp_path, 1):
            write_one(tmp_path / "%d.tar", "a")
        with locks.Held(str(tmp_path), os.O_RDONLY) as held:
            assert held.lock()
            with pytest.raises(
                FileExistsError, match=r"locked for 2 s, now by process \d+; "
            ):  # other writers make all changes
                tc.ShardWriter(tmp_path / "%d.tar", resume=True)
    finally:
        stop.set()
        thread.join()


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
            with pytest.raises(FileExistsError, match=f"process {os.getpid()} on .* is writing"):
                tc.build(items, fn, tmp_path, fingerprint={}, digest=digest)
        return [{"x": i} for i in batch]

    cache = tc.build(range(20), model, tmp_path, fingerprint={}, digest=digest, batch_size=4, fsync=False)
    assert [sample["x"] for sample in cache] == list(range(20))


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
    write_one(tmp_path / "c-%d.tar", "c")  # of any pattern
    assert not lock_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pattern": 7}', b"\xff" * 10_000, b"[" * 9000], ids=repr)
def test_files_that_say_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".tensorcache.00000000.lock").write_bytes(content)
    write_one(tmp_path / "%d.tar", "a")
    assert not lock_files(tmp_path)


@pytest.mark.parametrize("system", ["no locks", "locks"])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """Then a process counts as a writer as long as it lives, and one of another machine until its lock file is deleted."""
    if system == "no locks":
        monkeypatch.setattr(locks, "fcntl", None)  # as where Python has none
    path = tmp_path / ".tensorcache.00000000.lock"
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait(60)

    def written_by(pid: int, host: str) -> bool:
        path.write_text(json.dumps({"pattern": "%d.tar", "pid": pid, "host": host}))
        found = ""
        try:
            write_one(tmp_path / "%d.tar", "a")
        except FileExistsError as exc:
            found = str(exc)
        is_refused = f"process {pid} on {host}" in found and f"if that process has ended, delete {path}" in found
        assert is_refused == path.exists() == bool(found)
        return is_refused

    assert not written_by(over.pid, platform.node())
    assert not written_by(os.getpid(), platform.node())  # an earlier process with this one's number, in a container say
    assert written_by(os.getppid(), platform.node()) == (system == "no locks")
    assert written_by(over.pid, "elsewhere") == (system == "no locks")
    path.unlink(missing_ok=True)
    with tc.ShardWriter(tmp_path / "%d.tar", resume=True), pytest.raises(FileExistsError, match="is writing"):
        tc.ShardWriter(tmp_path / "%d.tar", resume=True)
    assert not pattern_lock._MINE


def test_a_lock_file_that_is_filled_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks, a writer that has created its file, but not filled it yet, counts as active."""
    monkeypatch.setattr(locks, "fcntl", None)
    path = tmp_path / ".tensorcache.00000000.lock"
    path.touch()
    content = json.dumps({"pattern": "%d.tar", "pid": os.getppid(), "host": platform.node()})
    later = threading.Timer(0.2, path.write_text, [content])
    later.start()
    with pytest.raises(FileExistsError, match=f"process {os.getppid()} on .* is writing"):
        write_one(tmp_path / "%d.tar", "a")
    later.join()
    assert path.read_text() == content


def test_one_at_a_time_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    pattern, inside = ShardPattern(str(tmp_path / "%d.tar")), tmp_path / "inside"

    def work() -> None:
        for _ in range(60):
            while True:
                with contextlib.suppress(FileExistsError):
                    lock = pattern_lock.WriterLock(pattern)
                    break
                time.sleep(0.001)
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # raises if another process is inside
            time.sleep(0.0005)
            inside.unlink()
            lock.close()

    assert finish([start(work) for _ in range(6)]) == [0] * 6


def test_a_process_of_another_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks: its number means nothing here, even if the host has the same name."""
    monkeypatch.setattr(locks, "fcntl", None)
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait(60)
    path = tmp_path / ".tensorcache.00000000.lock"
    for space, is_refused in ((pattern_lock._pid_space(), False), ("boot pid:[1]", True)):
        found = {"pattern": "%d.tar", "pid": over.pid, "host": platform.node(), "space": space}
        path.write_text(json.dumps(found))
        with pytest.raises(FileExistsError) if is_refused else contextlib.nullcontext():
            write_one(tmp_path / "%d.tar", "a")
        assert path.exists() == is_refused


def test_a_lock_file_that_another_writer_has_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a long pause between creating and filling it, without locks."""
    monkeypatch.setattr(locks, "fcntl", None)
    refuse = pattern_lock._refuse_others

    def deleted(pattern: ShardPattern, folder: str, mine: str) -> None:
        os.unlink(os.path.join(folder, mine))
        refuse(pattern, folder, mine)

    monkeypatch.setattr(pattern_lock, "_refuse_others", deleted)
    with pytest.raises(FileExistsError, match="try again"):
        write_one(tmp_path / "%d.tar", "a")
    assert not lock_files(tmp_path)
