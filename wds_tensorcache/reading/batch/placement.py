"""Compute the position of each row in a batch's memory, without reading; a row is one sample's part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.errors import BatchError

Array = np.ndarray[Any, Any]
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions of a batch's rows in its memory, in bytes.

    Attributes:
        begins: Offset of each tensor's first row.
        rows: Offset of each row, `[tensors][samples]`; a range if rows are at equal distances.
        row_array: The same, int64 `[tensors, samples]`.
        nbytes: Length of the whole memory.
        row_nbytes: Distance between the rows of each tensor; None if rows of any tensor differ in length.
    """

    begins: Sequence[int]
    rows: Sequence[Sequence[int]]
    row_array: Array
    nbytes: int
    row_nbytes: tuple[int, ...] | None = None


@lru_cache(8)  # batches of one layout share a placement
def place_equal(row_nbytes: tuple[int, ...], count: int) -> Placement:
    """Return the placement of `count` rows of each tensor; `row_nbytes` is the length of a row, by tensor."""
    begins, nbytes = _in_turn([size * count for size in row_nbytes])
    rows = [
        range(at, at + size * count, size) if size else [at] * count
        for at, size in zip(begins, row_nbytes, strict=True)
    ]
    row_array = np.array(begins, np.int64)[:, None] + np.outer(np.array(row_nbytes, np.int64), np.arange(count))
    return Placement(begins, rows, row_array, nbytes, row_nbytes)


def place_in_turn(sizes: Array) -> Placement:
    """Return the placement of rows of the lengths `sizes`, int64 `[tensors, samples]`, without gaps within a tensor."""
    begins, nbytes = _in_turn(sizes.sum(1).tolist())
    rows = np.array(begins, np.int64)[:, None] + sizes.cumsum(1) - sizes
    return Placement(begins, rows.tolist(), rows, nbytes)


def _in_turn(sizes: list[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of arrays with these sizes in one block of memory, and the block's length."""
    edges = list(accumulate((size + -size % _ALIGN for size in sizes), initial=0))
    if edges[-1] >= 1 << 63:
        raise no_memory(edges[-1])
    return edges[:-1], edges[-1]


def no_memory(nbytes: int) -> BatchError:
    """Return the error for a batch that is too large."""
    return BatchError(f"a batch of {nbytes} bytes does not fit into memory; read fewer samples, or use collate='list'")


def nbytes_of(reference: Reference, shape: Sequence[int]) -> int:
    """Return the length in bytes of an array with a tensor's dtype and this shape."""
    return math.prod(shape) * int(reference.dtype.itemsize)
