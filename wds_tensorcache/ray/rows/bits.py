"""Tensors as arrays that Arrow can hold: bfloat16 as uint16, 8-bit floats as uint8, complex numbers as pairs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import STORED, TORCH_TRUE, TrueDtype, dtype_name, numpy_true_dtype
from wds_tensorcache.codec.storable import describe_tensor
from wds_tensorcache.codec.views import view_array, view_bytes, view_tensor

Array = np.ndarray[Any, Any]


def dtype_text(value: Any) -> str:
    """Return the kind and dtype of a tensor or array as text, for example `tensor:bfloat16` or `ndarray:<M8[ns]`."""
    if isinstance(value.dtype, torch.dtype):
        return f"tensor:{dtype_name(value.dtype)}"
    return f"ndarray:{value.dtype.newbyteorder('<').str}"


@lru_cache(maxsize=256)
def parse_dtype(text: str) -> torch.dtype | np.dtype[Any]:
    """Return the dtype that `dtype_text` describes; raise ValueError if the installed torch or numpy lacks it."""
    kind, _, name = text.partition(":")
    dtype: Any = getattr(torch, name, None) if kind == "tensor" else None
    if kind == "ndarray":
        try:
            dtype = np.dtype(name)
        except TypeError:
            dtype = None
    if _true_of(dtype) is None:
        raise ValueError(f"unknown dtype {text!r:.100}, expected for example 'tensor:bfloat16'")
    return dtype  # type: ignore[no-any-return]


def _true_of(dtype: Any) -> TrueDtype | None:
    if isinstance(dtype, torch.dtype):
        return TORCH_TRUE.get(dtype)
    return numpy_true_dtype(dtype) if isinstance(dtype, np.dtype) else None


@lru_cache(maxsize=256)
def _carrier(dtype: torch.dtype | np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype of the array that carries the bits of a dtype, and the dimensions that the array has in addition."""
    true = _true_of(dtype)
    if true is None:
        raise ValueError(f"the format cannot store {dtype}")
    numpy_name = STORED[true.stored][2]
    if true.stored == "C64":
        return np.dtype("<f4"), (2,)
    return np.dtype(numpy_name or f"<u{true.itemsize}"), true.inner


def to_bits(value: Any) -> Array:
    """Return the elements of a tensor or array, lazy or not, as an array of a dtype that Arrow can hold.

    Returns:
        An array of the same shape for numbers and bools of numpy. bfloat16 is uint16, an 8-bit float is uint8, a date is int64.
        Complex numbers and texts have one more dimension, the last one: 2 floats, or the bytes or code points.

    Raises:
        ValueError: The format cannot store the dtype.

    Memory: aliases `value` if its memory on the CPU has this form.
    """
    flat = describe_tensor(value).flat
    carrier, inner = _carrier(value.dtype)
    found: Array = flat.view(carrier).reshape((*value.shape, *inner))
    return found


def from_bits(array: Array, dtype: torch.dtype | np.dtype[Any]) -> Any:
    """Return the tensor or array of `dtype` whose bits `array` holds; `array` itself if it does not hold such bits.

    Memory: aliases `array` if it is contiguous. Hazard: an array of Ray is read-only memory; never write into the result.
    """
    array = np.asarray(array)
    carrier, inner = _carrier(dtype)
    cut = array.ndim - len(inner)
    if array.dtype != carrier or cut < 0 or array.shape[cut:] != inner:
        return array
    shape = array.shape[:cut]
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    raw = view_bytes(memoryview(flat))
    if isinstance(dtype, torch.dtype):
        return view_tensor(raw, dtype, shape)
    return view_array(raw, dtype, shape)


def from_column(value: Any, dtype: torch.dtype | np.dtype[Any]) -> Any:
    """Return the tensor or array of `dtype` that is the value of a column; its array if that does not hold such bits.

    A tensor without dimensions may be a number, also of a wider dtype, if Arrow or pandas converted the column.
    """
    carrier, _ = _carrier(dtype)
    # Ray makes lists of the tensors of a batch of numpy if one of its rows is None
    array = np.asarray(value, carrier if isinstance(value, list) else None)
    if not array.ndim and array.dtype != carrier and array.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            narrow = array.astype(carrier)
        if narrow == array or (array != array and narrow != narrow):
            array = narrow
    return from_bits(array, dtype)
