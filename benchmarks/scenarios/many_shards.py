"""Scenario `many_shards`: time and memory for 10^5 and 10^7 samples in 1,000 shards.

Manifests and indexes are real: ascending keys, all offsets, layouts and digests. So are the bytes of the samples that are
read. The members of all other samples are holes in their files (see `benchmarks.sparse`).

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
from benchmarks.workloads import key_of, numbers_read

_WORKLOAD = "features"  # the samples are its own, so one run is enough
_SIZES = {"10^5": (1000, 100), "10^7": (1000, 10_000)}
_QUICK_SIZES = {"10^5": (10, 10), "10^7": (10, 100)}
_BATCH = 256


@contextmanager
def many_shards(context: Context) -> Iterator[Rows]:
    """Measure time and memory of each step, one row for each."""
    if context.workload.name != _WORKLOAD:
        yield {}
        return
    if not Path("/proc/self/clear_refs").exists():
        raise Skipped("the peak of a process's memory is reset through /proc/self/clear_refs, of Linux")
    rows: Rows = {}
    for size, (num_shards, per_shard) in (_QUICK_SIZES if context.is_quick else _SIZES).items():
        folder = context.stores / f"{size} samples"
        if not folder.exists():
            from benchmarks.sparse import write_shards  # which another state of the package may lack

            write_shards(folder, num_shards, per_shard)
        rows |= {f"{size}, {step}": partial(in_new_process, _measure, folder, step) for step in _STEPS}
    yield rows


# --- one step in its own process; each returns whether the values are those that were written ---


def _has_schema(cache: Any) -> bool:
    schema = cache.schema
    return list(schema) == ["x"] and schema["x"].num_samples == len(cache) and schema["x"].shape == (8,)


def _has_last_key(cache: Any) -> bool:
    key = key_of(len(cache) - 1)
    return bool(cache[key]["key"] == key)


def _has_batch(cache: Any) -> bool:
    indices = numbers_read(len(cache))
    batch = cache.read_batch(indices)
    return batch["x"][:, 0].tolist() == indices and list(batch["key"]) == list(map(key_of, indices))


def _has_buckets(cache: Any) -> bool:
    return len(tc.Loader(cache, _BATCH, shuffle=True, bucket_by="x")) == -(-len(cache) // _BATCH)


def _joins(cache: Any) -> bool:
    joined = tc.join({"a": cache, "b": cache})
    return len(joined) == len(cache) and joined[0]["b"]["key"] == key_of(0)


_AFTER_OPEN = {"open": len, "open, first key": _has_last_key, "open, first batch": _has_batch}
_STEPS: dict[str, Callable[[Any], object]] = {
    **_AFTER_OPEN,
    "schema": _has_schema,
    "first key": _has_last_key,
    "bucket_by": _has_buckets,
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
