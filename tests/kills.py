"""Kill writers at random, let other writers resume, and look at what is there each time."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.same import assert_same

COUNT = 23
STEPS = ("mkdir", "link", "replace", "rename", "remove", "unlink", "rmdir", "fsync", "writev")  # what changes a disk


def sample(i: int) -> dict[str, Any]:
    # small enough for one thread: those of OpenMP hang in a forked child
    return {"x": torch.full((50 + 1500 * (i % 3), 8), i).bfloat16(), "i": i, "text": "é" * i}


def check(folder: Path) -> list[str]:
    """Assert that all the manifest lists is there and right, and return the keys."""
    if not (folder / "manifest.json").exists():
        return []
    for shard in json.loads((folder / "manifest.json").read_text())["shardlist"]:
        assert os.path.getsize(folder / shard["url"]) == shard["filesize"]
    with tc.open(folder) as cache:
        keys = list(cache.keys())
        for key in keys:
            assert_same(sample(int(key)), tc.realize(cache[key]))
    return keys


def compare(folder: Path, expected: Path) -> None:
    """Assert that two folders have the same files."""
    assert sorted(os.listdir(folder)) == sorted(os.listdir(expected))
    for name in os.listdir(expected):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def is_killed(work: Callable[[], Any], kill_after_s: float | None = None) -> bool:
    """Return whether work in a child was killed, by itself or after some seconds."""
    code = run_in_child(work, kill_after_s)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def stop_at(step: int, steps: tuple[str, ...] = STEPS) -> None:
    """Let this process be killed instead of its `step`-th call that changes a disk."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def stop_or_call(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **options)

        return stop_or_call

    for name in steps:
        setattr(os, name, counted(getattr(os, name)))


def _write(folder: Path) -> None:
    with tc.ShardWriter(folder / "%03d.tar", max_samples=5, resume=True, fsync=False) as sink:
        for i in range(COUNT):
            sink.write(f"{i:03d}", sample(i))


def write_until_killed(folder: Path, num_kills: int, seed: int) -> tuple[int, int]:
    """Kill `num_kills` writers, each of which resumes after the last one.

    Return how often all samples were written, and how many writers were killed after a shard was finished.
    """
    chance, whole, num_late = random.Random(seed), 0, 0
    begun = time.perf_counter()
    _write(folder / "expected")
    longest = time.perf_counter() - begun
    while num_kills > 0:
        into, keys = folder / f"{whole}", list[str]()
        while is_killed(lambda: _write(into), chance.uniform(0, longest)):  # noqa: B023 called here
            num_kills -= 1
            longest *= 1.02  # so that it ends on a machine that has become busy
            if into.exists():
                found = check(into)
                assert found[: len(keys)] == keys  # what was finished stays
                assert len(found) % 5 == 0 or len(found) == COUNT
                keys = found
                num_late += bool(keys)
        compare(into, folder / "expected")
        longest *= 0.8
        whole += 1
    return whole, num_late


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as made:
        times, num_late = write_until_killed(Path(made), kills, seed=random.randrange(1 << 30))
    print(f"{kills} writers killed, {num_late} of them after the first shard was finished")
    print(f"{times} times all {COUNT} samples were written in the end, byte for byte the same")
