"""A forked child keeps no lock of its parent; tests/sharing shows the other properties of locks on byte ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.children import run_in_child
from wds_tensorcache.storage.locks import CAN_LOCK_RANGES, RangeLocks


@pytest.mark.skipif(not CAN_LOCK_RANGES, reason="only Linux has locks that belong to open files")
def test_a_forked_child_does_not_release_a_lock_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks, other = RangeLocks(str(path)), RangeLocks(str(path))
    locks.lock(5)

    def unlock() -> None:
        assert locks.fd == -1
        locks.unlock(5)

    assert run_in_child(unlock) == 0
    assert not other.lock(5)
    locks.close()
    assert other.lock(5)
