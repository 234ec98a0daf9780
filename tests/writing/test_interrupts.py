"""Ctrl-C while shards are written: the finished ones stay, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import wds_tensorcache as tc

pytestmark = pytest.mark.long

_BUILD = """
import os, signal, sys, time
import torch
import wds_tensorcache as tc
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
def wait(i):
    if i == 12:
        print("here", flush=True)
        while True:
            time.sleep(0.01)  # `signal.pause` would miss a signal that arrives just before it
    return {"x": torch.full((300_000,), i)}
options = {"batch_size": 2, "max_samples": 5, "fingerprint": {}}
tc.build(range(23), lambda items: [wait(i) for i in items], sys.argv[1], **options)
"""


def test_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILD, str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "here\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "KeyboardInterrupt" in errors
    assert "Exception ignored" not in errors
    assert running.returncode == -signal.SIGINT
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert tc.verify(tmp_path).ok
    with tc.open(tmp_path) as cache:
        assert len(cache) >= 10
        for i in range(len(cache)):
            assert cache[i]["x"].load().unique().tolist() == [i]


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
