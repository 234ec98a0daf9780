"""Copies of batches to a GPU, on a separate stream."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wds_tensorcache.codec.tree import ATOMS, children


class _Local(threading.local):
    transfer: Transfer | None = None  # the transfer whose `copying` block this thread executes


_LOCAL = _Local()
_STREAMS: dict[torch.device, Any] = {}
# the methods that return the parts of a sparse tensor
_PARTS = {
    torch.sparse_coo: "_indices _values",
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), "crow_indices col_indices values"),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), "ccol_indices row_indices values"),
}


class Transfer:
    """The copies of one batch to a device.

    A thread that reads ahead makes the batch inside `with transfer.copying():`. The thread that uses the batch calls
    `hand_over` when it receives the batch. Until then, no stream waits for the copies. On any device other than a GPU, both do
    nothing. A device without an index is the current GPU of the calling thread.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = None if device is None else _with_index(torch.device(device))
        self._tensors: dict[int, torch.Tensor] = {}  # by address of their storages
        self._event: Any = None

    @property
    def _is_gpu(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Make this thread's copies part of the transfer. Its other GPU work runs on the same stream."""
        if not self._is_gpu:
            yield
            return
        stream = copying_stream(self.device)
        # When `torch.cuda.stream` ends, it makes the previous device current. In a new thread, that is GPU 0, on which
        # a context of 0.5 GB would be made. So the device becomes current first.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            outer, _LOCAL.transfer = _LOCAL.transfer, self
            try:
                yield
            finally:
                _LOCAL.transfer = outer
            self._event = stream.record_event()

    def add(self, batch: Any) -> None:
        """Add the tensors that a user's function made in the `copying` block."""
        if self._is_gpu:
            for tensor in tensors_in(batch):
                if tensor.is_cuda:
                    self._tensors[tensor.untyped_storage().data_ptr()] = tensor

    def hand_over(self) -> None:
        """Make the caller's current stream wait for the copies. Keep their memory until the stream has used them."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._event)
            for tensor in self._tensors.values():
                # the memory belongs to the copying stream, which could otherwise reuse it while this stream needs it
                tensor.record_stream(stream)
        self._tensors.clear()


def move(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy `host` to `device`, as part of the transfer around the call.

    Without a transfer to this device, the current stream of a GPU waits for the copy. On the CPU, the result is `host` itself.
    """
    device = _with_index(torch.device(device))
    if device.type != "cuda" or not host.numel():
        return host.to(device, non_blocking=device.type == "cuda")
    surrounding = _LOCAL.transfer
    if surrounding is not None and surrounding.device == device:
        # torch keeps a pinned source until the copy ends; a pageable source is copied before this returns
        moved = host.to(device, non_blocking=True)
        surrounding._tensors[moved.untyped_storage().data_ptr()] = moved
        return moved
    transfer = Transfer(device)
    with transfer.copying():
        moved = move(host, device)
    transfer.hand_over()
    return moved


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and objects. A tensor without a storage, such as a sparse one, yields its parts."""
    seen: dict[int, Any] = {}  # the objects are kept so that their ids are not reused
    todo = [value]
    while todo:
        item = todo.pop()
        if item.__class__ in ATOMS or id(item) in seen:
            continue
        seen[id(item)] = item
        todo.extend(children(item))
        if isinstance(item, torch.Tensor):
            parts = _parts(item)
            todo.extend(parts)
            if not parts:
                yield item
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            # `children` does not look into `__slots__`
            todo.extend(getattr(item, attribute.name, None) for attribute in dataclasses.fields(item))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a sparse, nested or wrapping tensor, else []."""
    if is_traceable_wrapper_subclass(tensor):  # for example nested tensors of the layout `torch.jagged`
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    names = "values" if tensor.is_nested else _PARTS.get(tensor.layout, "")
    return [getattr(tensor, name)() for name in names.split()]


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def copying_stream(device: torch.device | str | None) -> Any:
    """Return the stream on which all copies to a GPU run."""
    key = _with_index(torch.device("cuda" if device is None else device))
    stream = _STREAMS.get(key)
    if stream is None:
        # torch has 32 streams of each priority, and hands them out in turn. Training seldom uses a high priority, so copies
        # share no stream with training.
        stream = _STREAMS.setdefault(key, torch.cuda.Stream(key, priority=-1))  # type: ignore[no-untyped-call]
    return stream


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
