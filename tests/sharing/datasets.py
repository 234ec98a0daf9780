"""A dataset that records each load, and readers that compare what they read."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.same import assert_same
from wds_tensorcache.sharing.dataset import SharedDataset

__all__ = ["Counted", "read_all", "wait_until_empty"]


class Counted:
    """Nested samples of differing shapes; every load appends its index to a file."""

    def __init__(self, log: Path, length: int, seconds: float = 0.0) -> None:
        self.log, self.length, self.seconds = log, length, seconds

    def __len__(self) -> int:
        return self.length

    @staticmethod
    def sample(index: int) -> dict[str, Any]:
        # small enough for one thread: those of OpenMP hang in a forked child
        x = torch.full((50 + 900 * (index % 3), 16), float(index))  # samples of 3 to 118 KB
        return {"x": x, "nested": [(torch.arange(index % 5).bfloat16(), {"text": "é" * index})], "index": index}

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self.log, "a", encoding="ascii") as log:
            log.write(f"{index}\n")
        time.sleep(self.seconds)
        return self.sample(index)

    def loads(self) -> Counter[int]:
        return Counter(map(int, self.log.read_text().split()))


def read_all(shared: SharedDataset, seed: int, epochs: int = 2) -> None:
    """Read every sample in a random order, one or several at a time, and compare it."""
    order = random.Random(seed)
    for _ in range(epochs):
        left = order.sample(range(len(shared)), len(shared))
        while left:
            count = order.choice([1, 4, 9])
            some, left = left[:count], left[count:]
            for index, found in zip(some, shared.__getitems__(some), strict=True):
                assert_same(Counted.sample(index), {**found})


def wait_until_empty(directory: Path) -> None:
    """Wait until all shared memory in a folder is freed."""
    [base] = directory.iterdir()
    deadline = time.monotonic() + 20
    while list(base.iterdir()):
        assert time.monotonic() < deadline, list(base.iterdir())
        time.sleep(0.002)
