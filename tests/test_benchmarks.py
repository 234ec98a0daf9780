"""The benchmark prints the times that it measured, and checks the values that each row reads."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from benchmarks.calls import acts, traced
from benchmarks.ceiling import IN_FLIGHT, Ranges
from benchmarks.harness import CEILING, Timed, interleaved
from benchmarks.peers import NAME
from benchmarks.peers.ours import DECODED, LOADED, ONE_THREAD, READ, TWO_THREADS
from benchmarks.scale import BATCH, RANKS_PER_NODE, indices_of_ranks
from benchmarks.scale import tables as tables_of_scale
from benchmarks.scenarios.dali import NATIVE, NESTED
from benchmarks.scenarios.gpu import AHEAD, CACHED_COPY, PINNED_COPY
from benchmarks.scenarios.reading import MAP_CEILINGS
from benchmarks.workloads import WORKLOADS
from tests.reading.batches import write

ROOT = Path(__file__).parent.parent


def _run(*command: str | Path, **environment: str) -> str:
    """Return the output of a program that starts in the root."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_ceiling_reads_the_tensors(tmp_path: Path, name: str) -> None:
    workload = WORKLOADS[name]
    samples = [workload.sample(index) for index in range(4)]
    write(tmp_path / "%06d.tar", {f"{index:08d}": sample for index, sample in enumerate(samples)}, max_samples=3)
    wrong = [samples[0], samples[1], samples[3], samples[2]]
    for tensor in (None, workload.one[1]):
        with Ranges(tmp_path, 2, tensor) as ranges:
            reads = [
                ranges.read,
                partial(ranges.read, threads=IN_FLIGHT),
                ranges.read_ahead,
                ranges.copy,
                partial(ranges.copy, threads=2),
            ]
            assert [read([3, 0, 2])() for read in reads] == [3] * 5
            ranges.check([3, 0, 2, 1], samples)
            with pytest.raises(AssertionError, match="sample 2"):
                ranges.check([0, 2], wrong)


def test_rounds_run_in_different_orders() -> None:
    ran: list[str] = []
    rows: dict[str, Any] = {name: Timed(lambda name=name: ran.append(name) or 1, 1) for name in "abc"}
    rounds = interleaved({**rows, "d": lambda: ran.append("d") or {", us": 7.0, ", MB": 3.0}}, 5)
    assert {name: len(times) for name, times in rounds.items()} == dict.fromkeys(["a", "b", "c", "d, us", "d, MB"], 5)
    assert rounds["d, MB"] == [3.0] * 5
    orders = [tuple(ran[begin : begin + 4]) for begin in range(0, len(ran), 4)]
    assert len(orders) == 6  # the first one warms up
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) > 2


def test_a_row_reads_as_many_samples_as_it_should() -> None:
    with pytest.raises(AssertionError, match="read 3 samples of 4"):
        interleaved({"a": Timed(lambda: 3, 4)}, 1)


def test_the_way_of_a_batch_is_short(tmp_path: Path) -> None:
    with acts(tmp_path) as found:
        calls = traced(found["read_batch"])
    assert next(iter(calls)).co_name == "read_batch"
    assert calls.total() <= 60


@pytest.mark.long
def test_the_script_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """Its tests are collected and skipped, and a few batches of its benchmarks run and are checked on the CPU."""
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)")
    output = _run(ROOT / "benchmarks" / "gpu.sh", "--dry", tmp_path, PYTHON=sys.executable)
    for folder in (
        "codec/test",
        "dali/test",
        "reading/test_batch",
        "training/test_loader",
        "training/test_transforms",
        "writing/test",
    ):
        assert f"tests/{folder}_gpu.py" in output
    for row in (PINNED_COPY, CACHED_COPY, NESTED, NATIVE, AHEAD):
        assert f"| {row} |" in output
    assert "Missing: none." in output


@pytest.mark.long
def test_two_states_are_compared(tmp_path: Path) -> None:
    """This one with itself; each row checks the values that it reads."""
    chosen = ("--base", ROOT, "--quick", "--only", "1.5 KB x 32")
    output = _run(sys.executable, "-m", "benchmarks.core", *chosen, TMPDIR=str(tmp_path))
    rows = [line.split(" | ") for line in output.splitlines()[2:]]
    assert [row for _, row, *_ in rows] == [
        CEILING,
        *MAP_CEILINGS,
        NAME,
        LOADED,
        ONE_THREAD,
        TWO_THREADS,
        READ,
        DECODED,
    ]
    for _, row, base, now, ratio in rows:
        assert float(now) > 0
        assert base == "-" if row.startswith(CEILING) else len(ratio.partition(" (")[0].split(", ")) == 2


def test_the_page_about_scale_has_the_tables() -> None:
    page = (ROOT / "benchmarks" / "scale.md").read_text()
    for table in tables_of_scale():
        assert table in page, "replace the table in scale.md by that of python -m benchmarks.scale"


def test_simulated_ranks_have_the_samples_of_a_loader(tmp_path: Path) -> None:
    count, world_size = 1200, RANKS_PER_NODE + 1
    write(tmp_path / "%06d.tar", {f"{index:04d}": {"index": index} for index in range(count)})
    with tc.open(tmp_path) as cache:
        for rank in (1, RANKS_PER_NODE):
            options = {"rank": rank, "world_size": world_size, "last_batch": "drop"}
            with tc.Loader(cache, BATCH, shuffle=False, **options) as loader:
                steps = [list(batch["index"]) for batch in loader]
            simulated = [indices_of_ranks(lambda _, at: at, step, world_size, 1) for step in range(4)]
            assert steps == [step[rank - 1].tolist() for step in simulated]
