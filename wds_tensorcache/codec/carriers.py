"""Views of tensors as dtypes that numpy, Arrow and DALI have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import STORED, dtype_name, stored_form
from wds_tensorcache.codec.views import SHARED, view_bytes, view_tensor

Array = np.ndarray[Any, Any]
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DALI_HAS = frozenset(f"{kind}{bits}" for kind in ("uint", "int", "float") for bits in (8, 16, 32, 64))


@dataclass(frozen=True, slots=True)
class Carrier:
    """The form in which one dtype's tensors pass through another library."""

    true: torch.dtype | np.dtype[Any]  # the tensors' own dtype
    dtype: np.dtype[Any]  # dtype of the array that carries the tensors' bits
    inner: tuple[int, ...] = ()  # dimensions of the array after the tensor's dimensions

    def carry(self, value: Any) -> Array:
        """View a CPU tensor or a little-endian array as its carrier. Memory: aliases `value`."""
        if isinstance(value, torch.Tensor):
            value = (value if value.dtype in SHARED else value.view(_SIGNED[value.itemsize])).numpy()
        if self.inner:
            value = value.reshape(*value.shape, 1)
        array: Array = value.view(self.dtype)
        return array

    def fits(self, value: Any) -> bool:
        """Return whether a value has the carrier's dtype and inner dimensions."""
        outer = value.ndim - len(self.inner)
        return dtype_name(value.dtype) == self.dtype.name and outer >= 0 and tuple(value.shape[outer:]) == self.inner

    def restore(self, value: Any) -> Any:
        """View a carrier as the original tensor or array. `fits(value)` must be True.

        Memory: aliases `value`. Arrays that are not contiguous, and integers that carry bools, may be copied.
            Hazard: the tensor of a read-only array is writable, and its memory may belong to other readers.
        """
        if isinstance(value, np.ndarray) and isinstance(self.true, torch.dtype):
            shape = value.shape[: value.ndim - len(self.inner)]
            flat: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return view_tensor(view_bytes(memoryview(flat)), self.true, shape)
        if self.true != self.dtype and dtype_name(self.true) == "bool":
            return value != 0  # an operator may have changed a 1 to another number
        return value.view(self.true)[..., 0] if self.inner else value.view(self.true)


@lru_cache(maxsize=256)
def arrow_carrier(dtype: torch.dtype | np.dtype[Any]) -> Carrier:
    """Return the carrier of a dtype for numpy and Arrow.

    The carrier is the stored form, with unsigned integers for the floats that numpy lacks. Dates and times become int64.
    A last dimension contains the two floats of a complex number, or the bytes or code points of a text.

    Raises:
        ValueError: The format cannot store the dtype.
    """
    true = stored_form(dtype)
    if true.stored == "C64":
        return Carrier(dtype, np.dtype("f4"), (2,))
    return Carrier(dtype, np.dtype(STORED[true.stored][2] or f"u{true.itemsize}"), true.inner)


@lru_cache(maxsize=256)
def dali_carrier(dtype: torch.dtype | np.dtype[Any]) -> Carrier:
    """Return the carrier of a dtype for DALI.

    The carrier is the dtype itself if DALI has it, otherwise an integer dtype of the same width. If no integer dtype has this
    width, the carrier is uint8, with the bytes of an element in a last dimension.
    """
    if dtype_name(dtype) in _DALI_HAS:
        return Carrier(dtype, np.dtype(dtype_name(dtype)))
    if dtype.itemsize in _SIGNED:
        return Carrier(dtype, np.dtype("u1" if dtype.itemsize == 1 else f"i{dtype.itemsize}"))
    return Carrier(dtype, np.dtype("u1"), (dtype.itemsize,))
