"""The samples that a node reads under each order, and the requests for them: simulated with the orders of `tc.Loader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.scale.memory import shards
from benchmarks.scale.setting import (
    BATCH,
    GAP_NBYTES,
    NUM_NODES,
    NUM_RANKS,
    NUM_SAMPLES,
    NUM_SHARDS,
    PER_NODE,
    PER_SHARD,
    RANKS_PER_NODE,
)
from wds_tensorcache.storage.remote.stream import num_requests
from wds_tensorcache.training.order import BlockOrder, EpochOrder

Array = np.ndarray[Any, Any]
_STEPS = 48
_NODE = 17  # the node that is simulated; all are alike


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

    @property
    def num_steps(self) -> int:
        """Number of steps in an epoch."""
        return self.num_samples // (BATCH * self.world_size)


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


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a node to the store.

    Attributes:
        requests: Requests for a whole sample, on average; below 1 where near samples are read together.
        extra: Bytes read between such samples, for each byte of a sample.
        shards_of_batch: Shards in which the samples of a rank's batch are.
        shards_of_node: Shards in which the samples of a node's step are.
        shards_of_step: Shards in which the samples of all ranks in a step are.
        rank_share: Share of all opened shards of which a rank reads a sample in an epoch, so has the index.
    """

    requests: float
    extra: float
    shards_of_batch: float
    shards_of_node: float
    shards_of_step: float
    rank_share: float


@cache
def traffic(way: Way) -> Traffic:
    """Simulate steps in the middle of an epoch."""
    first = way.num_steps // 2
    steps = range(first, min(first + _STEPS, way.num_steps))
    found = [way.indices(0, step) for step in steps]
    batches = [batch for step in found for batch in step]
    counts = [_merged(batch) for batch in batches]
    num_requests, extra = (sum(each) for each in zip(*counts, strict=True))
    total = len(batches) * BATCH
    return Traffic(
        num_requests / total,
        extra / (total * shards().sample_nbytes),
        float(np.mean([_num_shards(batch) for batch in batches])),
        float(np.mean([_num_shards(step) for step in found])),
        _num_shards(way.order(0, first * BATCH * way.world_size + np.arange(BATCH * way.world_size))),
        _rank_share(way, found),
    )


def _num_shards(indices: Array) -> int:
    return len(np.unique(indices // PER_SHARD))


def _merged(batch: Array) -> tuple[int, int]:
    """Return the number of requests for the samples of a batch, and the bytes between samples that they read, too."""
    nbytes = shards().sample_nbytes
    begins = np.sort(batch // PER_SHARD * shards().nbytes + batch % PER_SHARD * nbytes)
    gaps = begins[1:] - begins[:-1] - nbytes
    near = gaps[gaps <= GAP_NBYTES]
    return len(batch) - len(near), int(near.sum())


def _rank_share(way: Way, found: list[Array]) -> float:
    """Return the share of shards of which a rank reads a sample in an epoch."""
    if isinstance(way.order, EpochOrder):
        positions = np.arange(way.first_rank, way.num_samples, way.world_size)
        return _num_shards(way.order(0, positions)) / way.num_shards
    # these steps read so many shards; those of a rank are counted
    numbers = [np.unique(np.concatenate([step[rank] for step in found]) // PER_SHARD) for rank in range(RANKS_PER_NODE)]
    read = len(found) * BATCH * way.world_size / PER_SHARD
    return min(1.0, float(np.mean([len(each) for each in numbers])) / read)


def stream_requests() -> int:
    """Return the requests of a `ResumablePipeline` for a shard: one for its length, each further one for bytes."""
    return 1 + num_requests(shards().nbytes)


@cache
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
    stride = 1 if is_own else nodes
    capacity = int(per_shard * num_shards * fits)
    kept: dict[int, set[int]] = {}  # the samples of each shard; the shard used last is the last
    hits = total = size = 0
    for epoch in range(3):
        for sample in make(epoch, np.arange(0, count, stride)).tolist():
            samples = kept.pop(sample // per_shard, set())
            if epoch == 2:
                hits, total = hits + (sample in samples), total + 1
            size += sample not in samples
            samples.add(sample)
            kept[sample // per_shard] = samples
            while size > capacity:
                size -= len(kept.pop(next(iter(kept))))
    return hits / total
