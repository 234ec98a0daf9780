"""Conversion of dtypes that DALI lacks: they pass through a pipeline as integers of the same width, or as bytes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from wds_tensorcache.errors import unknown_name

__all__ = [
    "Carried",
    "as_dali",
    "as_torch",
    "as_value",
    "carried_schema",
    "check_ndim",
    "known_names",
    "plain",
    "restored",
]

Array = np.ndarray[Any, Any]
_NATIVE = frozenset(
    getattr(torch, name) for name in "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64".split()
)
_NATIVE_KINDS = "iuf"  # numpy's dtypes without long doubles, which no cache contains
_MAX_NDIM = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32  # of numpy
_CUDA = 2  # DLPack's type of a GPU
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = {1: np.dtype("u1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}


@dataclass(frozen=True, slots=True)
class Carried:
    """The kind of a tensor in a pipeline, `"tensor"` or `"ndarray"`, and its true dtype, of torch or numpy."""

    kind: str
    dtype: Any


def carried_schema(schema: Mapping[str, Any]) -> dict[str, Carried]:
    """Return the kinds and dtypes of tensors; raise TypeError for tensors that DALI cannot represent."""
    for name, known in schema.items():
        if isinstance(known.dtype, tuple):
            dtypes = " and ".join(map(str, known.dtype))
            raise TypeError(f"tensor {name!r} is {dtypes} in different samples; a DALI node has only one dtype")
        if known.shape is not None:
            check_ndim(name, len(known.shape), known.dtype)
    return {name: Carried(known.kind, known.dtype) for name, known in schema.items()}


def check_ndim(name: str, ndim: int, dtype: Any) -> None:
    """Raise TypeError if a batch of a tensor has more dimensions than a numpy array can have."""
    is_split = dtype.itemsize not in _TORCH
    if 1 + ndim + is_split > _MAX_NDIM:
        raise TypeError(
            f"tensor {name!r} of {dtype} has {ndim} dimensions; a batch of it needs more than the {_MAX_NDIM} that numpy "
            "allows; store the tensor flattened, with its shape"
        )


def _carrier(dtype: Any) -> Any:
    """Return the dtype that replaces `dtype` in DALI: `dtype` itself, or an integer of the same width, or uint8.

    It is uint8 if there is no integer of this width, because an element does not have 1, 2, 4 or 8 bytes.
    """
    if isinstance(dtype, torch.dtype):
        return dtype if dtype in _NATIVE else _TORCH.get(dtype.itemsize, torch.uint8)
    return dtype if dtype.kind in _NATIVE_KINDS else _NUMPY.get(dtype.itemsize, _NUMPY[1])


def plain(value: Any) -> Array:
    """Return a tensor or array as an array with a dtype that DALI supports. Memory: aliases `value`.

    An array whose elements do not have 1, 2, 4 or 8 bytes (complex128, most texts) becomes uint8, with an additional dimension
    for the bytes of an element.
    """
    carrier = _carrier(value.dtype)
    if carrier != value.dtype:
        is_split = carrier.itemsize != value.dtype.itemsize
        value = (value.reshape(*value.shape, 1) if is_split else value).view(carrier)
    array: Array = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def restored(values: Mapping[str, Any], schema: Mapping[str, Carried]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts of a pipeline's outputs by name: the tensors of `schema`, with their true dtypes, and all other outputs.

    A bool tensor that an operator has changed to another dtype keeps that dtype.

    Memory: aliases `values`, except for bools, and for arrays of outputs on a GPU, which are copied to the host. Tensors stay
        on the device of `values`.
    """
    tensors, extra = {}, {}
    for name, value in values.items():
        known = schema.get(name)
        if known is None:
            extra[name] = value
        elif isinstance(value, list):
            tensors[name] = [_restored(name, one, known) for one in value]
        else:
            tensors[name] = _restored(name, value, known)
    return tensors, extra


def _restored(name: str, value: Any, known: Carried) -> Any:
    dtype, carrier = known.dtype, _carrier(known.dtype)
    if known.kind == "ndarray":
        value = value.cpu().numpy()
    if carrier == dtype:
        return value
    is_bool, is_split = str(dtype) in ("bool", "torch.bool"), carrier.itemsize != dtype.itemsize
    if value.dtype != carrier or (is_split and value.shape[-1:] != (dtype.itemsize,)):
        if is_bool:
            return value  # an operator has made numbers of 0 and 1, which is allowed
        raise TypeError(
            f"tensor {name!r} is {dtype}, which DALI lacks, so its bits pass through the pipeline as {carrier}; but the "
            f"output is {value.dtype}{list(value.shape)}. If an operator computes with a bfloat16 tensor, use "
            f"as_float=[{name!r}]; for other dtypes, store one that DALI supports. If no operator does, check that outputs= "
            "names the outputs in the order of the pipeline"
        )
    if is_bool:
        return value != 0
    return value.view(dtype)[..., 0] if is_split else value.view(dtype)


def as_dali(value: Any, layout: str, is_pinned: bool) -> Any:
    """Return an array, or a tuple of arrays, as DALI's own tensors. DALI feeds them to a pipeline as they are.

    Hazard: from arrays, DALI would make these objects itself, in the thread that runs the pipeline. It makes new ones also from
    its own objects if a node has a layout, and the new ones are not marked as page-locked: they are copied once more.
    """
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    options = {"is_pinned": True} if is_pinned else {}  # without a GPU, DALI refuses this argument
    if isinstance(value, tuple):
        return tuple(TensorCPU(one, layout, **options) for one in value)
    return TensorListCPU(value, layout, **options)


def as_torch(output: Any, copy: bool) -> Any:
    """Return an output as a tensor `[B, …]`, or as a list of B tensors. Memory: with `copy`, torch's own, else DALI's own."""
    is_dense = output.is_dense_tensor()
    parts = [_part_as_torch(part, copy) for part in ([output.as_tensor()] if is_dense else output)]
    return parts[0] if is_dense else parts


def _part_as_torch(part: Any, copy: bool) -> torch.Tensor:
    kind, number = part.__dlpack_device__()
    if int(kind) != _CUDA:
        # torch refuses DLPack's device type of page-locked memory
        tensor = torch.from_numpy(np.asarray(part))
        return tensor.clone() if copy else tensor
    if not copy:
        return from_dlpack(part)
    # Memory that DALI shares by DLPack is freed by a thread that synchronizes the device, even if a copy of it was
    # made. So DALI itself copies, on torch's stream.
    from nvidia.dali.types import to_numpy_type

    array = np.empty(0, to_numpy_type(part.dtype))  # type: ignore[no-untyped-call]
    made = torch.empty(part.shape(), dtype=torch.from_numpy(array).dtype, device=torch.device("cuda", number))
    if made.numel():
        stream = torch.cuda.current_stream(made.device)
        part.copy_to_external(c_void_p(made.data_ptr()), c_void_p(stream.cuda_stream), non_blocking=True)
    return made


def as_value(value: Any) -> Any:
    """Return a value of numpy, or of DALI's dynamic mode, as a tensor `[B, …]`, or as a list of B tensors."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple)):
        return list(map(as_value, value))
    if isinstance(value, torch.Tensor) or not hasattr(value, "torch"):
        return value
    is_dense = not hasattr(value, "batch_size") or len({tuple(shape) for shape in value.shape}) == 1
    return value.torch() if is_dense else [one.torch() for one in value]


def known_names(names: Iterable[str] | str, known: Iterable[str], what: str) -> list[str]:
    """Return `names` as a list, with patterns (`"text.*"`) replaced by their matches in `known`.

    Raises:
        KeyError: A name or pattern matches none of `known`; `what` says in the message what they name.
        ValueError: A name occurs twice in the list.
    """
    known, found = list(known), list[str]()
    for name in [names] if isinstance(names, str) else names:
        matches = [name] if name in known else fnmatch.filter(known, name)
        if not matches:
            raise KeyError(unknown_name(what, name, known))
        found += matches
    if len(set(found)) < len(found):
        raise ValueError(f"{what}: a name occurs twice in {found}")
    return found
