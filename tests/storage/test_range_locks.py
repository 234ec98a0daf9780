"""A forked child keeps no lock of its parent; tests/sharing shows the other properties of locks on byte ranges."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.children import finish, start
from wds_tensorcache.storage.locks import CAN_LOCK_RANGES, RangeLocks


@pytest.mark.skipif(not CAN_LOCK_RANGES, reason="only Linux has locks that belong to open files")
def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks, other = RangeLocks(str(path)), RangeLocks(str(path))
    locks.lock(5)
    ready, gate = os.pipe(), os.pipe()

    def use() -> None:
        os.close(gate[1])
        assert locks.fd == -1
        locks.unlock(5)
        os.write(ready[1], b"x")
        os.read(gate[0], 1)

    child = start(use)
    try:
        assert os.read(ready[0], 1) == b"x"
        assert not other.lock(5)  # the child has not released its parent's lock
        locks.close()
        assert other.lock(5)
    finally:
        os.close(gate[1])
        assert finish([child]) == [0]
