"""The bytes of an index, of a manifest, and of an open cache, from the code that makes them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import wds_tensorcache as tc
from benchmarks.scale.setting import NUM_SHARDS, PER_SHARD
from benchmarks.workloads import WORKLOADS
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import ShardEntry, write_manifest
from wds_tensorcache.storage.files import ShardFile

NOTES_NBYTES = 1  # of a sample in a `Shard`: the number of its template
KEY_TABLE_NBYTES = 8  # of a sample, unless the keys ascend from shard to shard
BUCKET_NBYTES = 8  # of a sample, with `bucket_by`, `filter`, or a shuffled view: its number as int64
# Of a shard in an open cache whose index was not read, without the manifest; measured with tracemalloc on Python 3.11, and
# checked by the tests within a third.
OPEN_NBYTES = 900
PICKLED_NBYTES = 116
_SAMPLE = WORKLOADS["diffusion"]
_MEASURED = 3  # samples that are really written


@dataclass(frozen=True, slots=True)
class Shards:
    """Sizes of the shards.

    Attributes:
        sample_nbytes: Length of a sample in a shard, with tar headers and padding.
        index: Index of a shard of `PER_SHARD` such samples.
        footer_nbytes: Length of this index as a footer.
        nbytes: Length of a shard.
    """

    sample_nbytes: int
    index: ShardIndex
    footer_nbytes: int
    nbytes: int


@cache
def shards() -> Shards:
    """Return the sizes of shards. `ShardWriter` writes three samples; the index of a whole shard repeats their members."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        path = Path(folder) / "a.tar"
        with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as writer:
            for number in range(_MEASURED):
                writer.write(f"{number:09d}", _SAMPLE.sample(number))
        real = load_index(ShardFile(str(path)))
        columns = real.caches[""]
    layout, references = real.layouts[0], real.layouts.references[0]
    begin = columns.skeleton_begin.item(0)
    sample_nbytes = real.end // _MEASURED
    skeleton_nbytes, gap = columns.skeleton_nbytes.item(0), columns.tensors_begin.item(0) - begin
    builder = IndexBuilder()
    for number in range(PER_SHARD):
        first = number * sample_nbytes + begin
        entry = CacheEntry("", first, skeleton_nbytes, first + gap, layout, columns.digest.item(0), references)
        builder.add(f"{number:09d}", [entry], [])
    index = builder.finish(PER_SHARD * sample_nbytes)
    footer = build_footer(index)
    return Shards(sample_nbytes, index, len(footer), index.end + 1024 + len(footer))


def write_listing(path: Path, num_shards: int) -> None:
    """Write the manifest of `num_shards` such shards, as `ShardWriter` writes it."""
    size = shards().nbytes
    entries = [ShardEntry(f"train-{number:06d}.tar", PER_SHARD, size) for number in range(num_shards)]
    caches = {entry.url: {"": PER_SHARD} for entry in entries}
    write_manifest(str(path), entries, {"version": 1, "caches": caches}, fsync=False)


@cache
def manifest_nbytes() -> int:
    """Return the length of the manifest of all shards."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        write_listing(Path(folder) / "manifest.json", NUM_SHARDS)
        return (Path(folder) / "manifest.json").stat().st_size
