"""Shards that are written and read while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = """
import atexit, threading, torch
import wds_tensorcache as tc

def work(at):
    with tc.ShardWriter(f"w{at}", max_samples=10) as sink:
        for i in range(25):
            sink.write(f"{i:03d}", {"x": torch.full((30_000,), i)})
    with tc.open(f"w{at}", num_threads=2) as cache:
        print(sum(int(row[-1]) for batch in tc.Loader(cache, 16) for row in batch["x"]))
    with tc.build(range(40), lambda items: [{"x": i} for i in items], f"b{at}", fingerprint={}) as cache:
        print([sample["x"] for sample in cache] == list(range(40)))

atexit.register(work, 0)
threading.Thread(target=work, args=(1,)).start()
"""


def test_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Threads and functions of `atexit` write and read all samples."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (2 * "300\nTrue\n", "")
