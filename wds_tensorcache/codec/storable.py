"""Stored bytes of tensors and arrays, or errors with remedies (FORMAT.md 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE, TrueDtype, stored_form
from wds_tensorcache.codec.header import MAX_NDIM, is_possible
from wds_tensorcache.codec.views import NUMPY_NDIM, SHARED, check_array

Array = np.ndarray[Any, Any]
# Dtypes that `view_plain` takes. Bools need a check, and complex numbers may be stored with another shape.
PLAIN = frozenset(dtype for dtype in SHARED if dtype is not torch.bool and not dtype.is_complex)
_HAS_NAMES = hasattr(torch.Tensor, "names")  # removed from newer torch releases


@dataclass(slots=True, eq=False)
class StorableTensor:
    """One tensor or array of a sample, in its stored form. `SkeletonWriter` sets the last two fields."""

    kind: str  # "tensor" or "ndarray"
    true: TrueDtype
    shape: tuple[int, ...]  # in elements of the stored dtype
    flat: Any  # elements in C order, little-endian, as 1-D uint8; may alias the tensor or array
    name: str = ""  # in the `.safetensors` member
    reference: str = ""  # string by which the skeleton refers to the tensor


def describe_tensor(value: Any) -> StorableTensor:
    """Return the stored form of a tensor, array or lazy tensor. Raise ValueError if it has none."""
    if isinstance(value, torch.Tensor):
        flat = _bytes_of_tensor(value)
    elif isinstance(value, np.ndarray):
        flat = _bytes_of_array(value)
    else:
        # Reading a memory map of a truncated file kills the process (SIGBUS), so `hold` copies the bytes of files.
        flat = np.ndarray(value.nbytes, np.uint8, value._source.hold(value._reference.begin, value._reference.end))
    kind, true = "tensor" if isinstance(value.dtype, torch.dtype) else "ndarray", stored_form(value.dtype)
    shape = (*value.shape, *true.inner)
    if len(shape) > MAX_NDIM:
        raise ValueError(
            f"its stored form has {len(shape)} dimensions; the limit is {MAX_NDIM}; store x.flatten() and x.shape"
        )
    if not len(flat) and not is_possible(shape):
        raise ValueError(
            f"its stored form has the shape {list(shape)}, whose dimensions other than 0 multiply to 2^59 or more; "
            "store an empty tensor with fewer dimensions, and the shape as a tuple"
        )
    return StorableTensor(kind, true, shape, flat)


def view_plain(tensor: torch.Tensor) -> memoryview | None:
    """View a plain tensor as the bytes of `StorableTensor.flat`. It takes a third of the time of `describe_tensor`.

    Return None for any other tensor, for example if it is empty, needs a gradient, is not contiguous or is on a GPU. The caller
    checks that the type is exactly `torch.Tensor`, and that the dtype is in `PLAIN`.
    """
    if _HAS_NAMES and any(tensor.names):  # type: ignore[attr-defined]
        return None
    try:
        nbytes = tensor.nbytes
        # The memory of a storage may have been freed; after `numpy()`, torch could not allocate it again.
        if (
            not nbytes
            or not tensor.is_contiguous()
            or tensor.storage_offset() * tensor.itemsize + nbytes > tensor.untyped_storage().nbytes()
        ):
            return None
        array = tensor.numpy()
        # For a tensor without memory, as inside `torch.func.functionalize`, torch returns an array of random bytes.
        return None if array.flags.owndata else memoryview(array).cast("B")  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # on a GPU, needs a gradient, sparse, a pending conjugation, inside torch.func, …


def _bytes_of_tensor(tensor: torch.Tensor) -> Array:
    """Return the bytes of a tensor in C order. Memory: may alias the tensor."""
    reason = _why_not_tensor(tensor)
    if reason is not None:
        raise ValueError(reason)
    try:
        is_contiguous = tensor.is_contiguous()
        last = tensor.numel() - 1
        if not is_contiguous:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + last + 1) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < end and tensor.numel():
            raise RuntimeError("its storage was freed or shortened")
        plain = tensor.detach() if tensor.requires_grad else tensor
        if not plain.is_cpu or plain.is_conj() or plain.is_neg() or not is_contiguous:
            plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
        if plain.dtype not in SHARED or plain.ndim > NUMPY_NDIM:
            line = plain.reshape(-1)
            # a tensor of one element may be contiguous with any stride, which a view as bytes refuses
            line = line if line.stride(0) == 1 else line.as_strided(line.shape, (1,))
            plain = line.view(torch.uint8)
        array: Array = plain.numpy()
        if array.flags.owndata and array.size:  # see `view_plain`
            raise RuntimeError("it has no memory here")
    except (RuntimeError, NotImplementedError) as exc:  # inside torch.func, or on a device that torch cannot read
        raise ValueError(f"the tensor's bytes cannot be read: {exc}") from exc
    flat: Array = array.reshape(-1).view(np.uint8)
    if tensor.dtype is torch.bool:
        check_array(flat.view(np.bool_))
    return flat


def _bytes_of_array(array: Array) -> Array:
    """Return the little-endian bytes of an array in C order. Memory: aliases an array of this form."""
    reason = _why_not_array(array)
    if reason is not None:
        raise ValueError(reason)
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    check_array(little)
    return little.view(np.uint8)


def _why_not_tensor(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:  # also of the subclass NestedTensor
        return "a nested tensor cannot be stored, because its rows have several shapes; store list(x.unbind())"
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"tensor subclass {type(tensor).__name__} cannot be stored; store x.as_subclass(torch.Tensor)"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be stored; store x.to_dense(), or its indices and values"
    if tensor.is_meta or tensor.is_quantized:
        return "a meta or quantized tensor cannot be stored; store a plain one, such as x.dequantize()"
    if any(getattr(tensor, "names", ())):  # removed from newer torch releases
        return "a named tensor cannot be stored; store x.rename(None) and x.names"
    if tensor.dtype not in TORCH_TRUE:
        return f"a tensor of {tensor.dtype} cannot be stored in safetensors; store x.view(torch.uint8)"
    return None


def _why_not_array(array: Array) -> str | None:
    if type(array) is not np.ndarray and type(array) is not np.memmap:
        # only here: `np.ma` is imported by its first use, and a child that is forked during that would wait for it forever
        if isinstance(array, np.ma.MaskedArray):
            return "a masked array cannot be stored; store x.data and x.mask"
        return f"array subclass {type(array).__name__} cannot be stored; store np.asarray(x)"
    if array.dtype.names:
        return f"an array of {array.dtype} cannot be stored; store {{name: x[name] for name in x.dtype.names}}"
    try:
        stored_form(array.dtype)
    except ValueError:
        return f"an array of {array.dtype} cannot be stored; convert it with x.astype, or store x.tolist()"
    return None
