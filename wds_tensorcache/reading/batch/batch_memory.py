"""The memory of a batch: allocated, moved to a device, and viewed."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.reference import Reference
from wds_tensorcache.codec.views import check_array, view_array, view_tensor
from wds_tensorcache.reading.batch.placement import nbytes_of, no_memory
from wds_tensorcache.reading.transfer import move
from wds_tensorcache.storage.memory_pool import Pool

Array = np.ndarray[Any, Any]


class _Spent(threading.local):
    """Bytes and transfer times of batches that this thread has read."""

    nbytes = 0
    transfer_s = 0.0


SPENT = _Spent()


class Memory:
    """The memory of a batch: `array` on the host, recycled or pinned. After `move`, it is also on a device.

    Each tensor that `view` returns keeps all bytes alive; recycled memory is reused after the last of these tensors is freed.
    """

    def __init__(self, pool: Pool, nbytes: int, pin: bool = False, device: Any = None) -> None:
        self._host: torch.Tensor | None = None
        is_gpu = device is not None and _is_gpu(device)
        if pin or is_gpu:
            # Pinned memory comes from torch's allocator, because only it knows which transfers are unfinished.
            # The first use of a GPU makes a context of 0.5 GB on the current GPU.
            with torch.cuda.device(device) if is_gpu else nullcontext():
                self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._flat = self._host
        try:
            self.array: Array = pool.lease(nbytes) if self._host is None else self._host.numpy()
        except OSError as exc:
            raise no_memory(nbytes) from exc
        SPENT.nbytes += nbytes

    def move(self, device: Any) -> None:
        """Make `view` return tensors on `device`. Cost: one transfer, on a separate stream for a GPU."""
        began = perf_counter()
        host = view_tensor(self.array, torch.uint8, (len(self.array),)) if self._host is None else self._host
        self._flat = move(host, device)
        SPENT.transfer_s += perf_counter() - began

    def view(self, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
        """Return the bytes from `begin` on as a tensor or array. Arrays are always on the host."""
        if reference.kind == "ndarray":
            return check_array(view_array(self.array, reference.dtype, shape, begin))
        if self._flat is not None:
            nbytes = nbytes_of(reference, shape)
            part = self._flat[begin : begin + nbytes] if nbytes else self._flat.new_empty(0)
            return part.view(reference.dtype).view(shape)
        return view_tensor(self.array, reference.dtype, shape, begin)


def to_device(tensor: torch.Tensor, pin: bool, device: Any) -> torch.Tensor:
    """Return a tensor on `device` if that is not None. With `pin`, or for a GPU, a tensor of the CPU is pinned first."""
    # The source of a copy to a GPU must be pinned. The copy of a pageable tensor would wait for the copies before it.
    if (pin or (device is not None and _is_gpu(device))) and tensor.numel() and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor if device is None else move(tensor, device)


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type == "cuda"
