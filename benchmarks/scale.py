"""Reading 10^9 samples on 1,000 nodes: memory, requests and costs. `python -m benchmarks.scale` prints the tables of scale.md.

Sizes of indexes come from the code that builds them, the samples of a step from the orders of `tc.Loader`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import wds_tensorcache as tc
from benchmarks.report import markdown
from benchmarks.workloads import WORKLOADS
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.remote.stream import num_requests
from wds_tensorcache.training.order import BlockOrder, EpochOrder

# the assumed dataset, cluster and store
NUM_SAMPLES, NUM_SHARDS, NUM_NODES = 10**9, 10**5, 1000
PER_SHARD, PER_NODE = NUM_SAMPLES // NUM_SHARDS, NUM_SAMPLES // NUM_NODES
RANKS_PER_NODE = 8  # processes, one for each GPU
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
BATCH = 32  # samples of a rank in a step
SAMPLES_PER_S = 20  # of a rank
EPOCH_S = NUM_SAMPLES / SAMPLES_PER_S / NUM_RANKS
ONE_TENSOR_NBYTES = 2560  # the pooled text of a sample
PER_PREFIX = 5500  # GET requests a second that S3 promises for a prefix
USD_PER_GET = 0.40 / 10**6  # list price of S3 Standard in its first region

Array = np.ndarray[Any, Any]
_SAMPLE = WORKLOADS["diffusion"]
_MEASURED = 3  # samples that are really written
_STEPS = 48  # simulated, in the middle of an epoch
_NODE = 17  # the node that is simulated; all are alike


@cache
def shard() -> tuple[int, ShardIndex, int]:
    """Return the length of a sample in a shard, the index of a whole shard, and the length of the shard with its index.

    `ShardWriter` writes three samples; the index repeats their members.
    """
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        path = Path(folder) / "a.tar"
        with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as writer:
            for number in range(_MEASURED):
                writer.write(f"{number:09d}", _SAMPLE.sample(number))
        real = load_index(ShardFile(str(path)))
        columns = real.caches[""]
    layout, references = real.layouts[0], real.layouts.references[0]
    begin, nbytes = columns.skeleton_begin.item(0), real.end // _MEASURED
    gap = columns.tensors_begin.item(0) - begin
    builder = IndexBuilder()
    for first in range(begin, begin + PER_SHARD * nbytes, nbytes):
        skeleton_nbytes, digest = columns.skeleton_nbytes.item(0), columns.digest.item(0)
        entry = CacheEntry("", first, skeleton_nbytes, first + gap, layout, digest, references)
        builder.add(f"{first // nbytes:09d}", [entry], [])
    index = builder.finish(PER_SHARD * nbytes)
    return nbytes, index, index.end + 1024 + len(build_footer(index))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to read an epoch.

    Attributes:
        name: Row of the tables.
        order: Order of the samples in `tc.open`, as made by `shuffle=`; the same object that a `Loader` uses.
        num_samples, num_shards: Samples and shards that a process has opened.
        world_size: Ranks among which a step is divided.
        first_rank: Number of the node's first rank among these.
    """

    name: str
    order: Callable[[int, Any], Array]
    num_samples: int
    num_shards: int
    world_size: int
    first_rank: int

    def indices(self, epoch: int, step: int) -> Array:
        """Return the samples of each rank of the node in a step of an epoch, int64 `[RANKS_PER_NODE, BATCH]`."""
        ranks = self.first_rank + np.arange(RANKS_PER_NODE)
        positions = step * BATCH * self.world_size + ranks[:, None] + self.world_size * np.arange(BATCH)
        return self.order(epoch, positions.ravel()).reshape(positions.shape)

    def shards_of_step(self) -> int:
        """Return the number of shards in which the samples of all ranks in a step are, in the middle of an epoch."""
        nsamples = BATCH * self.world_size
        first = self.num_samples // nsamples // 2 * nsamples
        return _num_shards(self.order(0, first + np.arange(nsamples)))

    def rank_share(self) -> float:
        """Return the share of the opened shards of which a rank reads a sample in an epoch, so has the index."""
        if isinstance(self.order, EpochOrder):
            return (
                _num_shards(self.order(0, np.arange(self.first_rank, self.num_samples, self.world_size)))
                / self.num_shards
            )
        first = self.num_samples // (BATCH * self.world_size) // 2
        steps = [self.indices(0, first + step) for step in range(_STEPS)]
        # these steps read so many shards; those of a rank are counted
        read = _STEPS * BATCH * self.world_size / PER_SHARD
        counts = [_num_shards(np.concatenate([step[rank] for step in steps])) for rank in range(RANKS_PER_NODE)]
        return min(1.0, float(np.mean(counts)) / read)


def _num_shards(indices: Array) -> int:
    return len(np.unique(indices // PER_SHARD))


def _ways() -> list[Way]:
    all_nodes = (NUM_SAMPLES, NUM_SHARDS, NUM_RANKS, _NODE * RANKS_PER_NODE)
    own = (PER_NODE, NUM_SHARDS // NUM_NODES, RANKS_PER_NODE, 0)
    return [
        Way("all shards, `shuffle=True`", EpochOrder(NUM_SAMPLES, seed=1), *all_nodes),
        Way('all shards, `shuffle="blocks"`', BlockOrder([PER_SHARD] * NUM_SHARDS, seed=1), *all_nodes),
        Way("own shards, `shuffle=True`", EpochOrder(PER_NODE, seed=1), *own),
        Way('own shards, `shuffle="blocks"`', BlockOrder([PER_SHARD] * own[1], seed=1), *own),
    ]


WAYS = _ways()


def node_hits(order: str, is_own: bool, fits: float) -> float:
    """Return the share of a node's samples in its third epoch that its cache still has.

    A small dataset: 20 nodes, 40 shards for each of 64 samples, in steps of a node. Like `cache_dir=`, the cache keeps the
    bytes that were read, and removes those of the shard that was used longest ago.

    Args:
        order: "True" or "blocks", as in `shuffle=`.
        is_own: True if each node opens its own shards.
        fits: Size of the cache, as a share of what a node reads in an epoch.
    """
    nodes, per_shard, num_shards = 20, 64, 40
    count = per_shard * num_shards * (1 if is_own else nodes)
    sizes = [per_shard] * (count // per_shard)
    make: Any = EpochOrder(count, seed=3) if order == "True" else BlockOrder(sizes, window=256, seed=3)
    capacity = int(per_shard * num_shards * fits)
    kept: dict[int, set[int]] = {}  # the samples of each shard; the shard used last is the last
    hits = total = size = 0
    for epoch in range(3):
        for sample in make(epoch, np.arange(0, count, 1 if is_own else nodes)).tolist():
            samples = kept.pop(sample // per_shard, set())
            if epoch == 2:
                hits, total = hits + (sample in samples), total + 1
            size += sample not in samples
            samples.add(sample)
            kept[sample // per_shard] = samples
            while size > capacity:
                size -= len(kept.pop(next(iter(kept))))
    return hits / total


def _nbytes(count: float) -> str:
    units = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
    scale, unit = next((each for each in units if count >= each[0]), (1, "B"))
    return f"{_digits(count / scale)} {unit}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _count(value: float) -> str:
    """Return a count with three significant digits; from 10^6 on as a power."""
    if value < 10**6:
        return _digits(float(f"{value:.3g}"))
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g} x 10^{int(power)}"


def _setting() -> Iterable[list[str]]:
    sample_nbytes, _, shard_nbytes = shard()
    yield ["", "assumed, or computed from it"]
    yield ["samples, shards, nodes", f"{_count(NUM_SAMPLES)}, {_count(NUM_SHARDS)}, {_count(NUM_NODES)}"]
    yield ["a sample in a shard (three fp16 tensors, as in `make bench`)", _nbytes(sample_nbytes)]
    yield ["a shard, with its index", _nbytes(shard_nbytes)]
    yield ["all shards, a node's part", ", ".join(_nbytes(shard_nbytes * NUM_SHARDS / n) for n in (1, NUM_NODES))]
    yield ["ranks of a node, of all nodes", f"{RANKS_PER_NODE}, {NUM_RANKS:,}"]
    yield ["batch of a rank, of all ranks", f"{BATCH}, {BATCH * NUM_RANKS:,}"]
    yield ["samples per second of a rank, of all ranks", f"{SAMPLES_PER_S}, {SAMPLES_PER_S * NUM_RANKS:,}"]
    yield ["an epoch", f"{EPOCH_S / 3600:.2g} hours"]


def _memory() -> Iterable[list[str]]:
    index = shard()[1]
    keys = (index.keys.text.nbytes + index.keys.ends.nbytes) / PER_SHARD
    rows = {"index: keys": keys, "index: offsets, lengths, layouts": index.nbytes / PER_SHARD - keys - 8}
    rows |= {"index: digests": 8.0, "notes of an open shard": 1.0}
    rows["**all indexes**"] = sum(rows.values())
    rows["further: keys that do not ascend from shard to shard"] = 8.0
    rows["further: `bucket_by`, `filter`, a shuffled view"] = 8.0
    rows["further: weights of samples, and their sums"] = 16.0
    yield ["", "bytes a sample", "a process with all indexes", "a node of 8 processes", "a process with a node's part"]
    for name, nbytes in rows.items():
        counts = (NUM_SAMPLES, NUM_SAMPLES * RANKS_PER_NODE, PER_NODE)
        yield [name, _digits(nbytes), *(_nbytes(nbytes * count) for count in counts)]


def _epoch() -> Iterable[list[str]]:
    yield [
        *("an epoch of all nodes", "requests", "for indexes", "price", "requests/s", "times the limit of a prefix"),
        *("one tensor: bytes", "shards in use by a step", "requests/s for each", "indexes of a rank"),
    ]

    def row(
        name: str, requests: float, indexes: float, nbytes: float, shards: int, per_s: float, of_rank: str
    ) -> list[str]:
        rate = requests / EPOCH_S
        cells = [_count(requests), _count(indexes), f"${(requests + indexes) * USD_PER_GET:,.0f}", _count(rate)]
        each = _digits(float(f"{per_s:.2g}"))
        return [name, *cells, _digits(rate / PER_PREFIX), _nbytes(nbytes), f"{shards:,}", each, of_rank]

    for way in WAYS:
        share, shards = way.rank_share(), way.shards_of_step()
        # the processes of a node share indexes on its disk
        of_node = way.num_shards * (1 if way.num_shards < NUM_SHARDS else 1 - (1 - share) ** RANKS_PER_NODE)
        of_rank = f"{share * 100:.3g}% of {way.num_shards:,}"
        per_s = SAMPLES_PER_S * way.world_size / shards
        yield row(way.name, NUM_SAMPLES, of_node * NUM_NODES, ONE_TENSOR_NBYTES * NUM_SAMPLES, shards, per_s, of_rank)
    sample_nbytes, _, shard_nbytes = shard()
    requests = 1 + num_requests(shard_nbytes)  # the first one for the length
    per_s = requests * SAMPLES_PER_S / PER_SHARD
    yield row("streams", requests * NUM_SHARDS, 0, sample_nbytes * NUM_SAMPLES, NUM_RANKS, per_s, "none")


def _hits() -> Iterable[list[str]]:
    sizes = (0.25, 0.5, 0.75, 1.0)
    yield ["size of the cache, by what a node reads in an epoch", *(f"{size:.0%}" for size in sizes)]
    for is_own, name in ((False, "all shards"), (True, "own shards")):
        for order, text in (("True", "`shuffle=True`"), ("blocks", '`shuffle="blocks"`')):
            yield [f"{name}, {text}", *(f"{node_hits(order, is_own, size) * 100:.3g}%" for size in sizes)]


def tables() -> list[str]:
    """Return the markdown tables."""
    return [markdown(list(lines)) for lines in (_setting(), _memory(), _epoch(), _hits())]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
