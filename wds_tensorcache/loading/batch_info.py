"""What a batch of a loader is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["BatchInfo"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What a batch of a loader is.

    Attributes:
        numbers: Of its samples in their cache, int64 `[B]`.
        is_padding: Which rows are there only to fill the batch, and do not count, bool `[B]`, on the loader's device.
        epoch, step: Of the batch; steps are counted through all epochs.
        source: The name of the mixed cache, or the bucket that it is of; else None.
        cache: That the samples are of; None if the batch is from a worker process, which sends their keys alone.
    """

    numbers: Array
    is_padding: torch.Tensor
    epoch: int
    step: int
    source: Any
    cache: Any
    _sent: tuple[str, ...] = field(default=(), repr=False)

    @property
    def keys(self) -> list[str]:
        """The keys of its samples."""
        if self.cache is None:
            return list(self._sent)
        keys = self.cache.keys()
        return [keys[number] for number in self.numbers.tolist()]

    def __reduce__(self) -> Any:
        # no tensor, for which torch would send a file descriptor
        padding = self.is_padding.cpu().numpy()
        return _received, (self.numbers, padding, self.epoch, self.step, self.source, tuple(self.keys))


def _received(numbers: Array, padding: Array, epoch: int, step: int, source: Any, keys: tuple[str, ...]) -> BatchInfo:
    return BatchInfo(numbers, torch.from_numpy(padding), epoch, step, source, None, keys)
