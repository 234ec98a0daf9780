"""Processes that are killed at random leave neither wrong samples nor memory."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import finish, start
from tests.sharing.datasets import Counted, read_all, wait_until_empty

pytestmark = pytest.mark.long


@pytest.mark.parametrize("options", [{}, {"max_nbytes": 1_000_000}])
def test_killed_loaders_waiters_and_last_holders(tmp_path: Path, options: dict[str, Any]) -> None:
    chance = random.Random(len(options))
    directory = tmp_path / "shared"
    directory.mkdir()
    for number in range(50):  # 100 rounds in all
        counted = Counted(tmp_path / f"log{number}", 40, chance.choice([0, 0.001]))

        def work(seed: int, counted: Counted = counted) -> None:
            read_all(tc.SharedDataset(counted, "killed", directory=directory, **options), seed, 1)

        children = [start(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
        time.sleep(chance.random() * 0.1)
        for child in chance.sample(children, chance.choice([1, 2, 4])):
            os.kill(child, signal.SIGKILL)
            time.sleep(chance.random() * 0.01)
        assert set(finish(children)) <= {0, -signal.SIGKILL}
        wait_until_empty(directory)
