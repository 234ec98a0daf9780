"""What a model returns for a batch, sample by sample, and the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import EncodeError

__all__ = ["Batch"]


class Batch:
    """The samples of a batch: a list of them, or a nest of dicts whose tensors, arrays and lists have a row for each.

    Tensors and arrays are copied: whoever made them may write into them again at once. From a device they are on their way to
    pinned memory, behind what its current stream has to do, and nobody waits for them here.

    Raises:
        EncodeError: It is nested too deeply.
        ValueError: There is not one for each.
    """

    def __init__(self, made: Any, count: int) -> None:
        devices: set[torch.device] = set()

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, (np.ndarray, bytearray)):
                return leaf.copy()
            if not isinstance(leaf, torch.Tensor):
                return leaf  # lazy: of a cache, whose bytes do not change
            if leaf.device.type == "cpu":
                return leaf.detach().clone()
            devices.add(leaf.device)
            return leaf.detach().to("cpu", non_blocking=True)

        def own(value: Any) -> Any:
            if isinstance(value, Mapping):  # of any class
                return {name: own(part) for name, part in value.items()}
            return rebuild(value, copied)

        try:
            _check(made, count)
            self._made, self._count = own(made), count
        except RecursionError:
            raise EncodeError("what fn returned is nested too deeply, or holds itself") from None
        self._events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def rows(self) -> list[Any]:
        """Wait for what is on its way, and return the samples; views of the batch."""
        for event in self._events:
            event.synchronize()
        return list(_rows(self._made, self._count))


def _check(value: Any, count: int, where: str = "what fn returned") -> None:
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check(part, count, f"{where}[{name!r}]")
        return
    if isinstance(value, tuple):
        raise ValueError(f"{where} is a tuple: of several tensors return a dict by name, of samples a list")
    is_sequence = isinstance(value, list) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim)
    if not is_sequence or len(value) != count:
        what = f"{len(value)} rows" if is_sequence else f"a {type(value).__name__}"
        raise ValueError(f"{where} is {what}, expected one for each of {count} items")


def _rows(value: Any, count: int) -> Any:
    if isinstance(value, Mapping):
        parts = {name: _rows(part, count) for name, part in value.items()}
        return [{name: rows[i] for name, rows in parts.items()} for i in range(count)]
    return value
