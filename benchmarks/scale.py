"""Reading 10^9 samples on 1,000 nodes: `python -m benchmarks.scale` prints the tables of scale.md that are simulated.

The samples of a step come from the orders of `tc.Loader`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import wds_tensorcache as tc
from benchmarks.report import markdown
from wds_tensorcache.training.order import BlockOrder

# the assumed dataset and cluster
NUM_SAMPLES, NUM_SHARDS, NUM_NODES = 10**9, 10**5, 1000
PER_SHARD, PER_NODE = NUM_SAMPLES // NUM_SHARDS, NUM_SAMPLES // NUM_NODES
RANKS_PER_NODE = 8  # processes, one for each GPU
BATCH = 32  # samples of a rank in a step
SAMPLES_PER_S = 20  # of a rank
_STEPS = 48  # simulated, in the middle of an epoch
_NODE = 17  # the node that is simulated; all are alike

Array = np.ndarray[Any, Any]
Order = Callable[[int, Any], Array]


def indices_of_ranks(order: Order, epoch: int, step: int, world_size: int, first_rank: int) -> Array:
    """Return the samples of each rank of a node in a step, int64 `[RANKS_PER_NODE, BATCH]`."""
    ranks = first_rank + np.arange(RANKS_PER_NODE)
    positions = step * BATCH * world_size + ranks[:, None] + world_size * np.arange(BATCH)
    return order(epoch, positions.ravel()).reshape(positions.shape)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to read an epoch: the order of the samples that a process opens, and the ranks that share a step."""

    name: str
    order: Order
    num_samples: int
    world_size: int
    first_rank: int

    def cells(self) -> list[str]:
        """Return the row: shards in use by a step of all ranks, requests per second for each, indexes that a rank needs."""
        num_shards, per_step = self.num_samples // PER_SHARD, BATCH * self.world_size
        middle = self.num_samples // per_step // 2
        in_use = _num_shards(self.order(0, middle * per_step + np.arange(per_step)))
        per_s = float(f"{SAMPLES_PER_S * self.world_size / in_use:.2g}")
        if isinstance(self.order, tc.EpochOrder):
            share = (
                _num_shards(self.order(0, np.arange(self.first_rank, self.num_samples, self.world_size))) / num_shards
            )
        else:  # these steps read so many shards; those of a rank are counted
            steps = [
                indices_of_ranks(self.order, 0, middle + step, self.world_size, self.first_rank)
                for step in range(_STEPS)
            ]
            counts = [_num_shards(np.concatenate([step[rank] for step in steps])) for rank in range(RANKS_PER_NODE)]
            share = min(1.0, float(np.mean(counts)) / (_STEPS * per_step / PER_SHARD))
        return [self.name, f"{in_use:,}", f"{per_s:,g}", f"{share * 100:.3g}% of {num_shards:,}"]


def _num_shards(indices: Array) -> int:
    return len(np.unique(indices // PER_SHARD))


def _ways() -> list[_Way]:
    ways = []
    for name, count, world_size, first_rank in (
        ("all shards", NUM_SAMPLES, NUM_NODES * RANKS_PER_NODE, _NODE * RANKS_PER_NODE),
        ("own shards", PER_NODE, RANKS_PER_NODE, 0),
    ):
        blocks = BlockOrder([PER_SHARD] * (count // PER_SHARD), seed=1)
        ways.append(_Way(f"{name}, `shuffle=True`", tc.EpochOrder(count, seed=1), count, world_size, first_rank))
        ways.append(_Way(f'{name}, `shuffle="blocks"`', blocks, count, world_size, first_rank))
    return ways


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
    make: Any = tc.EpochOrder(count, seed=3) if order == "True" else BlockOrder(sizes, window=256, seed=3)
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


def tables() -> list[str]:
    """Return the markdown tables."""
    epoch = [["an epoch of all nodes", "shards in use by a step", "requests/s for each", "indexes of a rank"]]
    epoch += [way.cells() for way in _ways()]
    sizes = (0.25, 0.5, 0.75, 1.0)
    hits = [["size of the cache, by what a node reads in an epoch", *(f"{size:.0%}" for size in sizes)]]
    for is_own, name in ((False, "all shards"), (True, "own shards")):
        for order, text in (("True", "`shuffle=True`"), ("blocks", '`shuffle="blocks"`')):
            hits.append([f"{name}, {text}", *(f"{node_hits(order, is_own, size) * 100:.3g}%" for size in sizes)])
    return [markdown(epoch), markdown(hits)]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
