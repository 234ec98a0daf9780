"""Results of a run: markdown tables of medians (least..most), a plot, JSON, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.goals import Outcome
from benchmarks.peers.base import Peer
from benchmarks.timing import Rounds, median
from benchmarks.workloads import Workload

_COLORS = {"ceiling": "#9e9e9e", "tensorcache": "#d1495b", "lazy": "#d1495b"}
_PEERS = "#30638e"

Results = dict[str, dict[str, Rounds]]  # by workload, by scenario
Stored = dict[str, float]  # bytes per sample of each store, by peer

_PACKAGES = (
    *("torch", "numpy", "safetensors", "webdataset", "xxhash", "litdata", "mosaicml-streaming", "tensordict"),
    *("array_record", "nvidia-dali-cuda130", "matplotlib", "obstore", "urllib3", "datasets"),
)
_OWN_ROWS = (
    "import",
    "wds_decode",
    "worker_handoff",
    "loader",
    "verify",
    "many_shards",
    "shared",
    "remote",
    "dali_cpu",
    "dali_gpu",
    "loader_gpu",
)  # scenarios whose rows are not the peers


def machine() -> dict[str, Any]:
    """Return the properties of the machine and the versions that the figures depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "packages": versions,
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),  # the tree differs from the commit
    }


def machine_line() -> str:
    """Return the machine's description as one line of text."""
    found = machine()
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    commit = f"{found['commit']}{' and changes' if found['changed'] else ''}"
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_gb']} GB; {found['system']}; "
        f"Python {found['python']}, {packages}; commit {commit}."
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def number(value: float) -> str:
    """Return microseconds as text, with significant digits alone."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(times: list[float]) -> str:
    """Return the median of some rounds with the least and the most."""
    middle = number(statistics.median(times))
    return middle if len(times) == 1 else f"{middle} ({number(min(times))}..{number(max(times))})"


def markdown(lines: list[list[str]]) -> str:
    """Return a markdown table; the first line is its head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rest])


def table(workload: Workload, found: dict[str, Rounds], stored: Stored) -> str:
    """Return a workload's markdown tables: peers by scenarios, then each scenario that has other rows."""
    shared = [name for name in found if name not in _OWN_ROWS]
    names = list(dict.fromkeys(row for name in shared for row in found[name]))
    names.sort(key=lambda name: not name.startswith("ceiling"))  # stable: ceilings first
    lines = [[f"{workload.title}, us/sample", *shared, "store, KB/sample"]]
    for row in names:
        nbytes = number(stored[row] / 1000) if row in stored else "-"
        lines.append([row, *(spread(found[s][row]) if row in found[s] else "-" for s in shared), nbytes])
    tables = [markdown(lines)] if shared else []
    for name in _OWN_ROWS:
        if found.get(name):
            body = [[row, spread(found[name][row])] for row in found[name]]
            has_memory = any(row.endswith("MB") for row in found[name])
            title, unit = f"{name}, {workload.name}", "us/sample, or MB" if has_memory else "us/sample"
            tables.append(markdown([[title, unit], *body]))
    return "\n\n".join(tables)


def notes(workload: Workload, peers: list[Peer]) -> list[str]:
    """Return a line that names conversions which users of some peers need; their rows include the cost."""
    done = []
    for peer in peers:
        if peer.bf16 and torch.bfloat16 in workload.dtypes.values():
            done.append(f"{peer.name}: bf16 {peer.bf16}")
        if peer.ragged and workload.ragged:
            done.append(f"{peer.name}: {peer.ragged}")
    return ["; ".join(done) + "."] if done else []


def goal_table(outcomes: list[Outcome]) -> str:
    """Return the goals as a markdown table."""
    words = {True: "reached", False: "**not reached**", None: "not measured"}
    lines = [["workload", "scenario", "goal", "found", ""]]
    for outcome in outcomes:
        value = "-" if outcome.value is None else f"{outcome.value:.3g} ({outcome.least:.3g}..{outcome.most:.3g})"
        lines.append([outcome.workload, outcome.scenario, outcome.goal, value, words[outcome.reached]])
    return markdown(lines)


def write_json(
    path: Path,
    results: Results,
    stored: dict[str, Stored],
    outcomes: list[Outcome],
    missing: dict[str, str],
    options: dict[str, Any],
) -> None:
    """Write all measured figures, round by round, with the options and the machine."""
    content = {
        "machine": machine(),
        "options": options,
        "missing": missing,
        "goals": [asdict(outcome) for outcome in outcomes],
        "us_per_sample": results,
        "stored_bytes_per_sample": stored,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def draw_plot(path: Path, results: Results) -> None:
    """Draw medians: a column for each workload, a row for each scenario, bars sorted, faster above.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    scenarios = list(dict.fromkeys(scenario for found in results.values() for scenario in found))
    heights = [max(len(found.get(scenario, ())) for found in results.values()) + 1.5 for scenario in scenarios]
    figure, axes = plt.subplots(
        len(scenarios),
        len(results),
        figsize=(6.5 * len(results), 0.19 * sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, scenario in enumerate(scenarios):
        for column, (workload, found) in enumerate(results.items()):
            panel = axes[row][column]
            if not found.get(scenario):
                panel.axis("off")
                continue
            medians = sorted(((median(found[scenario], name), name) for name in found[scenario]), reverse=True)
            colors = [_COLORS.get(name.split(",")[0].split(" ")[0], _PEERS) for _, name in medians]
            bars = panel.barh([name for _, name in medians], [value for value, _ in medians], color=colors)
            panel.bar_label(bars, [number(value) for value, _ in medians], padding=2, fontsize=6)
            panel.set_xscale("log")
            panel.set_xlim(medians[-1][0] / 2, medians[0][0] * 2)
            panel.xaxis.set_visible(False)  # the bars are labeled
            panel.tick_params(labelsize=6)
            panel.set_title(f"{scenario}, {workload}: us/{'store' if scenario == 'open' else 'sample'}", fontsize=8)
            panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
