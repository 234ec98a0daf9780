"""Bytes to tensors and arrays (FORMAT.md 3.2). Nothing here knows where the bytes come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError

__all__ = ["check_array", "check_tensor", "new_array", "new_tensor", "view_array", "view_bytes", "view_tensor"]

_MAX_CODE_POINT = 0x10FFFF
Array = np.ndarray[Any, Any]


def new_tensor(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> tuple[torch.Tensor, memoryview]:
    """Return a tensor that is not initialised, and its `nbytes` bytes to be filled in.

    Memory: the tensor's own, in host memory whatever torch's default device is, aligned to 64 bytes.
    """
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    raw: Any = flat.numpy()
    return flat.view(dtype).view(shape), memoryview(raw)


def check_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`.

    Raises:
        FormatError: A bool that is neither 0 nor 1: torch's kernels assume that there is none.
    """
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise FormatError("a bool tensor holds bytes other than 0 and 1")
    return tensor


def view_tensor(raw: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `raw`, 1-D uint8, as a tensor. Memory: aliases `raw` and keeps it alive."""
    if not len(raw):
        return new_tensor(dtype, shape, 0)[0]  # torch finds no stride in an empty array
    return torch.from_numpy(raw).view(dtype).view(shape)


def new_array(nbytes: int) -> tuple[Array, memoryview]:
    """Return a 1-D uint8 array that is not initialised, and its bytes to be filled in."""
    raw: Any = np.empty(nbytes, np.uint8)
    return raw, memoryview(raw)


def view_array(raw: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return `raw`, 1-D uint8, as an array of `dtype`. Memory: aliases `raw` and keeps it alive."""
    if not math.prod(shape):
        return np.empty(shape, dtype)  # a view cannot change the item size of nothing
    return raw.view(dtype).reshape(shape)


def check_array(array: Array) -> Array:
    """Return `array`.

    Raises:
        FormatError: A bool that is neither 0 nor 1, or text beyond Unicode, on which numpy fails later.
    """
    if array.dtype.kind == "b" and array.size and int(array.view(np.uint8).max()) > 1:
        raise FormatError("a bool array holds bytes other than 0 and 1")
    if array.dtype.kind == "U" and array.size and int(array.reshape(-1).view("<u4").max()) > _MAX_CODE_POINT:
        raise FormatError("a text array holds code points beyond Unicode")
    return array


class _Exposed:
    """Lets numpy see read-only bytes as writable, without the warning that a view is asked for knowingly."""

    def __init__(self, view: memoryview) -> None:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        self.view = view  # keeps the bytes alive: numpy keeps this object
        self.__array_interface__ = {"data": (address, False), "shape": (len(view),), "typestr": "|u1", "version": 3}


def view_bytes(view: memoryview) -> Array:
    """Return read-only bytes as a 1-D uint8 array. Memory: aliases them; never write into it."""
    return np.asarray(_Exposed(view)) if len(view) else np.empty(0, np.uint8)
