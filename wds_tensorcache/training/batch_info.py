"""What a batch of a loader is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from wds_tensorcache.training.steps import Step

__all__ = ["BatchInfo", "info_of"]

Array = np.ndarray[Any, Any]


class BatchInfo:
    """Immutable record of what a batch of a loader is.

    It is not a dataclass: trainers rebuild each dataclass field by field, which an immutable one does not allow. Instead they
    call its `to`, as they do with a tensor.

    Attributes:
        indices: Sample indices in the cache, int64 `[B]`.
        is_padding: Rows that are there only to fill the batch, and do not count, bool `[B]`, on the loader's device.
        epoch, step: Epoch and step of the batch; steps are counted through all epochs.
        source: Name of the mixed cache, or the bucket, that the batch is from; else None.
        cache: Cache that the samples are from; None if the batch is from a worker process, which sends their keys alone.

    Threads/fork/pickle: immutable, safe everywhere; a copy has the keys in place of the cache. Equal if everything but the
        cache is.
    """

    __slots__ = ("_sent", "cache", "epoch", "indices", "is_padding", "source", "step")

    indices: Array
    is_padding: torch.Tensor
    epoch: int
    step: int
    source: Any
    cache: Any
    _sent: tuple[str, ...]

    def __init__(
        self,
        indices: Array,
        is_padding: torch.Tensor,
        epoch: int,
        step: int,
        source: Any,
        cache: Any,
        _sent: tuple[str, ...] = (),
    ) -> None:
        fields = {"indices": indices, "is_padding": is_padding, "epoch": epoch, "step": step, "source": source}
        for name, value in (fields | {"cache": cache, "_sent": _sent}).items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a BatchInfo is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a BatchInfo is immutable")

    @property
    def keys(self) -> list[str]:
        """The keys of its samples."""
        if self.cache is None:
            return list(self._sent)
        keys = self.cache.keys()
        return [keys[index] for index in self.indices.tolist()]

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> BatchInfo:
        """Return a record whose `is_padding` is on `device`: Lightning and accelerate move it so, with the batch."""
        is_padding = self.is_padding.to(device, non_blocking=non_blocking)
        return BatchInfo(self.indices, is_padding, self.epoch, self.step, self.source, self.cache, self._sent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchInfo):
            return NotImplemented
        return (
            (self.epoch, self.step, self.source) == (other.epoch, other.step, other.source)
            and np.array_equal(self.indices, other.indices)
            and torch.equal(self.is_padding.cpu(), other.is_padding.cpu())
            and self.keys == other.keys
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ("indices", "is_padding", "epoch", "step", "source", "cache")
        return f"BatchInfo({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __reduce__(self) -> Any:
        # no tensor, for which torch would send a file descriptor
        padding = self.is_padding.cpu().numpy()
        return _received, (self.indices, padding, self.epoch, self.step, self.source, tuple(self.keys))


def _received(indices: Array, padding: Array, epoch: int, step: int, source: Any, keys: tuple[str, ...]) -> BatchInfo:
    return BatchInfo(indices, torch.from_numpy(padding), epoch, step, source, None, keys)


def info_of(step: Step, names: Sequence[Any], cache: Any, device: torch.device | str | None = None) -> BatchInfo:
    """Return the record of a step's batch; `names` has that of each stream."""
    padding = torch.from_numpy(step.is_padding)
    padding = padding if device is None else padding.to(device)
    return BatchInfo(step.indices, padding, step.epoch, step.number, names[step.stream], cache)
