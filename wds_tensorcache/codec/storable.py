"""Tensors and arrays to what is stored of them, or why they cannot be (FORMAT.md 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TrueDtype, numpy_true_dtype, torch_true_dtype
from wds_tensorcache.codec.header import MAX_NDIM, is_possible
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.views import NUMPY_NDIM, SHARED, check_array

__all__ = ["StorableTensor", "describe_tensor"]


@dataclass(slots=True, eq=False)
class StorableTensor:
    """One tensor or array of a sample.

    Attributes:
        kind: `"tensor"` or `"ndarray"`, as in its reference.
        true: How its dtype is stored.
        shape: In elements of its own dtype.
        flat: Its bytes in C order, little-endian, 1-D; aliases it where it is a plain contiguous tensor on the CPU.
    """

    kind: str
    true: TrueDtype
    shape: tuple[int, ...]
    flat: Any

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the header declares, in elements of the stored dtype."""
        return (*self.shape, *self.true.inner)


def describe_tensor(value: Any) -> StorableTensor:
    """Return what is stored of a torch.Tensor, np.ndarray or lazy tensor.

    Raises:
        ValueError: It cannot be stored; the message says why and what to do about it.
    """
    found = _describe(value)
    if len(found.stored_shape) > MAX_NDIM:
        ndim = len(found.stored_shape)
        raise ValueError(
            f"{ndim} dimensions as they are stored, of at most {MAX_NDIM}; store it flattened, and its shape"
        )
    if not is_possible(found.stored_shape):
        raise ValueError(
            f"{list(found.stored_shape)} as it is stored: its dimensions, other than 0, multiply to 2^59 and more, which "
            "readers refuse; store an empty tensor of fewer dimensions, and its shape"
        )
    return found


def _describe(value: Any) -> StorableTensor:
    if isinstance(value, (LazyTensor, LazyArray)):
        kind = "tensor" if isinstance(value, LazyTensor) else "ndarray"
        # Hazard: a view of a file that is cut short kills the process (SIGBUS). So the bytes are copied.
        held = value._source.hold(value._reference.begin, value._reference.end)
        flat = np.ndarray(value.nbytes, np.uint8, held)
        return StorableTensor(kind, _true_dtype(value.dtype), tuple(value.shape), flat)
    is_tensor = isinstance(value, torch.Tensor)
    reason = why_not_tensor(value) if is_tensor else why_not_array(value)
    if reason is not None:
        raise ValueError(reason)
    if not is_tensor:
        flat = view_array_bytes(value)
        check_array(flat.view(value.dtype.newbyteorder("<")) if value.dtype.kind in ("b", "U") and len(flat) else flat)
        return StorableTensor("ndarray", _true_dtype(value.dtype), value.shape, flat)
    try:
        if value.untyped_storage().nbytes() < _end_of(value):
            raise RuntimeError("its storage was freed, or cut")
        flat = view_tensor_bytes(value)
    except (RuntimeError, NotImplementedError) as exc:  # inside torch.func, or on a device that cannot be read
        raise ValueError(f"the tensor's bytes cannot be read: {exc}") from exc
    if value.dtype is torch.bool:
        check_array(flat.view(np.bool_))
    return StorableTensor("tensor", _true_dtype(value.dtype), tuple(value.shape), flat)


def _end_of(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage a tensor reaches into."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _true_dtype(dtype: Any) -> TrueDtype:
    true = torch_true_dtype(dtype) if isinstance(dtype, torch.dtype) else numpy_true_dtype(dtype)
    if true is None:
        raise ValueError(f"{dtype} has no place in the format")
    return true


def why_not_tensor(tensor: torch.Tensor) -> str | None:
    """Return why `tensor` cannot be stored and what to do about it; None if it can."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"a tensor subclass, {type(tensor).__name__}; store x.as_subclass(torch.Tensor)"
    if tensor.is_nested:
        return "a nested tensor; store a list, x.unbind()"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor; store x.to_dense(), or its indices and values"
    if tensor.is_meta:
        return "a meta tensor, which has no bytes; store its shape and dtype"
    if tensor.is_quantized:
        return "a quantized tensor; store x.int_repr(), x.q_scale() and x.q_zero_point()"
    if any(getattr(tensor, "names", ())):  # gone from newer torch releases
        return "a named tensor; store x.rename(None) and x.names"
    if torch_true_dtype(tensor.dtype) is None:
        return f"a tensor of {tensor.dtype}, which safetensors cannot hold; store x.view(torch.uint8)"
    return None


def why_not_array(array: np.ndarray[Any, Any]) -> str | None:
    """Return why `array` cannot be stored and what to do about it; None if it can."""
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array; store x.data and x.mask"
    if type(array) is not np.ndarray and type(array) is not np.memmap:
        return f"an array subclass, {type(array).__name__}; store np.asarray(x)"
    if array.dtype.hasobject:
        return "an array of objects; store x.tolist()"
    if array.dtype.names is not None:
        return "a structured array; store a dict of its fields"
    if numpy_true_dtype(array.dtype) is None:
        return f"an array of {array.dtype}; convert it with x.astype, or store x.tolist()"
    return None


def view_tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the elements of `tensor` in C order as a 1-D uint8 array.

    Memory: aliases `tensor` where that is a plain contiguous CPU tensor, else a copy.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or plain.is_conj() or plain.is_neg() or not plain.is_contiguous():
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    if plain.dtype in SHARED and plain.ndim <= NUMPY_NDIM:
        return plain.numpy().reshape(-1).view(np.uint8)
    return plain.reshape(-1).view(torch.uint8).numpy()


def view_array_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the elements of `array` in C order, little-endian, as a 1-D uint8 array.

    Memory: aliases `array` where that is contiguous and little-endian, else a copy.
    """
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)
