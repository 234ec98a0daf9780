"""A dataset that records each load, a reader that compares all samples, and a wait for freed memory."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from tests.children import wait_until
from tests.same import assert_same


class Counted:
    """Nested samples of 3 to 118 KB, with differing shapes. Each load appends its index to a file, and takes `seconds`."""

    def __init__(self, log: Path, length: int, seconds: float = 0.0) -> None:
        self.log, self.length, self.seconds = log, length, seconds

    def __len__(self) -> int:
        return self.length

    @staticmethod
    def sample(index: int) -> dict[str, Any]:
        # Hazard: in a forked child, calls that use OpenMP's threads hang. So the tensors are small enough for one thread.
        x = torch.full((50 + 900 * (index % 3), 16), float(index))
        return {"x": x, "nested": [(torch.arange(index % 5).bfloat16(), {"text": "é" * index})], "index": index}

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self.log, "a", encoding="ascii") as log:
            log.write(f"{index}\n")
        time.sleep(self.seconds)
        return self.sample(index)

    def loads(self) -> Counter[int]:
        """Return how often each index was loaded, by all processes."""
        return Counter(map(int, self.log.read_text().split()))


def read_all(shared: tc.SharedDataset, seed: int, epochs: int = 2) -> None:
    """Read every sample of a `Counted` in each epoch, in random order and batches of random length, and compare it."""
    order = random.Random(seed)
    for _ in range(epochs):
        left = order.sample(range(len(shared)), len(shared))
        while left:
            count = order.choice([1, 4, 9])
            some, left = left[:count], left[count:]
            for index, found in zip(some, shared.__getitems__(some), strict=True):
                assert_same(Counted.sample(index), {**found})


def wait_until_empty(directory: Path) -> None:
    """Wait until all shared memory in a folder is freed; fail after 20 s."""
    [base] = directory.iterdir()
    wait_until(lambda: not list(base.iterdir()), timeout_s=20)
