"""Positions of rows in a batch's memory, and padding of short rows.

A row contains the data of one sample in a batched tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_stackable
from wds_tensorcache.reading.collate import Pad

Array = np.ndarray[Any, Any]
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """The offsets of a batch's rows in its memory, in bytes."""

    begins: Sequence[int]  # offset of each tensor's first row
    rows: Array  # offset of each row, int64 `[tensors, samples]`
    nbytes: int  # length of the whole memory


@lru_cache(8)  # batches of one layout share a placement
def place_equal(row_nbytes: tuple[int, ...], count: int) -> Placement:
    """Return the placement of `count` rows of `row_nbytes` bytes for each tensor."""
    return place_in_turn(np.array(row_nbytes, np.int64)[:, None].repeat(count, 1))


def place_in_turn(sizes: Array) -> Placement:
    """Return the placement of rows of `sizes` bytes, int64 `[tensors, samples]`. The rows of a tensor are contiguous."""
    edges = list(accumulate((size + -size % _ALIGN for size in sizes.sum(1).tolist()), initial=0))
    if edges[-1] >= 1 << 63:
        raise no_memory(edges[-1])
    rows = np.array(edges[:-1], np.int64)[:, None] + sizes.cumsum(1) - sizes
    return Placement(edges[:-1], rows, edges[-1])


def no_memory(nbytes: int) -> BatchError:
    return BatchError(f"a batch of {nbytes} bytes does not fit into memory; read fewer samples, or use collate='list'")


def nbytes_of(reference: Reference, shape: Sequence[int]) -> int:
    """Return the length in bytes of an array with a tensor's dtype."""
    return math.prod(shape) * int(reference.dtype.itemsize)


def place(
    layouts: Layouts, columns: Columns, ways: Sequence[str | Pad]
) -> tuple[list[tuple[int, ...] | None], Placement, list[Padding]]:
    """Return row shapes (None for lists), the placement of rows, and paddings."""
    count = len(layouts.rows)
    sizes = columns.nbytes[:, layouts.which]
    shapes: list[tuple[int, ...] | None] = []
    paddings = []
    for number, way in enumerate(ways):
        first, can_stack = columns.first[number], count <= columns.limits[number]
        if isinstance(way, Pad):
            shapes.append(padded_shape(columns, layouts, number, way))
            row_nbytes = nbytes_of(first, shapes[-1] or ())
            if (sizes[number] < row_nbytes).any():
                paddings.append(Padding(number, row_nbytes, *filler_of(first, way.value)))
                sizes[number] = row_nbytes
        elif way == "list" or (way == "auto" and not can_stack):
            shapes.append(None)
        else:
            if not can_stack:
                columns.check_stackable(layouts, number)
            shapes.append(first.shape)
    if (sizes == sizes[:, :1]).all():
        return shapes, place_equal(tuple(sizes[:, 0].tolist()), count), paddings
    return shapes, place_in_turn(sizes), paddings


class Padding(NamedTuple):
    """The padding of one tensor's rows up to `row_nbytes` bytes."""

    tensor: int  # index in `Columns.names`
    row_nbytes: int
    dtype: np.dtype[Any]
    bits: Any  # an element of `dtype`


def padded_shape(columns: Columns, layouts: Layouts, tensor: int, way: Pad) -> tuple[int, ...]:
    """Return the shape of a tensor's padded rows. Raise BatchError if they cannot be padded to one shape."""
    first, present = columns.first[tensor], columns.present(tensor)
    key = layouts.key(present[0][0] if present else 0)
    for number, other in present:
        if len(other.shape) != len(first.shape) or other.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"tensor {first.name!r} is {list(first.shape)} in sample {key!r}, but {list(other.shape)} in "
                f"{layouts.key(number)!r}, and only the first dimension is padded; use collate='list', or batches of one "
                f"shape: Loader(…, bucket_by={first.name!r})"
            )
    if not first.shape:
        columns.check_present(layouts, tensor)
        return ()
    longest, number = max(((other.shape[0], -number) for number, other in present), default=(0, 0))
    length = way.length(longest)
    if longest > length:
        shown = way.to if isinstance(way.to, int) else list(way.to or ())
        raise BatchError(
            f"tensor {first.name!r} has length {longest} in sample {layouts.key(-number)!r}, more than pad(to={shown}); pass a "
            "larger `to`, or shorten the tensor before writing it"
        )
    shape = (length, *first.shape[1:])
    check_stackable(first, len(layouts.rows), shape, key)
    return shape


def fill_paddings(
    paddings: Sequence[Padding], layouts: Layouts, columns: Columns, placement: Placement, memory: Array
) -> None:
    """Fill rows with padding from the end of the shortest row on. The caller copies the rows afterwards."""
    for tensor, row_nbytes, dtype, bits in paddings:
        shortest, begin = int(columns.nbytes[tensor, layouts.which].min()), placement.begins[tensor]
        rows = memory[begin : begin + row_nbytes * len(layouts.which)].reshape(-1, row_nbytes)
        rows[:, shortest:].view(dtype)[...] = bits


def filler_of(reference: Reference, value: complex) -> tuple[np.dtype[Any], Any]:
    """Return a numpy dtype and its element with the fill value's bits. The dtype is as wide as the tensor's."""
    is_array, dtype = reference.kind == "ndarray", reference.dtype
    if not is_array:
        dtype = np.dtype("c16" if reference.dtype.itemsize == 16 else f"u{reference.dtype.itemsize}")
    is_number = isinstance(value, (int, float, complex, np.number))
    if is_number and ((value == 0 and str(value)[0] != "-") or (is_array and dtype.kind not in "biufc")):
        return dtype, np.zeros((), dtype)  # zero bits; also for texts and dates, to which fill values do not apply
    with contextlib.suppress(ValueError, OverflowError, RuntimeError, TypeError), np.errstate(all="ignore"):
        if is_array:
            filler = np.array(value, dtype)
            stored, is_exact = filler.item(), dtype.kind in "biu"
        else:
            one = torch.full((1,), value, dtype=reference.dtype, device="cpu")
            filler, is_float = one.view(torch.uint8).numpy().view(dtype), reference.dtype.is_floating_point
            is_exact = not (is_float or reference.dtype.is_complex)
            stored = (one.double() if is_float else one).item()
        # rounded, unless the conversion overflowed, or made it NaN; float8_e8m0fnu represents only powers of two
        is_near = not is_exact and (
            abs(stored - value) <= abs(value) / 2 < math.inf or value != value != stored != stored
        )
        if is_number and (stored == value or is_near):
            return dtype, filler
    raise BatchError(
        f"pad_value={value!r} cannot be represented in {reference.dtype}, the dtype of tensor {reference.name!r}"
    )
