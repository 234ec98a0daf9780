"""Writers that were killed, forked by C code, or met files that other programs have changed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.same import assert_same

NUMELS = [10, 1_000_000, 20, 1_000_000, 1_250_000]  # bytes
SAMPLES = [{"x": torch.full((numel,), i, dtype=torch.uint8)} for i, numel in enumerate(NUMELS)]


def folder_of(directory: Path, name: str) -> Path:
    return directory / f"wds_tensorcache-{os.geteuid()}" / name


# A segment has 1/16 of the limit. So the killed writer is in a new one, or in that of sample 0, which has no room for the next.
@pytest.mark.parametrize(("max_nbytes", "following"), [(1_100_000, 2), (20_000_000, 4)])
def test_the_next_writer_uses_what_a_killed_writer_had_reserved(
    directory: Path, max_nbytes: int, following: int
) -> None:
    def work() -> None:
        def kill(event: str, args: Any) -> None:
            if event == "open" and str(args[0]).startswith("segment-") and shared.stats().nbytes > 1_000_000:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        shared[1]

    with tc.SharedDataset(SAMPLES, "killed", directory=directory, max_nbytes=max_nbytes) as shared:
        shared[0]
        assert run_in_child(work) == -signal.SIGKILL
        reserved = shared.stats().nbytes
        assert_same(SAMPLES[following], shared[following])
        assert 1_000_000 < reserved <= (in_use := shared.stats().nbytes) < reserved + NUMELS[following] + 50_000
        assert_same(SAMPLES[3], shared[3])
        assert shared.stats().nbytes == in_use
        assert (shared.stats().num_samples, shared.stats().passed_through) == (3, 0)


def test_segments_that_other_users_may_read_are_refused(directory: Path) -> None:
    with tc.SharedDataset(SAMPLES, "owned", directory=directory) as shared:
        shared[0]
        (folder_of(directory, "owned") / "segment-1").chmod(0o644)
        assert_same(SAMPLES[0], shared[0])  # mapped before
        refused = pytest.raises(PermissionError, match="segment-1 has owner .*this user alone")
        with tc.SharedDataset(SAMPLES, "owned", directory=directory) as other, refused:
            other[0]
