"""Many reads in one system call give the bytes of as many single reads, whatever the system refuses."""

from __future__ import annotations

import errno
import gc
import os
import platform
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.children import run_in_child
from wds_tensorcache.storage import aio
from wds_tensorcache.storage.aio import Reads, address_of, read_many

pytestmark = pytest.mark.skipif(aio._number is None, reason="this system has no io_submit")
CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()
Some = tuple[int, int, list[int]]  # descriptor, offset, lengths of the buffers


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Three descriptors of files that contain `CONTENT`, each with another first byte."""
    fds = []
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes([number]) + CONTENT)
        fds.append(os.open(tmp_path / str(number), os.O_RDONLY))
    yield fds
    for fd in fds:
        os.close(fd)


def reads_of(wanted: Sequence[Some], flags: int = 0) -> tuple[Reads, list[list[Any]]]:
    """Return reads and their buffers, which are full of 7."""
    buffers = [[np.full(size, 7, np.uint8) for size in sizes] for *_, sizes in wanted]
    flat = [(address_of(buffer), len(buffer)) for each in buffers for buffer in each]
    first = np.cumsum([0, *map(len, buffers)])
    fd, offset = (np.array(column, np.int64) for column in list(zip(*wanted, strict=True))[:2])
    return Reads(fd, offset, np.full(len(wanted), flags), np.array(flat, np.uint64), first), buffers


def random_reads(files: list[int], count: int, seed: int) -> list[Some]:
    rng = np.random.default_rng(seed)
    return [
        (files[rng.integers(3)], int(rng.integers(200_000)), rng.integers(1, 3000, rng.integers(1, 30)).tolist())
        for _ in range(count)
    ]


def check(wanted: Sequence[Some], found: Any, buffers: list[list[Any]]) -> None:
    for (fd, offset, sizes), nbytes, parts in zip(wanted, found.tolist(), buffers, strict=True):
        assert nbytes == sum(sizes)
        assert np.concatenate(parts).tobytes() == os.pread(fd, nbytes, offset)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 700])
def test_every_byte_arrives(files: list[int], count: int) -> None:
    wanted = random_reads(files, count, count)
    reads, buffers = reads_of(wanted)
    check(wanted, read_many(reads, 0, count), buffers)


def test_a_part_of_the_reads(files: list[int]) -> None:
    wanted = random_reads(files, 300, 0)
    reads, buffers = reads_of(wanted)
    check(wanted[100:290], read_many(reads, 100, 290), buffers[100:290])
    assert all((part == 7).all() for each in buffers[:100] + buffers[290:] for part in each)
    assert len(read_many(reads, 5, 5)) == 0


def test_reads_beyond_the_end_are_short(files: list[int]) -> None:
    end = 1 + len(CONTENT)
    wanted: list[Some] = [(files[0], end - 10, [4, 20]), (files[1], end + 5, [3]), (files[2], 0, [5])]
    reads, buffers = reads_of(wanted)
    assert read_many(reads, 0, 3).tolist() == [10, 0, 5]
    assert np.concatenate(buffers[0]).tobytes() == CONTENT[-10:] + b"\x07" * 14


def test_reads_that_the_kernel_refuses(files: list[int], tmp_path: Path) -> None:
    """Those before it are executed; those after it fail, and the next call is not disturbed."""
    for bad in (9999, os.open(tmp_path, os.O_RDONLY)):
        wanted = random_reads(files, 200, 1)
        wanted[70] = bad, 0, [5]
        reads, buffers = reads_of(wanted)
        found = read_many(reads, 0, 200)
        check(wanted[:70], found[:70], buffers[:70])
        assert found[70] < 0
        check(wanted[128:], found[128:], buffers[128:])
        for at in range(71, 128):
            if found[at] >= 0:
                check(wanted[at : at + 1], found[at : at + 1], buffers[at : at + 1])


def test_reads_that_do_not_wait(files: list[int]) -> None:
    for fd in files:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    wanted = random_reads(files, 100, 2)
    reads, buffers = reads_of(wanted, os.RWF_NOWAIT)
    found = read_many(reads, 0, 100).tolist()
    for (fd, offset, sizes), nbytes, parts in zip(wanted, found, buffers, strict=True):
        assert nbytes <= sum(sizes)
        assert np.concatenate(parts).tobytes()[: max(0, nbytes)] == os.pread(fd, max(0, nbytes), offset)
    reads, buffers = reads_of(wanted)
    check(wanted, read_many(reads, 0, 100), buffers)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_a_thread_keeps_the_gil_for_few_bytes_in_memory(
    files: list[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait for a thread that computes, for milliseconds each time."""
    wanted = [(fd, 100 * i, [300, 200]) for i, fd in zip(range(count), files * count, strict=False)]
    try:
        for fd, offset, _ in wanted:
            os.preadv(fd, [bytearray(500)], offset, os.RWF_NOWAIT)
    except OSError as exc:
        pytest.skip(f"{exc}: this file system has no such reads, or has written the files out of memory")
    released: list[int] = []
    call = aio._call
    monkeypatch.setattr(aio, "_call", lambda number, *rest: released.append(number) or call(number, *rest))
    aio._idle.clear()
    reads, buffers = reads_of(wanted, os.RWF_NOWAIT)
    check(wanted, read_many(reads, 0, count), buffers)
    assert released == [aio._NUMBERS[platform.machine()][0]]  # io_setup
    many, more = reads_of([(files[0], 0, [70_000])], os.RWF_NOWAIT)
    check([(files[0], 0, [70_000])], read_many(many, 0, 1), more)
    assert len(released) == 2


def test_eight_threads_and_their_forks(files: list[int]) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for number in range(40):
            wanted = random_reads(files, 150, 100 * seed + number)
            reads, buffers = reads_of(wanted)
            try:
                check(wanted, read_many(reads, 0, 150), buffers)
            except AssertionError:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):  # contexts of the parent are invalid in a child
        assert run_in_child(lambda: (work(9), os._exit(len(wrong)))) == 0
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOSYS])
def test_contexts_that_the_system_refuses(files: list[int], monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """If there are too many contexts, a call tries again a second later."""
    wanted = random_reads(files, 10, 3)
    reads, buffers = reads_of(wanted)
    call, number = aio._call, aio._number
    monkeypatch.setattr(aio, "_idle", [])
    monkeypatch.setattr(aio, "_number", number)
    monkeypatch.setattr(aio, "_refused_until", 0.0)

    def refused(*arguments: Any) -> int:
        raise OSError(error, "no context")

    monkeypatch.setattr(aio, "_call", refused)
    assert (read_many(reads, 0, 10) < 0).all()
    monkeypatch.setattr(aio, "_call", call)
    assert (read_many(reads, 0, 10) < 0).all()
    monkeypatch.setattr(aio, "_refused_until", 0.0)
    found = read_many(reads, 0, 10)
    if error == errno.EAGAIN:
        check(wanted, found, buffers)
    else:
        assert (found < 0).all()
        assert aio._number is None


def test_interrupts(files: list[int]) -> None:
    """An interrupt ends all reads, loses no context, and does not disturb later reads."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    wanted, num_interrupted = random_reads(files, 100, 4), 0
    gc.disable()  # an interrupt in a callback of the collector, such as that of Hypothesis, would be lost
    before, chance = signal.signal(signal.SIGALRM, interrupt), random.Random(5)
    try:
        for _ in range(60):
            reads, buffers = reads_of(wanted)
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1e-3))
                found = read_many(reads, 0, 100)
                signal.setitimer(signal.ITIMER_REAL, 0)
                check(wanted, found, buffers)
            except KeyboardInterrupt:
                num_interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert num_interrupted > 0
    assert sum(isinstance(each, aio._Context) for each in gc.get_objects()) == len(aio._idle)


def test_an_interrupt_handler_that_forks(files: list[int]) -> None:
    """The child continues with reads of its parent's context; they fail, and all later ones are right."""
    wanted, children, chance = random_reads(files, 120, 6), [], random.Random(7)

    def fork(*_: Any) -> None:
        child = os.fork()
        if child:
            children.append(child)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            is_child.append(True)

    is_child: list[bool] = []
    before = signal.signal(signal.SIGALRM, fork)
    try:
        for _ in range(60):
            reads, buffers = reads_of(wanted)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1e-3))
            found = read_many(reads, 0, len(wanted))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if is_child:
                status = 1
                try:
                    assert (found < 0).all() or (found == [sum(sizes) for *_, sizes in wanted]).all()
                    again, more = reads_of(wanted)
                    check(wanted, read_many(again, 0, len(wanted)), more)
                    status = 0
                finally:
                    os._exit(status)
            check(wanted, found, buffers)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)
    assert children


SANDBOX = """
    import ctypes, struct, sys
    import torch
    import wds_tensorcache as tc
    from wds_tensorcache.storage import aio

    # a seccomp filter: EPERM for io_setup, as in a sandbox
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, aio._number[0]), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
    with tc.open(sys.argv[1]) as cache:
        for _ in range(2):
            assert cache.read_batch([3, 1, 2])["x"][:, 0].tolist() == [3, 1, 2]
    assert aio._number is None
"""


def test_in_a_sandbox(tmp_path: Path) -> None:
    import torch

    import wds_tensorcache as tc

    with tc.ShardWriter(tmp_path / "%d.tar", fsync=False) as sink:
        for i in range(5):
            sink.write(str(i), {"x": torch.full((30_000,), float(i))})
    command = [sys.executable, "-c", textwrap.dedent(SANDBOX), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
