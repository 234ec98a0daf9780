"""Dtypes that numpy lacks as float32 with the same numbers, and back: bfloat16 and float8, bit for bit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
WIDENED = frozenset({"BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})  # names of safetensors
_QUIET_NAN = 0x7FC0_0000
_FLOAT8 = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


def widen(bits: Array, stored: str) -> Array:
    """Return the numbers as float32; a NaN of float8 has its byte in the lowest bits, so that `narrow_again` finds it.

    Args:
        bits: Elements as uint16 for `BF16`, otherwise as uint8.
        stored: One of `WIDENED`.
    """
    if stored == "BF16":  # the upper half of a float32; also keeps the bits of every NaN
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return _table(stored)[bits].view(np.float32)


def narrow_again(numbers: Array, stored: str) -> Array | None:
    """Return the elements from which `widen` has made the numbers; None if there are none.

    Args:
        numbers: float32 elements.
        stored: One of `WIDENED`.
    """
    wide = np.ascontiguousarray(numbers).view(np.uint32)
    if stored == "BF16":
        bits = np.right_shift(wide, 16).astype(np.uint16)
    else:
        tensor = torch.from_numpy(wide.view(np.float32).copy())
        rounded = tensor.to(_FLOAT8[stored]).view(torch.uint8).numpy().reshape(numbers.shape)
        bits = np.where(np.isnan(numbers), (wide & 0xFF).astype(np.uint8), rounded)
    return bits if np.array_equal(widen(bits, stored).view(np.uint32), wide) else None


@lru_cache(None)
def _table(stored: str) -> Array:
    """Return the bits of the float32 of each byte."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = codes.view(_FLOAT8[stored]).to(torch.float32).numpy()
    signs = (codes.numpy().astype(np.uint32) >> 7) << 31
    return np.where(np.isnan(numbers), signs | _QUIET_NAN | codes.numpy(), numbers.view(np.uint32)).astype(np.uint32)
