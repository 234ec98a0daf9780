"""Where each row of a batch goes in its memory, and what fills the rest. Nothing is read here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.errors import BatchError

__all__ = ["Placement", "fillers_of", "nbytes_of", "no_memory", "place_equal", "place_in_turn"]

Array = np.ndarray[Any, Any]
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes of a batch's memory.

    Attributes:
        first: Where each tensor's first row begins.
        rows: [tensors][samples], where each row begins; a range where rows follow each other at one distance.
        nbytes: Bytes of the whole memory.
    """

    first: Sequence[int]
    rows: Sequence[Sequence[int]]
    nbytes: int


@lru_cache(8)  # batches of one layout have one placement
def place_equal(steps: tuple[int, ...], count: int) -> Placement:
    """Return the placement of `count` rows of each tensor, one every `steps` bytes."""
    first, nbytes = _in_turn([step * count for step in steps])
    rows = [range(at, at + step * count, step) if step else [at] * count for at, step in zip(first, steps, strict=True)]
    return Placement(first, rows, nbytes)


def place_in_turn(sizes: Array) -> Placement:
    """Return the placement of rows without gaps between them; `sizes` are their bytes, int64 `[tensors, samples]`."""
    first, nbytes = _in_turn(sizes.sum(1).tolist())
    rows = np.array(first)[:, None] + sizes.cumsum(1) - sizes
    return Placement(first, rows.tolist(), nbytes)


def _in_turn(sizes: list[int]) -> tuple[list[int], int]:
    """Return where arrays of so many bytes begin in one memory, each aligned, and how large that is."""
    edges = list(accumulate((size + -size % _ALIGN for size in sizes), initial=0))
    if edges[-1] >= 1 << 63:
        raise no_memory(edges[-1])
    return edges[:-1], edges[-1]


def no_memory(nbytes: int) -> BatchError:
    """Return the error of a batch that is too large."""
    return BatchError(f"a batch of {nbytes} bytes does not fit into memory; read fewer samples, or use collate='list'")


def nbytes_of(reference: Reference, shape: Sequence[int]) -> int:
    """Return the bytes of an array of a tensor's dtype."""
    return math.prod(shape) * int(reference.dtype.itemsize)


def fillers_of(
    names: Sequence[str], references: Sequence[Sequence[Reference]], shapes: Sequence[tuple[int, ...]], value: Any
) -> list[tuple[np.dtype[Any], Any]]:
    """Return what fills each tensor's rows up to `shapes`: a numpy dtype of the tensor's width, and the bits of the value.

    Args:
        names, references, shapes: The tensors' names, what they are by layout, and the shapes of padded rows.
        value: A number for all tensors, or a dict of numbers by name; 0 for the others.

    Raises:
        BatchError: No tensor has such a name, or a tensor's dtype cannot hold its number.
    """
    values = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    return [
        _filler_of(each[0], values.get(name, 0) if any(one.shape != shape for one in each) else 0)
        for name, each, shape in zip(names, references, shapes, strict=True)
    ]


def _filler_of(reference: Reference, value: float) -> tuple[np.dtype[Any], Any]:
    numpy = reference.kind == "ndarray"
    dtype = reference.dtype
    if not numpy:
        dtype = np.dtype("c16" if reference.dtype.itemsize == 16 else f"u{reference.dtype.itemsize}")
    if not isinstance(value, (int, float, complex, np.number)):
        raise BatchError(f"pad_value={value!r}, expected a number, or a dict of numbers by tensor name")
    if (value == 0 and str(value)[0] != "-") or (numpy and dtype.kind not in "biufc"):
        return dtype, np.zeros((), dtype)  # zero bits; also of texts and dates, which no number is meant for
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            if numpy:
                filler = np.array(value, dtype)
                found: Any = filler.item()
            else:
                one = torch.full((1,), value, dtype=reference.dtype, device="cpu")
                filler, found = one.view(torch.uint8).numpy().view(dtype), one.to(_widest(reference.dtype)).item()
    except (ValueError, OverflowError, RuntimeError, TypeError) as exc:
        raise _cannot_hold(reference, value) from exc
    is_exact = reference.dtype.kind in "biu" if numpy else _widest(reference.dtype) in (torch.int64, reference.dtype)
    if not (found == value if is_exact else _is_near(found, value)):
        raise _cannot_hold(reference, value)
    return dtype, filler


def _widest(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds what one of this kind holds, and that Python has."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _is_near(found: complex, value: complex) -> bool:
    """Return whether a float is `value` but for rounding: not where it became infinite, NaN or the largest there is."""
    if value != value or found != found:
        return value != value and found != found
    if math.isinf(abs(value)):
        return found == value
    return abs(found - value) <= abs(value) / 2  # float8_e8m0fnu has powers of two alone


def _cannot_hold(reference: Reference, value: float) -> BatchError:
    return BatchError(f"pad_value={value!r}, which {reference.dtype} of tensor {reference.name!r} cannot hold")
