"""What a batch of a loader is."""

from __future__ import annotations

from dataclasses import dataclass
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
        is_padding: Which rows are there only to fill the batch, and do not count, bool `[B]`, on the CPU.
        epoch, step: Of the batch; steps are counted through all epochs.
        source: The name of the mixed cache, or the bucket that it is of; else None.
        cache: That the samples are of.
    """

    numbers: Array
    is_padding: torch.Tensor
    epoch: int
    step: int
    source: Any
    cache: Any

    @property
    def keys(self) -> list[str]:
        """The keys of its samples."""
        keys = self.cache.keys()
        return [keys[number] for number in self.numbers.tolist()]
