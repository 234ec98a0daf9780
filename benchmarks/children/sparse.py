"""Write many shards with complete indexes, where only the samples that are read have bytes; and measure steps on them.

Run as a program, it measures opening such shards and the first uses of the cache, each in a process forked from this one.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import ShardEntry, write_manifest
from wds_tensorcache.storage.files import ShardFile

_MANIFEST_VERSION = 1
_BATCH = 256


def key_of(number: int) -> str:
    """Return the key of sample `number`, counted through all shards. Keys ascend."""
    return f"{number:08d}"


def sample_of(number: int) -> Any:
    """Return sample `number`, which contains its number in a tensor of 32 bytes."""
    return {"x": torch.full((8,), number, dtype=torch.int32), "key": key_of(number)}


def numbers_read(count: int) -> list[int]:
    """Return the numbers of the samples that have bytes: random ones, the first and the last."""
    return [0, count - 1, *random.Random(0).sample(range(1, count - 1), min(_BATCH, count) - 2)]


def write_shards(folder: Path, num_shards: int, per_shard: int) -> None:
    """Write `num_shards` shards of `per_shard` samples each, and their manifest.

    Every index is complete and as `ShardWriter` makes it: offsets, layouts and keys of all samples. `ShardWriter` writes the
    first shard. The other shards are files of the same length with holes, where only the samples that are read
    (`numbers_read`) have headers, skeletons and tensors as `ShardWriter` writes them.
    """
    folder.mkdir(parents=True)
    size = _write(folder / "000000.tar", range(per_shard))
    whole = load_index(ShardFile(str(folder / "000000.tar")))
    columns = whole.caches[""]
    sample_nbytes = whole.end // per_shard
    if sample_nbytes * per_shard != whole.end or columns.skeleton_begin.dtype != columns.tensors_begin.dtype:
        raise AssertionError("samples of different lengths")
    real: dict[int, list[int]] = {}
    for number in numbers_read(num_shards * per_shard):
        real.setdefault(number // per_shard, []).append(number)
    entries = [ShardEntry("000000.tar", per_shard, size)]
    for shard in range(1, num_shards):
        path = folder / f"{shard:06d}.tar"
        first = shard * per_shard
        digest = columns.digest.copy()
        with path.open("wb") as file:
            for number in real.get(shard, []):
                content, digest[number - first] = _one(folder, number, sample_nbytes)
                file.seek((number - first) * sample_nbytes)
                file.write(content)
            file.truncate(whole.end + 1024)
            file.seek(whole.end + 1024)
            file.write(build_footer(_index(whole, columns, range(first, first + per_shard), digest)))
            entries.append(ShardEntry(path.name, per_shard, file.tell()))
    counts = {entry.url: {"": per_shard} for entry in entries}
    write_manifest(
        str(folder / "manifest.json"), entries, {"version": _MANIFEST_VERSION, "caches": counts}, fsync=False
    )


def _write(path: Path, numbers: range) -> int:
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as writer:
        for number in numbers:
            writer.write(key_of(number), sample_of(number))
    return path.stat().st_size


def _one(folder: Path, number: int, nbytes: int) -> tuple[bytes, int]:
    """Return the members of one sample with their tar headers, and its digest."""
    path = folder / ".one.tar"
    _write(path, range(number, number + 1))
    index, content = load_index(ShardFile(str(path))), path.read_bytes()
    path.unlink()
    if index.end != nbytes:
        raise AssertionError("samples of different lengths")
    return content[:nbytes], index.caches[""].digest.item(0)


def _index(whole: ShardIndex, columns: CacheColumns, numbers: range, digest: Any) -> ShardIndex:
    text = np.frombuffer("".join(map(key_of, numbers)).encode(), np.uint8)
    return replace(whole, keys=Keys(text, whole.keys.ends), caches={"": replace(columns, digest=digest)})


# --- one step in its own process ---


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(f"{what}: the values read are not those that were written")


def _schema(cache: Any) -> None:
    schema = cache.schema
    _expect(list(schema) == ["x"] and schema["x"].num_samples == len(cache) and schema["x"].shape == (8,), "schema")


def _first_key(cache: Any) -> None:
    last = len(cache) - 1
    _expect(cache[key_of(last)]["key"] == key_of(last), "first key")


def _first_batch(cache: Any) -> None:
    numbers = numbers_read(len(cache))
    batch = cache.read_batch(numbers)
    _expect(batch["x"][:, 0].tolist() == numbers and list(batch["key"]) == list(map(key_of, numbers)), "first batch")


def _bucket_by(cache: Any) -> None:
    loader = tc.Loader(cache, _BATCH, shuffle=True, bucket_by="x")
    _expect(len(loader) == -(-len(cache) // _BATCH), "bucket_by")


def _half_slice(cache: Any) -> None:
    copied = pickle.loads(pickle.dumps(cache[: len(cache) // 2]))
    _expect(len(copied) == len(cache) // 2, "half a slice")


def _list_keys(cache: Any) -> None:
    keys = list(cache.keys())
    _expect(len(keys) == len(cache) and keys[-1] == key_of(len(cache) - 1), "list(keys())")


def _join(cache: Any) -> None:
    joined = tc.join({"a": cache, "b": cache})
    _expect(len(joined) == len(cache) and joined[0]["b"]["key"] == key_of(0), "join")


def _shuffled_schema(cache: Any) -> None:
    view = cache[np.random.default_rng(0).permutation(len(cache))]
    _expect(view.schema["x"].num_samples == len(cache), "schema of a shuffled view")


_AFTER_OPEN = {
    "open": len,
    "open, first key": _first_key,
    "open, first batch": _first_batch,
}
_AFTER_INDEXES: dict[str, Callable[[Any], object]] = {
    "schema": _schema,
    "first key": _first_key,
    "first batch": _first_batch,
    "select": lambda cache: _expect(list(cache.select("x").schema) == ["x"], "select"),
    "members": lambda cache: _expect(cache.members == {}, "members"),
    "bucket_by": _bucket_by,
    "pickled half slice": _half_slice,
    "list(keys())": _list_keys,
    "join with itself": _join,
    "schema of a shuffled view": _shuffled_schema,
}
STEPS = (*_AFTER_OPEN, "indexes", *_AFTER_INDEXES)


def _resident(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024 / 1e6


def _read_indexes(cache: Any) -> None:
    _expect(sum(len(shard.index.keys) for shard in cache._store.shards) == len(cache), "indexes")


def _measure(folder: str, step: str) -> tuple[float, float]:
    """Return the microseconds of a step, and its peak memory in megabytes."""
    cache = None if step in _AFTER_OPEN else tc.open(folder)
    if step in _AFTER_INDEXES:
        _read_indexes(cache)
    gc.collect()
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
        peak.write("5")
    began = time.perf_counter()
    cache = tc.open(folder) if cache is None else cache
    run = _read_indexes if step == "indexes" else {**_AFTER_OPEN, **_AFTER_INDEXES}[step]
    run(cache)
    microseconds = (time.perf_counter() - began) * 1e6
    return microseconds, max(0.0, _resident("VmHWM") - before)


def main(folder: str, rounds: str) -> None:
    """Print `(microseconds, megabytes)` of each step and round, as JSON by step. Each step runs in its own forked process."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {step: [] for step in STEPS}
    for _ in range(int(rounds)):
        for step in STEPS:
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    os.write(writer, json.dumps(_measure(folder, step)).encode())
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os.close(writer)
            with open(reader, "rb") as answer:
                content = answer.read()
            if os.waitpid(pid, 0)[1]:
                sys.exit(f"{step} failed")
            found[step].append(json.loads(content))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
