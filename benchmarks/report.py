"""Results of a run: markdown tables of medians (least..most), and a description of the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.harness import CEILING, Rounds
from benchmarks.workloads import Workload

_PACKAGES = (
    *("torch", "numpy", "safetensors", "webdataset", "xxhash", "litdata", "mosaicml-streaming", "tensordict"),
    *("array_record", "nvidia-dali-cuda130", "obstore", "urllib3", "datasets"),
)
_BY_PEERS = (  # scenarios whose rows are the peers; each other one has a table of its own
    *("batch_cold", "write", "write_fsync", "open", "iterate_lazy", "iterate_touch"),
    *("random_get", "batch_random", "one_tensor"),
)


def machine_line() -> str:
    """Return the properties of the machine and the versions that the figures depend on."""
    installed = {str(package.metadata["Name"]): package.version for package in distributions()}
    packages = ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in _PACKAGES)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processors = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    describe = "git describe --always --dirty --exclude '*'"  # by a shell, since git may not be installed
    commit = subprocess.run(describe, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    return (
        f"{next(processors, platform.machine())}, {len(os.sched_getaffinity(0))} cores, {memory} GB; {platform.platform()}; "
        f"Python {platform.python_version()}, {packages}; commit {commit.strip()}."
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(times: list[float]) -> str:
    middle = _number(statistics.median(times))
    return middle if len(times) == 1 else f"{middle} ({_number(min(times))}..{_number(max(times))})"


def markdown(lines: list[list[str]]) -> str:
    """Return a markdown table; the first line is its head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rest])


def tables(workload: Workload, results: dict[str, Rounds], stored: dict[str, float]) -> Iterator[str]:
    """Yield a workload's markdown tables: peers by scenarios, then each scenario that has other rows."""
    by_peers = [name for name in _BY_PEERS if name in results]
    rows = dict.fromkeys(row for name in by_peers for row in results[name])
    if by_peers:
        lines = [[f"{workload.title}, us/sample", *by_peers, "store, KB/sample"]]
        for row in sorted(rows, key=lambda row: not row.startswith(CEILING)):  # stable: ceilings first
            cells = [_spread(results[name][row]) if row in results[name] else "-" for name in by_peers]
            lines.append([row, *cells, _number(stored[row] / 1000) if row in stored else "-"])
        yield markdown(lines)
    for name, rounds in results.items():
        if rounds and name not in _BY_PEERS:
            unit = "us/sample, or MB" if any(row.endswith("MB") for row in rounds) else "us/sample"
            yield markdown([[f"{name}, {workload.name}", unit], *([row, _spread(rounds[row])] for row in rounds)])
