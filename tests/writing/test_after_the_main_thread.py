"""Writers, builds and loaders in threads and in functions of `atexit`, after the main thread has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, torch
import wds_tensorcache as tc

def work():
    with tc.ShardWriter("w", max_samples=10) as sink:
        for i in range(25):
            sink.write(f"{i:03d}", {"x": torch.full((30_000,), i)})
    with tc.open("w", num_threads=2) as cache:
        print(sum(int(row[-1]) for batch in tc.Loader(cache, 16) for row in batch["x"]))
    with tc.build(range(40), lambda items: [{"x": i} for i in items], "b", fingerprint={}) as cache:
        print([sample["x"] for sample in cache] == list(range(40)))

threading.Thread(target=work).start() if sys.argv[1] == "thread" else atexit.register(work)
"""


@pytest.mark.parametrize("kind", ["thread", "atexit"])
def test_all_samples_are_there(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, kind], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("300\nTrue\n", "")
