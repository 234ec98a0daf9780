"""Bytes to tensors and arrays (FORMAT.md 3.2). Nothing here knows where the bytes come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError

__all__ = ["array_from_bytes", "empty_bytes", "tensor_from_bytes", "view_flat"]

_MAX_CODE_POINT = 0x10FFFF


def empty_bytes(nbytes: int) -> torch.Tensor:
    """Return uninitialised memory as a 1-D uint8 tensor, aligned for every dtype."""
    return torch.empty(nbytes, dtype=torch.uint8)


def tensor_from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `flat`, 1-D uint8, as a tensor of `dtype` and `shape`.

    Raises:
        FormatError: A bool that is neither 0 nor 1: torch's kernels assume that there is none.

    Memory: aliases `flat`.
    """
    if dtype is torch.bool and flat.numel() and int(flat.max()) > 1:
        raise FormatError("a bool tensor holds bytes other than 0 and 1")
    return flat.view(dtype).view(shape)


def array_from_bytes(flat: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return `flat`, 1-D uint8, as an array of `dtype` and `shape`.

    Raises:
        FormatError: A bool that is neither 0 nor 1, or text beyond Unicode.

    Memory: aliases `flat` and keeps it alive.
    """
    raw = flat.numpy()
    if dtype.kind == "b" and raw.size and int(raw.max()) > 1:
        raise FormatError("a bool array holds bytes other than 0 and 1")
    if dtype.kind == "U" and raw.size and int(raw.view("<u4").max()) > _MAX_CODE_POINT:
        raise FormatError("a text array holds code points beyond Unicode")
    if not math.prod(shape):
        return np.empty(shape, dtype)  # a view cannot change the item size of nothing
    return raw.view(dtype).reshape(shape)


class _Exposed:
    """Lets numpy see read-only bytes as writable, without the warning that a view is asked for knowingly."""

    def __init__(self, view: memoryview) -> None:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        self.view = view  # keeps the bytes alive: numpy keeps this object
        self.__array_interface__ = {"data": (address, False), "shape": (len(view),), "typestr": "|u1", "version": 3}


def view_flat(view: memoryview) -> torch.Tensor:
    """Return read-only bytes as a 1-D uint8 tensor. Memory: aliases them; writing into it is undefined."""
    if not len(view):
        return empty_bytes(0)
    return torch.from_numpy(np.asarray(_Exposed(view)))
