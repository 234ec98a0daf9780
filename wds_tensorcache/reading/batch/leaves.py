"""`Leaves`: a batch's values other than tensors, with which torch can compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import Path, shown
from wds_tensorcache.errors import BatchError

_NUMBERS = (bool, int, float, complex)


class Leaves:
    """A list-like object with one value per sample, decoded on first use.

    It prints like a list, and `.tolist()` returns the values that were written. A pickled copy contains the values.

    Torch functions and operators treat it as the tensor `torch.tensor(leaves.tolist())`, on the device of the first tensor
    among their arguments. Bools become `torch.bool` and ints int64. Floats, and floats mixed with ints, become torch's default
    dtype (float32). Every use makes a new tensor. `==` and `!=` compare the values with a tensor, an array or, if the values
    are numbers, a number element by element. They compare the values with anything else as lists do.

    It is not registered as a `Sequence`, and has no method `to`. To move a batch to a device, trainers rebuild every sequence
    from its items, and call every method `to`. Both would decode all values.

    Raises (when the values are used):
        BatchError: A sample's structure differs from the structure of the batch. Or torch computes with values that do not
            form a tensor, for example texts, lists of different lengths, or ints beyond int64.
        FormatError, RemoteError: A skeleton is damaged, or cannot be fetched.
    """

    __slots__ = ("_decoded", "_list", "_path")

    def __init__(self, decoded: Any, path: Path, values: list[Any] | None = None) -> None:
        self._decoded = decoded  # an object with a length and `column(path)`; None if `values` are passed
        self._path = path
        self._list = values

    def tolist(self) -> list[Any]:
        """Return the values as a list. Every call returns the same list."""
        if self._list is None:
            self._list = self._decoded.column(self._path)
        return self._list

    def __len__(self) -> int:
        return len(self.tolist() if self._decoded is None else self._decoded)

    def __getitem__(self, index: Any) -> Any:
        """Return a value, or a list for a slice. For a tensor of indices or bools, return a tensor of numbers."""
        if isinstance(index, torch.Tensor) and index.ndim:
            return self._as_tensor(index.device)[index]
        return self.tolist()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> Any:
        return self._compare("__eq__", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("__ne__", other)

    def _compare(self, name: str, other: Any) -> Any:
        if isinstance(other, (torch.Tensor, np.ndarray, np.generic, Lazy)):
            return NotImplemented  # the tensor or array compares element by element
        values = self.tolist()
        if isinstance(other, _NUMBERS) and values and all(isinstance(value, _NUMBERS) for value in values):
            return getattr(self._as_tensor(), name)(other)
        return getattr(values, name)(other.tolist() if isinstance(other, Leaves) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> Any:
        return Leaves, (None, self._path, self.tolist())

    def _as_tensor(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the values as a tensor; raise BatchError if they form none."""
        values = self.tolist()
        try:
            tensor = torch.tensor(values)
            # `torch.tensor([[], [1]])` has the shape (2, 0), without an error.
            if not tensor.numel() and _has_numbers(values):
                raise ValueError("lists of different lengths")
        except (TypeError, ValueError, RuntimeError) as exc:
            # not a TypeError: torch's operators would hide it, and say that they do not support a `Leaves`
            place = ".".join(map(str, self._path))
            raise BatchError(
                f"the values at {place!r}, such as {shown(values[0])}, do not form a tensor ({exc}); use .tolist()"
            ) from exc
        # A blocking transfer would wait for all work of the GPU. With `non_blocking`, torch first copies pageable memory.
        return tensor if device is None else tensor.to(device, non_blocking=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _device_of((args, kwargs))
        return func(*_with_tensors(list(args), device), **_with_tensors(kwargs, device))


def _has_numbers(value: Any) -> bool:
    return any(map(_has_numbers, value)) if isinstance(value, (list, tuple)) else True


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return next((device for device in map(_device_of, items) if device is not None), None)


def _with_tensors(value: Any, device: torch.device | None) -> Any:
    cls = type(value)
    if cls is Leaves:
        return value._as_tensor(device)
    if cls is list or cls is tuple:
        return cls(_with_tensors(item, device) for item in value)
    return {key: _with_tensors(item, device) for key, item in value.items()} if cls is dict else value


def _operator(name: str) -> Any:
    def method(self: Leaves, *operands: Any) -> Any:
        # tensors and arrays have the reflected operator
        if not all(isinstance(other, (*_NUMBERS, Leaves)) for other in operands):
            return NotImplemented
        return getattr(self._as_tensor(), name)(*operands)

    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor".split()
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *"lt le gt ge neg pos abs invert".split()):
    setattr(Leaves, f"__{_name}__", _operator(f"__{_name}__"))


def _collate_leaves(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    return collate([leaves.tolist() for leaves in batch], collate_fn_map=collate_fn_map)


default_collate_fn_map.setdefault(Leaves, _collate_leaves)
