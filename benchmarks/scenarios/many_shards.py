"""Scenario `many_shards`: time and memory for 10^5 and 10^7 samples in 1,000 shards.

Manifests and indexes are real: ascending keys, all offsets, layouts and digests. So are the bytes of the samples that are
read. The members of all other samples are holes in their files (see `benchmarks.sparse`).

Each row runs in its own process. Its peak memory (resident pages) is counted above the memory before the step: before the
cache is opened for `open, …`, after its indexes were read for all other steps.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.context import Context, Skipped
from benchmarks.sparse import key_of, numbers_read, write_shards
from benchmarks.timing import Rounds

_WORKLOAD = "features"  # the samples are its own, so one run is enough
_ROOT = Path(__file__).parent.parent.parent
_SIZES = {"10^5": (1000, 100), "10^7": (1000, 10_000)}
_QUICK_SIZES = {"10^5": (10, 10), "10^7": (10, 100)}
_BATCH = 256


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
    rows: Rounds = {}
    for size, (num_shards, per_shard) in (_QUICK_SIZES if context.is_quick else _SIZES).items():
        with tempfile.TemporaryDirectory(prefix="many-", dir=context.scratch) as folder:
            write_shards(Path(folder, "cache"), num_shards, per_shard)
            # one round more, not counted: it brings the indexes into the page cache
            rounds = min(3, context.rounds) + 1
            command = [sys.executable, "-m", "benchmarks.scenarios.many_shards", f"{folder}/cache", str(rounds)]
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"many_shards: {done.stderr}")
        for step, found in json.loads(done.stdout).items():
            rows[time_row(size, step)] = [microseconds for microseconds, _ in found[1:]]
            rows[memory_row(size, step)] = [megabytes for _, megabytes in found[1:]]
    return rows


# --- one step in its own process; each returns whether the values are those that were written ---


def _has_schema(cache: Any) -> bool:
    schema = cache.schema
    return list(schema) == ["x"] and schema["x"].num_samples == len(cache) and schema["x"].shape == (8,)


def _has_last_key(cache: Any) -> bool:
    key = key_of(len(cache) - 1)
    return bool(cache[key]["key"] == key)


def _has_batch(cache: Any) -> bool:
    numbers = numbers_read(len(cache))
    batch = cache.read_batch(numbers)
    return batch["x"][:, 0].tolist() == numbers and list(batch["key"]) == list(map(key_of, numbers))


def _has_buckets(cache: Any) -> bool:
    return len(tc.Loader(cache, _BATCH, shuffle=True, bucket_by="x")) == -(-len(cache) // _BATCH)


def _has_keys(cache: Any) -> bool:
    keys = list(cache.keys())
    return len(keys) == len(cache) and keys[-1] == key_of(len(cache) - 1)


def _joins(cache: Any) -> bool:
    joined = tc.join({"a": cache, "b": cache})
    return len(joined) == len(cache) and joined[0]["b"]["key"] == key_of(0)


def _has_schema_shuffled(cache: Any) -> bool:
    view = cache[np.random.default_rng(0).permutation(len(cache))]
    return bool(view.schema["x"].num_samples == len(cache))


def _reads_indexes(cache: Any) -> bool:
    return sum(len(shard.index.keys) for shard in cache._store.shards) == len(cache)


_AFTER_OPEN = {"open": len, "open, first key": _has_last_key, "open, first batch": _has_batch}
_AFTER_INDEXES: dict[str, Callable[[Any], object]] = {
    "schema": _has_schema,
    "first key": _has_last_key,
    "first batch": _has_batch,
    "select": lambda cache: list(cache.select("x").schema) == ["x"],
    "members": lambda cache: cache.members == {},
    "bucket_by": _has_buckets,
    "pickled half slice": lambda cache: len(pickle.loads(pickle.dumps(cache[: len(cache) // 2]))) == len(cache) // 2,
    "list(keys())": _has_keys,
    "join with itself": _joins,
    "schema of a shuffled view": _has_schema_shuffled,
}
_STEPS = {**_AFTER_OPEN, "indexes": _reads_indexes, **_AFTER_INDEXES}


def _resident(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024 / 1e6


def _measure(folder: str, step: str) -> tuple[float, float]:
    """Return the microseconds of a step, and its peak memory in megabytes."""
    cache = None if step in _AFTER_OPEN else tc.open(folder)
    if step in _AFTER_INDEXES:
        _reads_indexes(cache)
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    cache = tc.open(folder) if cache is None else cache
    if not _STEPS[step](cache):
        raise AssertionError(f"{step}: the values read are not those that were written")
    microseconds = (time.perf_counter() - began) * 1e6
    return microseconds, max(0.0, _resident("VmHWM") - before)


def _measure_all(folder: str, rounds: str) -> None:
    """Print `(microseconds, megabytes)` of each step and round, as JSON by step."""
    torch.set_num_threads(1)
    steps = list(_STEPS) * int(rounds)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a new process for each step
        found = pool.map(partial(_measure, folder), steps, chunksize=1)
    print(json.dumps({step: found[number :: len(_STEPS)] for number, step in enumerate(_STEPS)}))


if __name__ == "__main__":
    _measure_all(*sys.argv[1:])
