"""Scenario `many_shards`: time and memory for 10^5 and 10^7 samples in 1,000 shards.

Manifests and indexes are real: ascending keys, all offsets, layouts and digests. So are the bytes of the samples that are
read. The members of all other samples are holes in their files (see `benchmarks.children.sparse`).

Each row runs in its own process. Its peak memory (resident pages) is counted above the memory before the step: before the
cache is opened for `open, …`, after its indexes were read for all other steps.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.children.sparse import write_shards
from benchmarks.context import Context, Skipped
from benchmarks.timing import Rounds
from benchmarks.workloads import WORKLOADS

_WORKLOAD = "features"  # the samples are its own, so one run is enough
_ROOT = Path(__file__).parent.parent.parent
_SIZES = {"10^5": (1000, 100), "10^7": (1000, 10_000)}
_QUICK_SIZES = {"10^5": (10, 10), "10^7": (10, 100)}


def time_row(size: str, step: str) -> str:
    """Return the name of the row with a step's microseconds."""
    return f"{size}, {step}, us"


def memory_row(size: str, step: str) -> str:
    """Return the name of the row with a step's peak memory."""
    return f"{size}, {step}, MB"


def many_shards(context: Context) -> Rounds:
    """Measure time and memory of each step, one row for each."""
    if context.workload.name != _WORKLOAD:
        return {}
    if not Path("/proc/self/clear_refs").exists():
        raise Skipped("the peak of a process's memory is reset through /proc/self/clear_refs, of Linux")
    is_quick = context.workload.count < WORKLOADS[_WORKLOAD].count
    rows: Rounds = {}
    for size, (num_shards, per_shard) in (_QUICK_SIZES if is_quick else _SIZES).items():
        folder = Path(tempfile.mkdtemp(prefix="many-", dir=context.scratch))
        try:
            write_shards(folder / "cache", num_shards, per_shard)
            # one round more, not counted: it brings the indexes into the page cache
            for step, found in _measure(folder / "cache", min(3, context.rounds) + 1).items():
                rows[time_row(size, step)] = [microseconds for microseconds, _ in found[1:]]
                rows[memory_row(size, step)] = [megabytes for _, megabytes in found[1:]]
        finally:
            shutil.rmtree(folder)
    return rows


def _measure(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds and megabytes of each step in each round, with the samples checked."""
    command = [sys.executable, "-m", "benchmarks.children.sparse", str(folder), str(rounds)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"many_shards: {done.stderr}")
    measured: dict[str, list[tuple[float, float]]] = json.loads(done.stdout)
    return measured
