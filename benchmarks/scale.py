"""Reading 10^9 samples on 1,000 nodes: `python -m benchmarks.scale` prints the tables of scale.md that are simulated.

The samples of a step come from the orders of `tc.Loader`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
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
_SHUFFLES = ("True", '"blocks"')

Array = np.ndarray[Any, Any]


def _order(shuffle: str, count: int, per_shard: int, **options: int) -> Any:
    is_blocks = shuffle == _SHUFFLES[1]
    return BlockOrder([per_shard] * (count // per_shard), **options) if is_blocks else tc.EpochOrder(count, **options)


def indices_of_ranks(order: Callable[[int, Any], Array], step: int, world_size: int, first_rank: int) -> Array:
    """Return the samples of each rank of a node in a step, int64 `[RANKS_PER_NODE, BATCH]`."""
    ranks = first_rank + np.arange(RANKS_PER_NODE)
    positions = step * BATCH * world_size + ranks[:, None] + world_size * np.arange(BATCH)
    return order(0, positions.ravel()).reshape(positions.shape)


def _epoch_cells(shuffle: str, is_own: bool) -> list[str]:
    """Return the cells of a way: shards in use by a step of all ranks, requests per second for each, indexes of a rank."""
    count, num_nodes, node = (PER_NODE, 1, 0) if is_own else (NUM_SAMPLES, NUM_NODES, _NODE)
    world_size, first_rank = num_nodes * RANKS_PER_NODE, node * RANKS_PER_NODE
    order, num_shards, per_step = _order(shuffle, count, PER_SHARD, seed=1), count // PER_SHARD, BATCH * world_size
    middle = count // per_step // 2
    in_use = _num_shards(order(0, middle * per_step + np.arange(per_step)))
    per_s = float(f"{SAMPLES_PER_S * world_size / in_use:.2g}")
    if shuffle == "True":
        share = _num_shards(order(0, np.arange(first_rank, count, world_size))) / num_shards
    else:  # these steps read so many shards; those of a rank are counted
        steps = [indices_of_ranks(order, middle + step, world_size, first_rank) for step in range(_STEPS)]
        counts = [_num_shards(np.concatenate([step[rank] for step in steps])) for rank in range(RANKS_PER_NODE)]
        share = min(1.0, float(np.mean(counts)) / (_STEPS * per_step / PER_SHARD))
    return [f"{in_use:,}", f"{per_s:,g}", f"{share * 100:.3g}% of {num_shards:,}"]


def _num_shards(indices: Array) -> int:
    return len(np.unique(indices // PER_SHARD))


def _node_hits(shuffle: str, is_own: bool, fits: float) -> float:
    """Return the share of a node's samples in its third epoch that its cache, with `fits` of an epoch's samples, still has.

    A small dataset: 20 nodes, 40 shards for each of 64 samples, in steps of a node. Like `cache_dir=`, the cache keeps the
    bytes that were read, and removes those of the shard that was used longest ago.
    """
    per_shard, num_shards, num_nodes = 64, 40, 1 if is_own else 20
    count = per_shard * num_shards * num_nodes
    order = _order(shuffle, count, per_shard, seed=3, **({} if shuffle == "True" else {"window": 256}))
    capacity = int(per_shard * num_shards * fits)
    kept: dict[int, set[int]] = {}  # the samples of each shard; the shard used last is the last
    hits = size = 0
    for epoch in range(3):
        hits = 0
        for sample in order(epoch, np.arange(0, count, num_nodes)).tolist():
            samples = kept.pop(sample // per_shard, set())
            hits += sample in samples
            size += sample not in samples
            samples.add(sample)
            kept[sample // per_shard] = samples
            while size > capacity:
                size -= len(kept.pop(next(iter(kept))))
    return hits / (per_shard * num_shards)


def tables() -> list[str]:
    sizes = (0.25, 0.5, 0.75, 1.0)
    epoch = [["an epoch of all nodes", "shards in use by a step", "requests/s for each", "indexes of a rank"]]
    hits = [["size of the cache, by what a node reads in an epoch", *(f"{size:.0%}" for size in sizes)]]
    for is_own, shuffle in product((False, True), _SHUFFLES):
        way = f"{'own' if is_own else 'all'} shards, `shuffle={shuffle}`"
        epoch.append([way, *_epoch_cells(shuffle, is_own)])
        hits.append([way, *(f"{_node_hits(shuffle, is_own, size) * 100:.3g}%" for size in sizes)])
    return [markdown(epoch), markdown(hits)]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
