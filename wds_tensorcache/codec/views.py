"""Views of bytes as tensors and arrays, with checks (FORMAT.md 3.2)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError

_MAX_CODE_POINT = 0x10FFFF
Array = np.ndarray[Any, Any]


def check_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`. Raise FormatError if a bool is a byte other than 0 or 1."""
    # Hazard: torch would compute wrong results with such a bool.
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).cpu().numpy().max()) > 1:
        raise FormatError("a bool tensor holds bytes other than 0 and 1")
    return tensor


# Dtypes that every torch release converts from numpy.
SHARED = {
    getattr(torch, name): np.dtype(name)
    for name in "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
}
NUMPY_NDIM = 32  # the limit of numpy 1
ARRAY_NDIM = 64 if int(np.__version__.partition(".")[0]) >= 2 else NUMPY_NDIM  # the limit of the installed numpy


@cache
def _carrier(dtype: torch.dtype) -> tuple[np.dtype[Any], bool]:
    """Return the array's dtype, and whether the tensor needs a view."""
    shared = SHARED.get(dtype)
    return (np.dtype(f"i{dtype.itemsize}"), True) if shared is None else (shared, False)


def view_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], begin: int = 0) -> torch.Tensor:
    """View a writable buffer from byte `begin` on as a CPU tensor.

    Memory: aliases `buffer` and keeps it alive, unless the tensor is empty.
    """
    if 0 in shape:
        # torch's default device may be a GPU
        return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).view(shape)
    if len(shape) > NUMPY_NDIM:
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
    # takes half the time of torch.frombuffer and view
    carrier, is_viewed = _carrier(dtype)
    tensor = torch.from_numpy(np.ndarray(shape, carrier, buffer, begin))
    return tensor.view(dtype) if is_viewed else tensor


def view_array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int = 0) -> Array:
    """View a writable buffer from byte `begin` on as an array.

    Memory: aliases `buffer` and keeps it alive, unless the array is empty.
    """
    return np.ndarray(shape, dtype, buffer, begin) if math.prod(shape) else np.empty(shape, dtype)


def check_array(array: Array) -> Array:
    """Return `array`. Raise FormatError for a bool other than 0 or 1, or for text beyond Unicode."""
    # Hazard: numpy does not check these values.
    if array.dtype.kind == "b" and array.size and int(array.view(np.uint8).max()) > 1:
        raise FormatError("a bool array holds bytes other than 0 and 1")
    if array.dtype.kind == "U" and array.size and int(array.reshape(-1).view("<u4").max()) > _MAX_CODE_POINT:
        raise FormatError("a text array holds code points beyond Unicode")
    return array


class _Exposed:
    """Memory that numpy views as writable, even if it is read-only."""

    # from an array that is not writable, torch.from_numpy makes a tensor only with a warning

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner  # numpy keeps this object alive
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def view_address(address: int, nbytes: int, owner: Any) -> Array:
    """Return the bytes at an address as a 1-D uint8 array. Memory: aliases the bytes and keeps `owner` alive."""
    return np.asarray(_Exposed(address, nbytes, owner))


def view_bytes(view: memoryview) -> Array:
    """Return read-only bytes as a 1-D uint8 array. Memory: aliases `view`; never write into the array."""
    if not len(view):
        return np.empty(0, np.uint8)
    return view_address(np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view), view)
