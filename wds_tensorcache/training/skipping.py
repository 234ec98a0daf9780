"""The parts of a loader that trainers ask for when they skip batches, as accelerate's `skip_first_batches` does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from wds_tensorcache.training.steps import Position

if TYPE_CHECKING:
    from wds_tensorcache.training.base_loader import BaseLoader

__all__ = ["LoaderBatches", "LoaderPositions"]


class LoaderPositions:
    """A batch sampler: the positions of a loader's batches in the epoch of its next batch. Skipping them reads nothing.

    The steps of the epoch that a loaded state has used come first, as None, because trainers count from the epoch's beginning.
    """

    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Position | None]:
        plan = self._loader._plan
        at = plan._beginning()
        yield from itertools.repeat(None, at.step - at.began)
        while not plan._course.is_over(at):
            yield at
            _, at = plan._course.step(at)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin the given epoch; trainers call it."""
        self._loader.set_epoch(epoch)


class LoaderBatches(Dataset[Any]):
    """A dataset whose items are the batches of a loader, by position. The first one moves the loader to its position."""

    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader
        self._running: Iterator[Any] | None = None

    def __getitem__(self, at: Position | None) -> Any:
        plan = self._loader._plan
        if at is None:
            raise ValueError("the loaded state has used more batches of the epoch than the trainer skips")
        if self._running is None or at.step == at.began or plan._position != at:
            plan._move(at, is_resumed=True)
            self._running = iter(self._loader)
        return next(self._running)

    __getitems__ = __getitem__  # torch calls this for each item of a batch sampler
