"""The memory of a batch: recycled or pinned, moved to a device as a whole, and seen as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import BatchError
from wds_tensorcache.shards.arena import Pool

__all__ = ["filler_of", "move", "nbytes_of", "take_memory", "view_batch"]

Array = np.ndarray[Any, Any]


def take_memory(pool: Pool, nbytes: int, pin: bool, device: Any) -> tuple[torch.Tensor, Array]:
    """Return host memory as a tensor and as an array: pinned if it is asked for, or on its way to a GPU."""
    if pin or (device is not None and torch.device(device).type == "cuda"):
        # torch's own allocator is the pool: only it knows of transfers that are under way
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return pinned, pinned.numpy()
    array = pool.lease(nbytes)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), array
    return torch.frombuffer(array, dtype=torch.uint8), array


def view_batch(host: torch.Tensor, flat: torch.Tensor, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
    """Return what lies at `begin` as a tensor over `flat`, which is `host` on the batch's device; arrays are over `host`."""
    nbytes = nbytes_of(reference, shape)
    if reference.kind == "tensor":
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=flat.device).view(reference.dtype).view(shape)
        return flat[begin : begin + nbytes].view(reference.dtype).view(shape)
    if not nbytes:
        return np.empty(shape, reference.dtype)
    # of the slice, whose base is a tensor: numpy then keeps the memory leased
    return check_array(host[begin : begin + nbytes].numpy().view(reference.dtype).reshape(shape))


def filler_of(reference: Reference, value: float) -> tuple[np.dtype[Any], Any]:
    """Return a numpy dtype of a tensor's width, and the bits of `value` in it.

    Raises:
        BatchError: The tensor's dtype has no such value.
    """
    numpy = reference.kind == "ndarray"
    dtype = reference.dtype
    if not numpy:
        dtype = np.dtype("c16" if reference.dtype.itemsize == 16 else f"u{reference.dtype.itemsize}")
    if not value:
        return dtype, np.zeros((), dtype)  # zero bits, also where texts are padded
    try:
        integers = (
            reference.dtype.kind in "iu"
            if numpy
            else not (reference.dtype.is_floating_point or reference.dtype.is_complex)
        )
        if integers and int(value) != value:
            raise ValueError("not an integer")
        if numpy:
            return dtype, np.array(value, dtype)
        one = torch.full((1,), value, dtype=reference.dtype, device="cpu")
        if integers and one.item() != value:
            raise ValueError("out of range")
        return dtype, one.view(torch.uint8).numpy().view(dtype)
    except (ValueError, OverflowError, RuntimeError, TypeError) as exc:
        raise BatchError(
            f"pad_value={value!r}, which {reference.dtype} of tensor {reference.name!r} cannot hold"
        ) from exc


def nbytes_of(reference: Reference, shape: Sequence[int]) -> int:
    """Return the bytes of an array of a tensor's dtype."""
    return int(np.prod(shape, dtype=np.int64)) * int(reference.dtype.itemsize)


_STREAMS: dict[torch.device, Any] = {}


def move(host: torch.Tensor, device: Any) -> torch.Tensor:
    """Return `host` on `device`: to a GPU by one transfer on a stream of its own, which the caller's stream waits for."""
    if device is None:
        return host
    device = torch.device(device)
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        # torch keeps a pinned source until the transfer is over; a pageable one is copied before this returns
        moved = host.to(device, non_blocking=True)
    current.wait_stream(stream)
    moved.record_stream(current)  # its memory came from the other stream's pool: do not reuse it under the caller
    return moved
