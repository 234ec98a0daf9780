"""The memory of a batch: from `storage/memory_pool.py` or pinned, moved to a device as a whole, and viewed as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.codec.views import check_array, view_array, view_tensor
from wds_tensorcache.reading.batch.placement import nbytes_of, no_memory
from wds_tensorcache.storage.memory_pool import Pool

__all__ = ["Memory", "to_device"]

Array = np.ndarray[Any, Any]


class Memory:
    """The bytes of a batch: `array` on the host, recycled or pinned; after `move` also on a device.

    Each tensor that `view` returns keeps all bytes alive; recycled memory is reused after the last of these tensors is freed.
    """

    def __init__(self, pool: Pool, nbytes: int, pin: bool = False, device: Any = None) -> None:
        self._host: torch.Tensor | None = None
        if pin or (device is not None and torch.device(device).type == "cuda"):
            # pinned memory comes from torch's allocator, because only it knows which transfers are unfinished
            self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._flat = self._host
        try:
            self.array: Array = pool.lease(nbytes) if self._host is None else self._host.numpy()
        except OSError as exc:
            raise no_memory(nbytes) from exc

    def move(self, device: Any) -> None:
        """Make `view` return tensors on `device`. Cost: one transfer, on a separate stream for a GPU."""
        if device is not None:
            host = view_tensor(self.array, torch.uint8, (len(self.array),)) if self._host is None else self._host
            self._flat = _move(host, torch.device(device))

    def view(self, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
        """Return the bytes from `begin` on as a tensor, or as a numpy array, which is always on the host."""
        if reference.kind == "ndarray":
            return check_array(view_array(self.array, reference.dtype, shape, begin))
        if self._flat is not None:
            nbytes = nbytes_of(reference, shape)
            part = self._flat[begin : begin + nbytes] if nbytes else self._flat.new_empty(0)
            return part.view(reference.dtype).view(shape)
        return view_tensor(self.array, reference.dtype, shape, begin)


_STREAMS: dict[torch.device, Any] = {}


def to_device(tensor: torch.Tensor, pin: bool, device: Any) -> torch.Tensor:
    """Copy a tensor to pinned memory or to a device, as for the tensors of a batch, and return it."""
    tensor = tensor.pin_memory() if pin else tensor
    return tensor if device is None else _move(tensor, torch.device(device))


def _move(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `host` to `device`. For a GPU, a separate stream copies, and the caller's stream waits for it."""
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        # torch keeps a pinned source until the transfer ends; a pageable source is copied before this returns
        moved = host.to(device, non_blocking=True)
    current.wait_stream(stream)
    # the memory belongs to the copying stream, which could otherwise reuse it while the current stream needs it
    moved.record_stream(current)
    return moved
