"""Groups of samples: buckets of equal shape for `bucket_by`, and blocks of one shard for `shuffle="blocks"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wds_tensorcache.errors import unknown_name
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.positions import shard_runs, take
from wds_tensorcache.reading.schema import shapes_of

__all__ = ["block_sizes", "buckets_of"]

Array = np.ndarray[Any, Any]


def buckets_of(cache: Any, by: str | Callable[[Any], Any]) -> dict[Any, Array]:
    """Return the sample indices of each bucket: a shape of the tensor named `by`, or a result of the function `by`."""
    if isinstance(by, str):
        if by not in cache.schema:
            raise KeyError(unknown_name("tensor", by, cache.schema))
        if isinstance(cache, TensorCache):
            shapes, which = shapes_of(cache._store, cache._where, by)
            # one pass, however many shapes there are
            order, counts = np.argsort(which, kind="stable"), np.bincount(which, minlength=len(shapes))
            return dict(zip(shapes, np.split(order, np.cumsum(counts)[:-1]), strict=True))
    found: dict[Any, list[int]] = {}
    for index, entry in enumerate(cache._entries()):
        label = tuple(entry.shapes[by]) if isinstance(by, str) else by(entry)
        if label != label:
            raise ValueError(
                f"bucket_by returned {label!r} for sample {entry.key!r}, expected a value that equals itself"
            )
        found.setdefault(label, []).append(index)
    return {label: np.array(indices, np.int64) for label, indices in found.items()}


def block_sizes(cache: Any, members: Array | None = None) -> list[int]:
    """Return the length of each run of successive samples in one shard, among the sample indices `members`; None for all."""
    while isinstance(cache, JoinedCache):  # joined caches have the order of the first cache
        cache = cache._caches[0]
    if not isinstance(cache, TensorCache):  # in memory: every order takes the same time
        return [len(cache if members is None else members)]
    return shard_runs(cache._store, cache._where if members is None else take(cache._where, members))
