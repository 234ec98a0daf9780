"""A worker that is killed during a write or a read loses and doubles nothing; `python -m tests.ray_kills` does it often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Seeded
from tests.ray_kills import write_and_read

pytestmark = pytest.mark.long


def test_killed_workers(tmp_path: Path, rng: Seeded) -> None:
    writes, reads = write_and_read(tmp_path, 1, rng.seed_value)
    assert writes >= 1
    assert reads >= 1
