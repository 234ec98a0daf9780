"""Print the tables of docs/benchmarks.md from a `bench.json`: `python -m benchmarks.summary bench_out/bench.json`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.context import CEILING
from benchmarks.peers import LOADED, NAME, READ, VIEWS
from benchmarks.report import Stored, markdown, number, spread
from benchmarks.scenarios.batches import COLD_CEILINGS
from benchmarks.scenarios.dali_cpu import NATIVE, NESTED, PYD_SOURCE, RAW
from benchmarks.scenarios.loaders.worker_handoff import COLLATED, DEFAULT_COLLATED, LAZY, TENSORS, TORCH_LOADER
from benchmarks.scenarios.verifying import READINTO, VERIFIED, VERIFIED_BY_ALL
from benchmarks.scenarios.writing import PLAIN
from benchmarks.timing import Rounds

_WORKLOAD = "diffusion"
_COLUMNS = {
    "iterate_lazy": "in order, no tensor used",
    "iterate_touch": "in order, used",
    "random_get": "random, used",
    "batch_random": "random batch of 32",
    "batch_cold": "the same, cold",
    "one_tensor": "one tensor",
    "write": "write, memory",
    "write_fsync": "write, disk",
}
_BATCHES = ("batch_random", "batch_cold")
# Rows of the table: their titles, the run's row for single samples and for writing, and the run's row for batches.
_Titles = dict[str, tuple[str | None, str | None]]
_COMPARABLE: _Titles = {
    "tensorcache": (NAME, READ),
    "tensorcache, views instead of copies": (VIEWS, None),
    "webdataset `.pyd`": ("webdataset .pyd",) * 2,
    "webdataset `.pth`": ("webdataset .pth",) * 2,
    "webdataset `.npz`": ("webdataset .npz",) * 2,
    "a file each, `.npz`": ("files .npz",) * 2,
    "a file each, `.safetensors`": ("files .safetensors",) * 2,
    "litdata": ("litdata",) * 2,
    "MDS": ("MDS",) * 2,
    "tensordict": ("tensordict",) * 2,
    "tensordict, tuned": ("tensordict, tuned",) * 2,
    "tensordict, tuned, 2 threads": ("tensordict, tuned, 2 threads",) * 2,
    "array_record + pickle": ("array_record + pickle",) * 2,
}
_NOT_DECODED: _Titles = {
    "*tensorcache, small values not decoded*": (None, NAME),
    "*the same, by a `Loader`*": (None, LOADED),
    "*DALI's reader, bytes not decoded*": ("DALI, raw members",) * 2,
    "*the same, files not mapped*": (None, "DALI, raw members, not mapped"),
}
_CEILING = "ceiling: plain `preadv`, `write` of the same bytes"


def _cell(found: Rounds, row: str | None, best: str | None) -> str:
    if row is None or row not in found:
        return ""
    middle, brackets, rest = spread(found[row]).partition(" ")
    return f"**{middle}**{brackets}{rest}" if row == best else f"{middle}{brackets}{rest}"


def _fastest(found: Rounds, rows: list[str]) -> str | None:
    return min((row for row in rows if row in found), key=lambda row: statistics.median(found[row]), default=None)


def _main(results: dict[str, Rounds], stored: Stored) -> str:
    lines = [["450 KB in three fp16 tensors, us/sample", *_COLUMNS.values(), "store, KB"]]
    rows = {**_COMPARABLE, **_NOT_DECODED, _CEILING: (CEILING, CEILING)}
    for title, (single, batched) in rows.items():
        cells = []
        for scenario in _COLUMNS:
            found, in_batches = results.get(scenario, {}), scenario in _BATCHES
            best = _fastest(found, [pair[in_batches] for pair in _COMPARABLE.values() if pair[in_batches]])
            row = batched if in_batches else single
            if row == CEILING:
                row = PLAIN if scenario.startswith("write") else row
                row = _fastest(found, list(COLD_CEILINGS)) if scenario == "batch_cold" else row
            cells.append(_cell(found, row, best))
        nbytes = stored.get(single or "")
        lines.append([title, *cells, number(nbytes / 1000) if nbytes else ""])
    return markdown(lines)


def _small(title: str, found: Rounds, rows: dict[str, str]) -> str:
    return markdown([[title, "us/sample"], *([text, spread(found[row])] for row, text in rows.items() if row in found)])


def tables(content: dict[str, Any]) -> str:
    """Return the markdown tables of a `bench.json`."""
    results, stored = content["us_per_sample"][_WORKLOAD], content["stored_bytes_per_sample"][_WORKLOAD]
    workers = {
        LAZY: "lazy samples, read in the main process",
        COLLATED: "batches by `read_batch` in the workers",
        TORCH_LOADER: "batches by `tc.torch_loader`",
        DEFAULT_COLLATED: "batches by `default_collate` in the workers",
        TENSORS: "samples of tensors, one by one",
    }
    dali = {name: name for name in (NESTED, NATIVE, RAW, PYD_SOURCE)}
    verify = {name: name for name in (READINTO, VERIFIED, VERIFIED_BY_ALL)}
    found = [
        _main(results, stored),
        _small("two `DataLoader` workers", results.get("worker_handoff", {}), workers),
        _small("DALI, nested batches of 32, two threads", results.get("dali_cpu", {}), dali),
        _small("`tc.verify`, in the page cache", results.get("verify", {}), verify),
    ]
    return "\n\n".join(found)


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
