"""Many shards with complete indexes, where only the first and the last shard have the bytes of their samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import wds_tensorcache as tc
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import Manifest, ShardEntry
from wds_tensorcache.storage.files import ShardFile


def key_of(index: int) -> str:
    """Return the key of a sample. Keys ascend."""
    return f"{index:08d}"


def write_shards(folder: Path, num_shards: int, per_shard: int) -> None:
    """Write `num_shards` shards of `per_shard` samples each, and their manifest.

    `ShardWriter` writes the first and the last shard. All other shards have the first one's index with their own keys, and
    holes in place of members. A sample holds its key, and its index in a tensor `x` of 32 bytes.
    """
    folder.mkdir(parents=True)
    paths = [folder / f"{shard:06d}.tar" for shard in range(num_shards)]
    for shard in (0, num_shards - 1):
        with tc.ShardWriter(paths[shard], manifest=False, dali_index=False, fsync=False) as writer:
            for index in range(shard * per_shard, (shard + 1) * per_shard):
                writer.write(key_of(index), {"x": torch.full((8,), index, dtype=torch.int32), "key": key_of(index)})
    first = load_index(ShardFile(str(paths[0])))
    for shard in range(1, num_shards - 1):
        text = "".join(map(key_of, range(shard * per_shard, (shard + 1) * per_shard)))
        keys = Keys(np.frombuffer(text.encode(), np.uint8), first.keys.ends)
        with paths[shard].open("wb") as file:
            file.seek(first.end + 1024)
            file.write(build_footer(replace(first, keys=keys)))
    entries = {path.name: ShardEntry(path.name, per_shard, path.stat().st_size) for path in paths}
    counts = {name: {"": per_shard} for name in entries}
    (folder / "manifest.json").write_bytes(Manifest(entries, counts).build())
