"""The adapter for trainers that skip batches: accelerate and Hugging Face's Trainer. They resume by skipping used batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from wds_tensorcache.training.loader import Loader
from wds_tensorcache.training.plan import Position


class SkippableLoader:
    """A `tc.Loader` whose batches a trainer can skip without reading them.

        def get_train_dataloader(self):
            return SkippableLoader(tc.Loader(cache, self.args.per_device_train_batch_size, shuffle=True))

    `accelerate.skip_first_batches` uses two attributes of a data loader. Here, `batch_sampler` yields positions of batches, and
    `dataset` reads the batch at a position. A `tc.torch_loader` needs no adapter.

    Threads/fork/pickle: as for `tc.Loader`.
    """

    sampler = prefetch_factor = None

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.batch_sampler, self.dataset = _Positions(loader), _Batches(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, as `Loader.set_epoch` does. Trainers call this method."""
        self.loader.set_epoch(epoch)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch unchanged, because it is already collated."""
        return batch


class _Positions:
    """Positions of the current epoch's batches, with None for used batches."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Position | None]:
        plan, at = self._loader.sampler._plan, self._loader.sampler._beginning()
        # a None for each used step, because trainers count from the beginning of the epoch
        yield from itertools.repeat(None, at.step - at.began)
        while not plan.is_over(at):
            yield at
            _, at = plan.step(at)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _Batches(Dataset[Any]):
    """The batches of a loader by position. Reading a batch that does not come next moves the loader to its position."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._running: Iterator[Any] = iter(())
        self._num_moves = -1  # of the sampler, at the last batch

    def __getitem__(self, at: Position | None) -> Any:
        sampler = self._loader.sampler
        if at is None:
            raise ValueError("the loaded state has used more batches of the epoch than the trainer skips")
        # not the whole positions, because `set_weights` changes which cache the scheduled steps of a mix use
        is_next = self._num_moves == sampler._num_moves and sampler._position.step == at.step
        if not is_next or at.step == at.began:
            sampler._move(at, is_resumed=True)
            self._running = iter(self._loader)
        batch = next(self._running)
        self._num_moves = sampler._num_moves
        return batch

    __getitems__ = __getitem__  # torch calls this for each item of a batch sampler
