"""Dtypes that DALI does not have travel as integers of their width; the plugin knows what they are."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

__all__ = ["Carried", "as_torch", "as_value", "carried", "check_ndim", "known_names", "plain", "restored"]

Array = np.ndarray[Any, Any]
_NATIVE = frozenset(
    getattr(torch, name) for name in "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64".split()
)
_NATIVE_KINDS = "iuf"  # of numpy, but for long doubles, which no cache holds
_MAX_NDIM = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32  # of numpy
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Carried:
    """What a tensor is that goes through a pipeline: `"tensor"` or `"ndarray"`, and its dtype, of torch or numpy."""

    kind: str
    dtype: Any


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


def check_ndim(name: str, ndim: int, dtype: Any) -> None:
    """Raise TypeError if a batch of a tensor has more dimensions than numpy arrays, by which DALI takes it."""
    is_split = dtype.itemsize not in _INTEGERS  # into one more dimension
    if 1 + ndim + is_split > _MAX_NDIM:
        raise TypeError(
            f"tensor {name!r} of {dtype} has {ndim} dimensions; for DALI it is one of a batch, of at most {_MAX_NDIM}: "
            "store it flattened, and its shape"
        )


def plain(value: Any) -> Array:
    """Return a tensor or array as an array of a dtype that DALI has. Memory: aliases it."""
    value = carried(value)
    array: Array = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def restored(values: Mapping[str, Any], schema: Mapping[str, Carried]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return outputs of a pipeline by name, tensors of `schema` as what went in; and apart from these, all others.

    Raises:
        TypeError: An operator has computed with integers that were the bits of something else.

    Memory: aliases `values`, on whose device tensors stay; arrays are on the host.
    """
    tensors, others = {}, {}
    for name, value in values.items():
        known = schema.get(name)
        if known is None:
            others[name] = value
        elif isinstance(value, list):
            tensors[name] = [_restored(name, one, known.kind, known.dtype) for one in value]
        else:
            tensors[name] = _restored(name, value, known.kind, known.dtype)
    return tensors, others


def _restored(name: str, value: torch.Tensor, kind: str, dtype: Any) -> Any:
    if kind == "ndarray":
        array = value.cpu().numpy()
        if dtype.kind in _NATIVE_KINDS:
            return array
        if dtype.itemsize in _INTEGERS:
            carrier = np.dtype(f"i{dtype.itemsize}" if dtype.itemsize > 1 else np.uint8)
            if array.dtype != carrier:
                return _changed(name, array, dtype, carrier)
            return array != 0 if dtype.kind == "b" else array.view(dtype)
        if array.dtype != np.uint8 or array.shape[-1:] != (dtype.itemsize,):
            return _changed(name, array, dtype, "bytes")
        return array.view(dtype)[..., 0]
    if dtype in _NATIVE:
        return value
    width = dtype.itemsize
    if width in _INTEGERS:
        if value.dtype is not _INTEGERS[width]:
            return _changed(name, value, dtype, _INTEGERS[width])
        return value != 0 if dtype is torch.bool else value.view(dtype)
    if value.dtype is not torch.int64 or value.shape[-1:] != (2,):
        return _changed(name, value, dtype, "pairs of torch.int64")
    return torch.view_as_complex(value.view(torch.float64))


def _changed(name: str, value: Any, dtype: Any, carrier: Any) -> Any:
    if dtype in (torch.bool, np.dtype(bool)):
        return value  # 0 and 1 are numbers
    raise TypeError(
        f"tensor {name!r} is {dtype}, which DALI does not have: it travels as {carrier}, its bits, and an operator made "
        f"{value.dtype}{list(value.shape)} of these. Operators that compute take bfloat16 with as_float=[{name!r}]; "
        "of others the cache needs a dtype that DALI has. Or outputs= are not in the order of the pipeline's"
    )


def as_torch(output: Any, copy: bool) -> Any:
    """Return an output of a pipeline as `[B, …]`, or as a list of B where shapes differ.

    Memory: DALI's, which lives as long as needed; fresh if `copy`.
    """
    if output.is_dense_tensor():
        dense = from_dlpack(output.as_tensor())
        return dense.clone() if copy else dense
    parts = [from_dlpack(one) for one in output]
    return [part.clone() for part in parts] if copy else parts


def as_value(value: Any) -> Any:
    """Return what an operator of DALI's dynamic mode made, or numpy, as torch has it: `[B, …]`, or a list of B."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple)):
        return list(map(as_value, value))
    if isinstance(value, torch.Tensor) or not hasattr(value, "torch"):
        return value
    is_dense = not hasattr(value, "batch_size") or len({tuple(shape) for shape in value.shape}) == 1
    return value.torch() if is_dense else [one.torch() for one in value]


def known_names(names: Iterable[str] | str, known: Iterable[str], what: str) -> list[str]:
    """Return `names` as a list, patterns (`"text.*"`) as those that they match.

    Raises:
        KeyError: One is not known; the message has those that are spelt alike.
        ValueError: One is there twice.
    """
    known, asked, names = list(known), [names] if isinstance(names, str) else list(names), []
    for name in asked:
        matches = [name] if name in known else fnmatch.filter(known, name)
        names += matches
        if not matches:
            near = difflib.get_close_matches(name, known, cutoff=0.3) or known[:8]
            raise KeyError(f"no {what} is called {name!r}; there are {', '.join(map(repr, near)) or 'none'}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}s {names}: one is there twice")
    return names
