"""Padding of a batch's rows: the padded shape, the bits of a fill value, and filling the ends of shorter rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.collate import Pad
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_stackable, is_paddable, remedy_of_shapes
from wds_tensorcache.reading.batch.placement import Placement

Array = np.ndarray[Any, Any]


class Padding(NamedTuple):
    """The padding of tensor number `tensor`: rows are filled up to `row_nbytes` with `bits`, an element of `dtype`."""

    tensor: int
    row_nbytes: int
    dtype: np.dtype[Any]
    bits: Any


def padded_shape(columns: Columns, layouts: Layouts, tensor: int, way: Pad) -> tuple[int, ...]:
    """Return the shape of a tensor's rows after padding the first dimension.

    The row of a sample that lacks the tensor has length 0.

    Raises:
        BatchError: Shapes differ beyond the first dimension, a row is longer than `way.to`, a sample lacks a tensor without
            dimensions, or the batch exceeds size limits.
    """
    first, present = columns.first[tensor], columns.present(tensor)
    at = present[0][0] if present else 0
    for number, other in present:
        if not is_paddable(first.shape, other.shape):
            problem = f"is {list(first.shape)} in sample {layouts.key(at)!r}, but {list(other.shape)} in"
            if len(other.shape) != len(first.shape):
                problem = f"has {len(first.shape)} dimensions in sample {layouts.key(at)!r}, but {len(other.shape)} in"
            raise BatchError(
                f"tensor {first.name!r} {problem} {layouts.key(number)!r}, and only the first dimension is padded; "
                + remedy_of_shapes(first.name)
            )
    if not first.shape:
        columns.check_present(layouts, tensor)
        return ()
    lengths = {number: reference.shape[0] for number, reference in present}
    length = way.length(max(lengths.values(), default=0))
    for number, row_length in lengths.items():
        if row_length > length:
            shown = way.to if isinstance(way.to, int) else list(way.to or ())
            raise BatchError(
                f"tensor {first.name!r} has length {row_length} in sample {layouts.key(number)!r}, more than "
                f"pad(to={shown}); pass a larger `to`, or shorten the tensor before writing it"
            )
    shape = (length, *first.shape[1:])
    check_stackable(first, len(layouts.rows), shape, layouts.key(at))
    return shape


def fill_paddings(
    paddings: Sequence[Padding], layouts: Layouts, columns: Columns, placement: Placement, memory: Array
) -> None:
    """Fill the ends of shorter rows in a batch's memory."""
    # one numpy assignment per padded tensor and sample
    for tensor, row_nbytes, dtype, bits in paddings:
        lengths = columns.nbytes[tensor, layouts.which].tolist()
        for begin, length in zip(placement.rows[tensor], lengths, strict=True):
            memory[begin + length : begin + row_nbytes].view(dtype)[...] = bits


def filler_of(reference: Reference, value: complex) -> tuple[np.dtype[Any], Any]:
    """Return a numpy dtype, and one element of this dtype, with which a batch is padded.

    The numpy dtype is as wide as the tensor's dtype. The element has the bits of the fill value in the tensor's dtype.

    Raises:
        BatchError: The tensor's dtype cannot represent the value.
    """
    is_array, dtype = reference.kind == "ndarray", reference.dtype
    if not is_array:
        dtype = np.dtype("c16" if reference.dtype.itemsize == 16 else f"u{reference.dtype.itemsize}")
    if not isinstance(value, (int, float, complex, np.number)):
        raise BatchError(f"pad_value={value!r}, expected a number, or a dict of numbers by tensor name")
    if (value == 0 and str(value)[0] != "-") or (is_array and dtype.kind not in "biufc"):
        return dtype, np.zeros((), dtype)  # zero bits; also for texts and dates, to which fill values do not apply
    stored: Any = None
    with contextlib.suppress(ValueError, OverflowError, RuntimeError, TypeError), np.errstate(all="ignore"):
        if is_array:
            filler = np.array(value, dtype)
            stored, is_exact = filler.item(), dtype.kind in "biu"
        else:
            one = torch.full((1,), value, dtype=reference.dtype, device="cpu")
            is_exact = not (reference.dtype.is_floating_point or reference.dtype.is_complex)
            wide = torch.float64 if reference.dtype.is_floating_point else torch.complex128
            filler, stored = one.view(torch.uint8).numpy().view(dtype), one.to(one.dtype if is_exact else wide).item()
    if stored is None or not (stored == value if is_exact else _is_near(stored, value)):
        raise BatchError(
            f"pad_value={value!r} cannot be represented in {reference.dtype}, the dtype of tensor {reference.name!r}"
        )
    return dtype, filler


def _is_near(stored: complex, value: complex) -> bool:
    """Return whether `stored` is `value` up to rounding; False if the conversion overflowed or made it NaN."""
    if value != value or stored != stored:
        return value != value and stored != stored
    if math.isinf(abs(value)):
        return stored == value
    return abs(stored - value) <= abs(value) / 2  # float8_e8m0fnu represents only powers of two
