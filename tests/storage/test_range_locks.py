"""Locks on byte ranges of a file exclude other holders, and end with the holder, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.children import finish, start
from wds_tensorcache.storage.range_locks import CAN_LOCK_RANGES, RangeLocks

pytestmark = pytest.mark.skipif(not CAN_LOCK_RANGES, reason="only Linux has locks that belong to open files")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "locks").touch()
    return str(tmp_path / "locks")


@contextmanager
def child_that_waits(prepare: Callable[[], object]) -> Iterator[int]:
    """Run `prepare` in a forked child, which then waits for the end of the `with` block; yield its process id."""
    ready, gate = os.pipe(), os.pipe()

    def work() -> None:
        os.close(gate[1])
        prepare()
        os.write(ready[1], b"x")
        os.read(gate[0], 1)

    child = start(work)
    os.close(ready[1])
    try:
        assert os.read(ready[0], 1) == b"x"
        yield child
    finally:
        os.close(gate[1])
        assert finish([child])[0] in (0, -signal.SIGKILL)
        os.close(ready[0])
        os.close(gate[0])


def test_objects_exclude_each_other_in_one_thread(path: str) -> None:
    one, other = RangeLocks(path), RangeLocks(path)
    assert one.lock(3, 4)
    assert one.lock(3, 4)  # its own lock does not exclude it
    assert [other.lock(byte) for byte in (2, 3, 6, 7)] == [True, False, False, True]
    one.unlock(4)
    assert [other.lock(byte) for byte in (3, 4, 5)] == [False, True, False]
    assert one.locked_by_others(0, 10) == [2, 4, 7]
    assert one.locked_by_others(3, 1) == []
    assert other.locked_by_others(4, 4) == [5]


def test_shared_locks_exclude_only_exclusive_ones(path: str) -> None:
    one, other, third = (RangeLocks(path) for _ in range(3))
    assert one.lock(1, shared=True)
    assert other.lock(1, shared=True)
    assert not third.lock(1)
    assert third.locked_by_others(0, 5) == [1]
    one.unlock(1)
    assert not third.lock(1)
    other.unlock(1)
    assert third.lock(1)
    assert not one.lock(1, shared=True)


def test_a_killed_process_releases_its_locks(path: str) -> None:
    kept: list[RangeLocks] = []
    locks = RangeLocks(path)
    with child_that_waits(lambda: kept.append(RangeLocks(path)) or kept[0].lock(5)) as child:
        assert not locks.lock(5)
        os.kill(child, signal.SIGKILL)
        assert locks.lock(5, wait=True)


def test_a_forked_child_keeps_no_lock_of_its_parent(path: str) -> None:
    locks, other = RangeLocks(path), RangeLocks(path)
    locks.lock(5)

    def use() -> None:
        assert locks.fd == -1
        locks.unlock(5)

    with child_that_waits(use):
        assert not other.lock(5)  # the child has not released its parent's lock
        locks.close()
        assert other.lock(5)


def test_a_forked_child_shares_the_locks_of_a_file_that_stays_open_in_children(path: str) -> None:
    locks, other = RangeLocks(path), RangeLocks(path)
    locks.in_children = True
    locks.lock(5)
    locks.lock(6)
    with child_that_waits(lambda: locks.unlock(6)):
        assert other.lock(6)
        locks.close()
        assert not other.lock(5)
    assert other.lock(5)
