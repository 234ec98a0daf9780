"""Run the scenarios: a markdown table of medians and of ratios within a round, and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import wds_decode
from benchmarks.timing import Rounds, ratio


def _machine() -> dict[str, Any]:
    packages = ("torch", "numpy", "safetensors", "webdataset", "xxhash")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in packages},
        "commit": commit.stdout.strip() or None,
    }


def _table(title: str, rounds: Rounds, base: str) -> str:
    rows = [f"| {name} | {statistics.median(rounds[name]):.0f} | {ratio(rounds, name, base):.2f} |" for name in rounds]
    return "\n".join([f"| {title} | us/sample | / {base} |", "|---|---|---|", *rows])


def main() -> None:
    """Entry point of `make bench`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=400, help="samples of 450 KB in each shard (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the shards go; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = wds_decode.run(Path(folder), options.samples, options.rounds)
    machine = _machine()
    print(_table("wds_decode", result, ".pyd, touched"))
    goals = {
        ("tensorcache, lazy", "raw members"): 1.15,
        ("tensorcache, eager", ".pyd"): 0.6,
        ("tensorcache, eager, touched", ".pyd, touched"): 0.6,
    }
    print()
    for (name, base), goal in goals.items():
        print(f"{name} / {base}: {ratio(result, name, base):.3f} (goal: at most {goal})")
    print(f"{options.samples} samples, {options.rounds} rounds, {machine}")
    if options.json:
        options.json.write_text(json.dumps({"wds_decode": result, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
