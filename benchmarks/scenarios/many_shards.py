"""Scenario `many_shards`: time and memory for 10^7 samples in 1,000 shards, whose manifests and indexes are real.

Each row runs in its own process. Its peak memory (resident pages) is counted above the memory before the step: before the
cache is opened for `open, …`, after its indexes were read for all other steps.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows, in_new_process, memory_mb, require

_STEPS = ("open", "open, first key", "schema", "first key", "join with itself")


def many_shards(context: Context) -> Rows:
    """Measure time and memory of each step, one row for each."""
    folder = context.stores / "10^7 samples"
    if not folder.exists():
        write_shards(folder, *((10, 100) if context.is_quick else (1000, 10_000)))
    return {f"10^7, {step}": partial(in_new_process, _measure, folder, step) for step in _STEPS}


def write_shards(folder: Path, num_shards: int, per_shard: int) -> None:
    """Write `num_shards` shards of `per_shard` samples each, and their manifest.

    `ShardWriter` writes the first and the last shard. All other shards have the first one's index with their own keys, and
    holes in place of members. A sample holds its key, and its index in a tensor `x` of 32 bytes.
    """
    # Another state of the package, which `benchmarks.core` compares, may lack these.
    from wds_tensorcache.shards.footer import build_footer
    from wds_tensorcache.shards.key_table import Keys
    from wds_tensorcache.shards.load_index import load_index
    from wds_tensorcache.shards.manifest import Manifest, ShardEntry
    from wds_tensorcache.storage.files import ShardFile

    folder.mkdir(parents=True)
    paths = [folder / f"{shard:06d}.tar" for shard in range(num_shards)]
    for shard in (0, num_shards - 1):
        with tc.ShardWriter(paths[shard], manifest=False, dali_index=False, fsync=False) as writer:
            for index in range(shard * per_shard, (shard + 1) * per_shard):
                key = f"{index:08d}"
                writer.write(key, {"x": torch.full((8,), index, dtype=torch.int32), "key": key})
    first = load_index(ShardFile(str(paths[0])))
    for shard in range(1, num_shards - 1):
        text = "".join(f"{index:08d}" for index in range(shard * per_shard, (shard + 1) * per_shard))
        keys = Keys(np.frombuffer(text.encode(), np.uint8), first.keys.ends)
        with paths[shard].open("wb") as file:
            file.seek(first.end + 1024)
            file.write(build_footer(replace(first, keys=keys)))
    entries = {path.name: ShardEntry(path.name, per_shard, path.stat().st_size) for path in paths}
    counts = {name: {"": per_shard} for name in entries}
    (folder / "manifest.json").write_bytes(Manifest(entries, counts).build())


def _run(step: str, cache: Any) -> bool:
    """Run a step; return whether its values are those that were written."""
    if step == "open":
        return len(cache) > 0
    if step == "schema":
        schema = cache.schema
        return list(schema) == ["x"] and schema["x"].num_samples == len(cache) and schema["x"].shape == (8,)
    if step == "join with itself":
        joined = tc.join({"a": cache, "b": cache})
        return len(joined) == len(cache) and joined[0]["b"]["key"] == "00000000"
    key = f"{len(cache) - 1:08d}"
    return cache[key]["key"] == key


def _measure(folder: Path, step: str) -> dict[str, float]:
    """Return the microseconds of a step in a new process, and its peak memory in megabytes."""
    torch.set_num_threads(1)
    cache = None if step.startswith("open") else tc.open(folder)
    require(cache is None or not cache.members, step, "members outside of caches")  # which reads all indexes
    gc.collect()
    before = memory_mb("self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    cache = tc.open(folder) if cache is None else cache
    is_right = _run(step, cache)
    microseconds = (time.perf_counter() - began) * 1e6
    peak = memory_mb("self/status", "VmHWM")
    require(is_right, step)
    return {", us": microseconds, ", MB": max(0.0, peak - before)}
