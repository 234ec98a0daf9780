"""Conversions of tensors for DALI, and of its outputs to tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from ctypes import c_void_p
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from wds_tensorcache.codec.carriers import Carrier, dali_carrier
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.errors import unknown_name

_CUDA = 2  # DLPack's type of a GPU


def carriers_of(schema: Mapping[str, Any]) -> dict[str, Carrier]:
    """Return the form in which each tensor passes through DALI. Raise TypeError if a tensor's dtype differs between samples."""
    for name, tensor in schema.items():
        if isinstance(tensor.dtype, tuple):
            dtypes = " and ".join(map(str, tensor.dtype))
            raise TypeError(f"tensor {name!r} is {dtypes} in different samples; a DALI node has only one dtype")
    return {name: dali_carrier(tensor.dtype) for name, tensor in schema.items()}


def is_tensor(carrier: Carrier) -> bool:
    """Return whether a carrier is for torch tensors, not numpy arrays."""
    return isinstance(carrier.true, torch.dtype)


def restore(values: Mapping[str, Any], carriers: Mapping[str, Carrier]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a pipeline's outputs into restored tensors and all other outputs.

    A tensor is an output with a name in `carriers`. A bool tensor that an operator has changed to another dtype keeps that
    dtype.

    Raises:
        TypeError: An operator computed with integers that hold the bits of another dtype.

    Memory: aliases `values`, except for bools, and for arrays of outputs on a GPU, which are copied to the host. Tensors stay
        on the device of `values`.
    """
    tensors = {name: _restore(name, value, carriers[name]) for name, value in values.items() if name in carriers}
    return tensors, {name: value for name, value in values.items() if name not in carriers}


def _restore(name: str, value: Any, carrier: Carrier) -> Any:
    if isinstance(value, list):
        return [_restore(name, one, carrier) for one in value]
    if not isinstance(carrier.true, torch.dtype):
        value = value.cpu().numpy()
    if carrier.dtype.name == dtype_name(carrier.true):
        return value  # an operator may have converted it to another dtype
    if carrier.fits(value):
        return carrier.restore(value)
    if dtype_name(carrier.true) == "bool":
        return value  # an operator has made numbers of 0 and 1, which is allowed
    raise TypeError(
        f"tensor {name!r} is {carrier.true}, which DALI lacks, so its bits pass through the pipeline as {carrier.dtype}; but "
        f"the output is {value.dtype}{list(value.shape)}. If an operator computes with a bfloat16 tensor, use "
        f"as_float=[{name!r}]; for other dtypes, store one that DALI supports. If no operator does, check that outputs= names "
        "the outputs in the order of the pipeline"
    )


def as_dali(value: Any, layout: str, is_pinned: bool) -> Any:
    """Return an array, or a tuple of arrays, as DALI's own tensors."""
    # Hazard: DALI would convert arrays itself, in the thread that runs the pipeline. If a node has a layout, DALI converts even
    # its own tensors again. The new tensors are not marked as page-locked, so they are copied once more.
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    options = {"is_pinned": True} if is_pinned else {}  # without a GPU, DALI refuses this argument
    if isinstance(value, tuple):
        return tuple(TensorCPU(one, layout, **options) for one in value)
    return TensorListCPU(value, layout, **options)


def as_torch(output: Any, copy: bool) -> Any:
    """Return an output as a tensor `[B, …]` or a list of B. It stays in DALI's memory unless `copy` is True."""
    if output.is_dense_tensor():
        return _part_as_torch(output.as_tensor(), copy)
    return [_part_as_torch(part, copy) for part in output]


def _part_as_torch(part: Any, copy: bool) -> torch.Tensor:
    kind, number = part.__dlpack_device__()
    if int(kind) != _CUDA:
        # torch refuses DLPack's device type of page-locked memory
        tensor = torch.from_numpy(np.asarray(part))
        return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor
    if not copy:
        return from_dlpack(part)
    # Memory that DALI shares by DLPack is freed by a thread that synchronizes the device, even if a copy of it was
    # made. So DALI itself copies, on torch's stream.
    from nvidia.dali.types import to_numpy_type

    array = np.empty(0, to_numpy_type(part.dtype))  # type: ignore[no-untyped-call]
    copied = torch.empty(part.shape(), dtype=torch.from_numpy(array).dtype, device=torch.device("cuda", number))
    if copied.numel():
        stream = torch.cuda.current_stream(copied.device)
        part.copy_to_external(c_void_p(copied.data_ptr()), c_void_p(stream.cuda_stream), non_blocking=True)
    return copied


def as_value(value: Any) -> Any:
    """Convert a value of numpy or DALI's dynamic mode to a tensor.

    Samples of different shapes become a list of B tensors. Any other value is returned unchanged.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple)):
        return list(map(as_value, value))
    if isinstance(value, torch.Tensor) or not hasattr(value, "torch"):
        return value
    is_dense = not hasattr(value, "batch_size") or len({tuple(shape) for shape in value.shape}) == 1
    return value.torch() if is_dense else [one.torch() for one in value]


def match_names(names: Iterable[str] | str, available: Iterable[str], kind: str) -> list[str]:
    """Return `names`, with patterns (`"text.*"`) replaced by matches in `available`.

    Raises:
        KeyError: A name or pattern matches none of `available`; the message calls the names `kind`.
        ValueError: A name occurs twice in the list.
    """
    available, matched = list(available), list[str]()
    for name in [names] if isinstance(names, str) else names:
        matches = [name] if name in available else fnmatch.filter(available, name)
        if not matches:
            raise KeyError(unknown_name(kind, name, available))
        matched += matches
    if len(set(matched)) < len(matched):
        raise ValueError(f"{kind}: a name occurs twice in {matched}")
    return matched
