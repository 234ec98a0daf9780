"""Groups of samples: buckets for `bucket_by`, blocks for `shuffle="blocks"`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import unknown_name
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.positions import shard_runs, take
from wds_tensorcache.reading.schema import Entry, shapes_of

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ByLength:
    """A function for `bucket_by=`, made by `by_length`, which explains the fields."""

    name: str
    bounds: tuple[int, ...]

    def __call__(self, entry: Entry) -> float:
        """Return the bound of the sample's bucket. For a length above the last bound, return infinity.

        Raises:
            KeyError: The sample lacks the tensor.
            ValueError: The tensor has no dimensions.
        """
        return self.of_shape(tuple(entry.shapes[self.name]))

    def of_shape(self, shape: Shape) -> float:
        if not shape:
            raise ValueError(f"bucket_by: tensor {self.name!r} of a sample has no dimensions, so no length")
        at = bisect_left(self.bounds, shape[0])
        return self.bounds[at] if at < len(self.bounds) else math.inf


def by_length(name: str, bounds: Sequence[int]) -> ByLength:
    """Return a value for `bucket_by=` that groups samples by a tensor's length.

    The length is the first dimension. `by_length("text", [64, 128, 256])` makes buckets of up to 64, of 65 to 128 and of 129 to
    256 tokens, and a bucket of all longer texts. `info.source` is the bucket's bound: 64, 128, 256, or `math.inf` for the
    longer texts. To leave out the longer texts, filter the cache: `cache.filter(lambda entry: entry.shapes["text"][0] <= 256)`.

    Args:
        name: Name of the tensor. `StepSampler` checks that each sample has it, with at least one dimension.
        bounds: Greatest length that fits into each bucket, strictly ascending.

    Raises:
        ValueError: `bounds` is no sequence, is empty, or is not strictly ascending; or a bound is negative.
        TypeError: A bound is not an integer.
    """
    lengths = tuple(as_int("bounds", bound) for bound in (bounds if isinstance(bounds, Iterable) else ()))
    if not lengths or lengths[0] < 0 or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"bounds={bounds!r:.200}, expected ascending lengths, for example [64, 128, 256]")
    return ByLength(name, lengths)


def buckets_of(cache: Any, by: str | Callable[[Entry], Any]) -> dict[Any, Array]:
    """Return the sample indices of each bucket. Its label is a shape of the tensor `by`, or a result of the function `by`."""
    if not (isinstance(by, str) or callable(by)):
        raise TypeError(
            f"bucket_by={by!r:.100}, expected the name of a tensor, tc.by_length(…), or a function of an entry"
        )
    name = by.name if isinstance(by, ByLength) else by
    if isinstance(name, str) and name not in cache.schema:
        raise KeyError(unknown_name("tensor", name, cache.schema))
    which: Any = slice(None)
    if isinstance(name, str) and isinstance(cache, TensorCache):
        shapes, which = shapes_of(cache._store, cache._where, name)  # a label for each shape, not for each sample
        labels: list[Any] = [by.of_shape(shape) for shape in shapes] if isinstance(by, ByLength) else list(shapes)
    else:
        labels = [tuple(entry.shapes[by]) if isinstance(by, str) else by(entry) for entry in cache._entries()]
    if any(label != label for label in labels):
        raise ValueError("bucket_by: the function returned NaN for a sample, which equals no other bucket")
    distinct = sorted(set(labels)) if isinstance(by, ByLength) else list(dict.fromkeys(labels))
    numbers = {label: number for number, label in enumerate(distinct)}
    which = np.array([numbers[label] for label in labels])[which]
    # one pass, however many buckets there are
    order, counts = np.argsort(which, kind="stable"), np.bincount(which, minlength=len(distinct))
    return dict(zip(distinct, np.split(order, np.cumsum(counts)[:-1]), strict=True))


def block_sizes(cache: Any, members: Array | None = None) -> list[int]:
    """Return the length of each run of `members` in one shard. By default, they are all samples."""
    while isinstance(cache, JoinedCache):  # joined caches have the order of the first cache
        cache = cache._caches[0]
    if not isinstance(cache, TensorCache):  # in memory: every order takes the same time
        return [len(cache if members is None else members)]
    positions = cache._where if members is None else take(cache._where, members)
    return [last - first for _, first, last in shard_runs(cache._store, positions)]
