"""A writer that its program never closes: what is lost is said in the log, which Python shows by default."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc


def test_at_the_end_of_a_program(tmp_path: Path) -> None:
    program = (
        "import wds_tensorcache as tc\n"
        "writer = tc.ShardWriter('cache', max_samples=2, fsync=False)\n"
        "for i in range(5): writer.write(f'{i}', [i])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == (
        "cache/%06d.tar: the writer was not closed, so unfinished shards with 1 sample are lost; write inside "
        "`with tc.ShardWriter(…) as writer:`, or call close()\n"
    )
    assert sorted(os.listdir(tmp_path / "cache")) == [
        "000000.idx",
        "000000.tar",
        "000001.idx",
        "000001.tar",
        "manifest.json",
    ]


def test_when_it_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = tc.ShardWriter(tmp_path / "%d.tar", fsync=False)
    for i in range(3):
        writer.write(f"{i}", {"x": torch.ones(2)})
    del writer
    gc.collect()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("wds_tensorcache", logging.WARNING)
    assert "%d.tar: the writer was not closed, so unfinished shards with 3 samples are lost" in record.message
    assert os.listdir(tmp_path) == []


def test_nothing_is_said_if_nothing_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tc.ShardWriter(tmp_path / "empty", fsync=False)
    with tc.ShardWriter(tmp_path / "closed", fsync=False) as writer:
        writer.write("a", [1])
    del writer
    gc.collect()
    assert not caplog.records
