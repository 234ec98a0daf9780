"""Dtypes that DALI does not have travel as integers of their width; the plugin knows what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["carried", "restored"]

Array = np.ndarray[Any, Any]
_NATIVE = frozenset(
    getattr(torch, name) for name in "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64".split()
)
_NATIVE_KINDS = "iuf"  # of numpy, but for long doubles, which no cache holds
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carried(value: Any) -> Any:
    """Return a tensor or array as DALI takes it: of a dtype that DALI has.

    Elements of other dtypes become integers of the same width; of 16 bytes (complex128, texts) one more dimension of
    smaller ones. Memory: aliases `value`.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype in _NATIVE:
            return value
        width = value.dtype.itemsize
        if width in _INTEGERS:
            return value.view(_INTEGERS[width])
        return torch.view_as_real(value).view(torch.int64)  # complex128
    dtype = value.dtype
    if dtype.kind in _NATIVE_KINDS:
        return value
    if dtype.itemsize in _INTEGERS:
        return value.view(f"i{dtype.itemsize}" if dtype.itemsize > 1 else np.uint8)
    return value.reshape(*value.shape, 1).view(np.uint8)


def restored(value: torch.Tensor, kind: str, dtype: Any) -> Any:
    """Return what came out of a pipeline as what went in: `kind` and `dtype` as a cache's schema has them.

    What an operator has given another dtype stays what it is. Memory: aliases `value`, on whose device tensors stay; arrays
    are on the host.
    """
    if kind == "ndarray":
        array = value.cpu().numpy()
        if dtype.kind in _NATIVE_KINDS or array.dtype.kind not in "iu":
            return array
        if dtype.itemsize in _INTEGERS:
            return array.view(dtype) if array.dtype.itemsize == dtype.itemsize else array
        return array.view(dtype)[..., 0] if array.shape[-1:] == (dtype.itemsize,) else array
    if dtype in _NATIVE:
        return value
    width = dtype.itemsize
    if width in _INTEGERS:
        if value.dtype is not _INTEGERS[width]:
            return value
        return value != 0 if dtype is torch.bool else value.view(dtype)
    if value.dtype is not torch.int64 or value.shape[-1:] != (2,):
        return value
    return torch.view_as_complex(value.view(torch.float64))
