"""Scenario `many_shards`: time and memory for 10^7 samples in 1,000 shards, whose manifests and indexes are real.

Each row runs in its own process. Its peak memory (resident pages) is counted above the memory before the step: before the
cache is opened for `open, …`, after its indexes were read for all other steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows, Skipped, in_new_process


@contextmanager
def many_shards(context: Context) -> Iterator[Rows]:
    """Measure time and memory of each step, one row for each."""
    if not Path("/proc/self/clear_refs").exists():
        raise Skipped("the peak of a process's memory is reset through /proc/self/clear_refs, of Linux")
    folder = context.stores / "10^7 samples"
    if not folder.exists():
        from benchmarks.sparse import write_shards  # which another state of the package may lack

        write_shards(folder, *((10, 100) if context.is_quick else (1000, 10_000)))
    yield {f"10^7, {step}": partial(in_new_process, _measure, folder, step) for step in _STEPS}


# --- one step in its own process; each returns whether the values are those that were written ---


def _has_schema(cache: Any) -> bool:
    schema = cache.schema
    return list(schema) == ["x"] and schema["x"].num_samples == len(cache) and schema["x"].shape == (8,)


def _has_last_key(cache: Any) -> bool:
    key = f"{len(cache) - 1:08d}"
    return bool(cache[key]["key"] == key)


def _joins(cache: Any) -> bool:
    joined = tc.join({"a": cache, "b": cache})
    return len(joined) == len(cache) and joined[0]["b"]["key"] == "00000000"


_AFTER_OPEN = {"open": len, "open, first key": _has_last_key}
_STEPS: dict[str, Callable[[Any], object]] = {
    **_AFTER_OPEN,
    "schema": _has_schema,
    "first key": _has_last_key,
    "join with itself": _joins,
}


def _resident(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024 / 1e6


def _measure(folder: Path, step: str) -> dict[str, float]:
    """Return the microseconds of a step, and its peak memory in megabytes."""
    torch.set_num_threads(1)
    cache = None if step in _AFTER_OPEN else tc.open(folder)
    if cache is not None and cache.members:  # which reads all indexes
        raise AssertionError(f"{step}: members outside of caches")
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    cache = tc.open(folder) if cache is None else cache
    if not _STEPS[step](cache):
        raise AssertionError(f"{step}: the values read are not those that were written")
    microseconds = (time.perf_counter() - began) * 1e6
    return {", us": microseconds, ", MB": max(0.0, _resident("VmHWM") - before)}
