"""Equality as the format promises it: types, values bit for bit, dtypes, and which objects are one."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left: Any, right: Any, seen: dict[int, int] | None = None, path: str = "$") -> None:
    """Assert that `right`, lazy or not, is `left`; aliases in one must be aliases in the other."""
    seen = {} if seen is None else seen
    aliasing = isinstance(left, (list, dict, set, bytearray, torch.Tensor, np.ndarray, deque)) or (
        isinstance(left, tuple) and left and not isinstance(left, torch.Size)
    )
    if aliasing:
        if id(left) in seen:
            assert seen[id(left)] == id(right), f"{path}: not the same object as before"
            return
        seen[id(left)] = id(right)
    if isinstance(left, torch.Tensor):
        value = right.load() if isinstance(right, tc.LazyTensor) else right
        assert type(value) is torch.Tensor, path
        assert (right.shape, right.dtype) == (left.shape, left.dtype), path
        assert (value.shape, value.dtype) == (left.shape, left.dtype), path
        assert tensor_bytes(value) == tensor_bytes(left), path
    elif isinstance(left, np.ndarray):
        value = right.load() if isinstance(right, tc.LazyArray) else right
        expected = left.astype(left.dtype.newbyteorder("<"))
        assert type(value) is np.ndarray, path
        assert (right.shape, right.dtype) == (left.shape, expected.dtype), path
        assert (value.shape, value.dtype) == (left.shape, expected.dtype), path
        assert value.tobytes() == np.ascontiguousarray(expected).tobytes(), path
    else:
        assert type(left) is type(right), f"{path}: {type(left)} became {type(right)}"
        _assert_same_plain(left, right, seen, path)


def _assert_same_plain(left: Any, right: Any, seen: dict[int, int], path: str) -> None:
    if isinstance(left, dict):
        assert len(left) == len(right), path
        for (left_key, left_item), (right_key, right_item) in zip(left.items(), right.items(), strict=True):
            assert_same(left_key, right_key, seen, f"{path} key {left_key!r}")
            assert_same(left_item, right_item, seen, f"{path}[{left_key!r}]")
        if isinstance(left, defaultdict):
            assert left.default_factory is right.default_factory, path
    elif isinstance(left, (list, tuple, deque)):
        assert len(left) == len(right), path
        assert getattr(left, "maxlen", None) == getattr(right, "maxlen", None), path
        for index, (left_item, right_item) in enumerate(zip(left, right, strict=True)):
            assert_same(left_item, right_item, seen, f"{path}[{index}]")
    elif isinstance(left, (set, frozenset)):
        assert _canonical(left) == _canonical(right), path
    else:
        assert repr(left) == repr(right), path  # NaN, -0.0, fold and time zones: repr tells them apart


def _canonical(value: Any) -> str:
    """Return a text that tells 1 from True and 0.0 from -0.0, and does not depend on the order of sets."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({sorted(map(_canonical, value))})"
    if isinstance(value, tuple):
        return f"tuple({list(map(_canonical, value))})"
    return repr(value)
