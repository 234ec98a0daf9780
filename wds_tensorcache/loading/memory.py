"""The memory of a batch: recycled or pinned, moved to a device as a whole, and seen as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.codec.views import check_array, view_array, view_tensor
from wds_tensorcache.errors import BatchError
from wds_tensorcache.shards.arena import Pool

__all__ = ["Memory", "filler_of", "nbytes_of", "to_device"]

Array = np.ndarray[Any, Any]


class Memory:
    """The bytes of a batch: `array` on the host, recycled or pinned, and after `move` on a device.

    Views keep it alive: an arena is reused when the last tensor over it is gone.
    """

    def __init__(self, pool: Pool, nbytes: int, pin: bool = False, device: Any = None) -> None:
        self._host: torch.Tensor | None = None
        if pin or (device is not None and torch.device(device).type == "cuda"):
            # torch's own allocator is the pool: only it knows of transfers that are under way
            self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._flat = self._host
        self.array: Array = pool.lease(nbytes) if self._host is None else self._host.numpy()

    def move(self, device: Any) -> None:
        """Let `view` give tensors on `device`: one transfer, on a stream of its own if that is a GPU."""
        if device is not None:
            host = view_tensor(self.array, torch.uint8, (len(self.array),)) if self._host is None else self._host
            self._flat = _move(host, torch.device(device))

    def view(self, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
        """Return what lies at byte `begin` as a tensor, or as an array, which is always on the host."""
        if reference.kind == "ndarray":
            return check_array(view_array(self.array, reference.dtype, shape, begin))
        if self._flat is not None:
            nbytes = nbytes_of(reference, shape)
            part = self._flat[begin : begin + nbytes] if nbytes else self._flat.new_empty(0)
            return part.view(reference.dtype).view(shape)
        return view_tensor(self.array, reference.dtype, shape, begin)


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
    return math.prod(shape) * int(reference.dtype.itemsize)


_STREAMS: dict[torch.device, Any] = {}


def to_device(tensor: torch.Tensor, pin: bool, device: Any) -> torch.Tensor:
    """Return a tensor of its own where a batch's tensors go."""
    tensor = tensor.pin_memory() if pin else tensor
    return tensor if device is None else _move(tensor, torch.device(device))


def _move(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `host` on `device`: to a GPU by one transfer on a stream of its own, which the caller's stream waits for."""
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
