"""Many shards with complete indexes, where only the samples that are read have bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import wds_tensorcache as tc
from benchmarks.workloads import key_of, numbers_read, sample_of
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import Manifest, ShardEntry
from wds_tensorcache.storage.files import ShardFile


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
    Manifest({entry.url: entry for entry in entries}, counts).write(str(folder / "manifest.json"), fsync=False)


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
