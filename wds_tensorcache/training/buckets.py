"""Samples that belong together: of one shape, or of one shard."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.positions import shard_runs, take
from wds_tensorcache.reading.schema import shapes_of

__all__ = ["block_sizes", "buckets_of"]

Array = np.ndarray[Any, Any]


def buckets_of(cache: Any, by: str | Callable[[Any], Any]) -> dict[Any, Array]:
    """Return the numbers of the samples of each bucket, from the index alone.

    Args:
        by: The name of a tensor, whose shapes are the buckets; or a function that is given an `Entry`.

    Raises:
        KeyError: A sample has no such tensor.
        ValueError: The function gave a NaN.
    """
    if isinstance(by, str):
        if by not in cache.schema:
            near = difflib.get_close_matches(by, list(cache.schema), cutoff=0.3) or list(cache.schema)[:8]
            raise KeyError(f"no tensor is called {by!r}; there are {', '.join(map(repr, near))}")
        if isinstance(cache, TensorCache):
            shapes, which = shapes_of(cache._store, cache._where, by)
            # one pass, however many shapes there are
            order, counts = np.argsort(which, kind="stable"), np.bincount(which, minlength=len(shapes))
            return dict(zip(shapes, np.split(order, np.cumsum(counts)[:-1]), strict=True))
    found: dict[Any, list[int]] = {}
    for number, entry in enumerate(cache._entries()):
        label = tuple(entry.shapes[by]) if isinstance(by, str) else by(entry)
        if label != label:
            raise ValueError(f"bucket_by gave {label!r} for sample {entry.key!r}, which is not equal to itself")
        found.setdefault(label, []).append(number)
    return {label: np.array(numbers, np.int64) for label, numbers in found.items()}


def block_sizes(cache: Any, members: Array | None = None) -> list[int]:
    """Return how many samples that follow each other, all or those of `members`, are of one shard, shard by shard."""
    if not isinstance(cache, TensorCache):  # joined caches have the order of the first
        return block_sizes(cache._caches[0], members)
    return shard_runs(cache._store, cache._where if members is None else take(cache._where, members))
