"""torch's `DataLoader` over steps: worker processes read whole batches, and the state is exact in the main process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.reading.batch.assemble import check_collate
from wds_tensorcache.training.base_loader import BaseLoader
from wds_tensorcache.training.batch_info import info_of
from wds_tensorcache.training.step_sampler import StepOptions, StepSampler
from wds_tensorcache.training.steps import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["StepDataset", "TorchLoader", "torch_loader"]


class StepDataset(Dataset[Any]):
    """A map-style dataset whose items are batches: `dataset[step]` reads a step of a `StepSampler`.

    Args:
        sampler: Sampler whose caches are read.
        collate, pad_value: As of `read_batch`.
        with_info: Return pairs of a batch and its `BatchInfo`; that of a worker process has the keys in place of the cache.

    Threads/fork/pickle: for fork and spawn; workers read the caches, and know nothing of the sampler's position.
    """

    def __init__(
        self, sampler: StepSampler, *, collate: Any = "stack", pad_value: Any = 0, with_info: bool = False
    ) -> None:
        check_collate(collate)
        self.sampler: StepSampler | None = sampler
        # processes share the cores: no threads in each
        self._caches = [cache._single_threaded() for cache in sampler._caches]
        self._options = {"collate": collate, "pad_value": pad_value}
        self._names = sampler._names if with_info else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sampler": None}

    def __getitem__(self, step: Step) -> Any:
        if not isinstance(step, Step):
            raise TypeError(
                f"a StepDataset has steps, not samples: {step!r:.200} is none; give its data loader the sampler"
            )
        cache = step.cache_of(self._caches)
        batch = cache.read_batch(step.indices, **self._options)
        return batch if self._names is None else (batch, info_of(step, self._names, cache))

    __getitems__ = __getitem__  # what torch calls for a batch sampler's item


def torch_loader(
    cache: Any = None,
    batch_size: int = 1,
    *,
    num_workers: int = 0,
    collate: Any = "stack",
    pad_value: Any = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: Any = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], Any] | None = None,
    **steps: Unpack[StepOptions],
) -> TorchLoader:
    """Return a torch `DataLoader` of a cache's batches with an exact state.

    `tc.Loader` needs no workers; this is for trainers that want a `DataLoader`, and for Python code in `collate`.

    Args:
        cache, batch_size: As of `StepSampler`.
        collate, pad_value: As of `read_batch`; a function for `collate` is called in the workers.
        num_workers, pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, timeout, worker_init_fn: As of
            `torch.utils.data.DataLoader`.
        steps: `shuffle`, `seed`, `rank`, `world_size`, `group`, `last_batch`, `weights`, `mix`, `bucket_by`, `window`: as of
            `StepSampler`.

    Raises:
        ValueError: Arguments exclude each other, or are out of range.
    """
    if num_workers == 0 and timeout > 0:
        raise ValueError(f"timeout={timeout} is for worker processes, and num_workers=0: leave it out")
    if prefetch_factor is not None and num_workers > 0 and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor={prefetch_factor}, expected at least 1")
    return TorchLoader(
        StepDataset(StepSampler(cache, batch_size, **steps), collate=collate, pad_value=pad_value),
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
    )


class TorchLoader(BaseLoader, DataLoader[Any]):
    """torch's `DataLoader` that `torch_loader` returns, with the state of the last batch given.

    `state_dict` and `load_state_dict` are exact for any number of workers, before and after, and take and give the states of
    `tc.Loader`. An error in a worker ends the iteration, and is raised here as the worker saw it; the position stays that of
    the last batch given.

    Lightning takes it as it is, with `Trainer(use_distributed_sampler=False)` on several ranks, as each rank has its own
    batches already; it saves and restores the state. accelerate makes a `DataLoader` of its own of the sampler and the
    dataset: its state is exact with `use_stateful_dataloader=True`. On several ranks, do not `prepare` it.

    Threads/fork/pickle: one thread iterates, in the process that made it.
    """

    def __init__(self, dataset: StepDataset, *, batch_sampler: Any = None, **options: Any) -> None:
        """As `torch.utils.data.DataLoader`, so that trainers can make another one of it.

        Raises:
            TypeError: `dataset` is no `StepDataset`.
        """
        if not isinstance(dataset, StepDataset) or dataset.sampler is None:
            raise TypeError(f"dataset={dataset!r:.200}, expected a StepDataset")
        self._plan = dataset.sampler
        batch_sampler = self._plan if batch_sampler is None else batch_sampler  # or Lightning's, which wraps it
        super().__init__(dataset, batch_sampler=batch_sampler, **{"collate_fn": _same} | options)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Any:
        return self._begin(with_info=False)

    def _make_iterator(self, *, with_info: bool) -> _Batches:
        self._plan._move(self._plan._beginning(), is_resumed=True)  # until a batch is given
        batches = _Batches(self, with_info=with_info)
        self._plan._leader = weakref.ref(batches)
        batches.inner = DataLoader.__iter__(self)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch given; for JSON, and the same on all ranks.

        Raises:
            RuntimeError: Another data loader was made of the sampler, and has given batches since.
        """
        if self._plan._is_elsewhere:
            raise RuntimeError("another data loader iterates over the sampler of this one, and has the state")
        return super().state_dict()

    def close(self) -> None:
        """End the iteration and the worker processes; the position is kept, and the caches stay open."""
        super().close()
        self._iterator = None  # torch's, which has the workers that persist


class _Batches(Iterator[Any]):
    """An epoch's batches in order; the last line before a batch is returned moves the position."""

    def __init__(self, loader: TorchLoader, *, with_info: bool) -> None:
        self._loader, self._with_info = loader, with_info
        self.inner: Any = None  # torch's
        self._plan, self._number = loader._plan, loader._num_iterations
        self._num_moves = self._plan._num_moves
        self._num_ahead = loader.num_workers * (loader.prefetch_factor or 0)

    @property
    def planned(self) -> int:
        """First step that no worker was asked for."""
        return self._plan._position.step + self._num_ahead

    def __next__(self) -> Any:
        plan = self._plan
        self._loader._check_current(self._number)
        if self.inner is None or self._num_moves != plan._num_moves:
            raise StopIteration
        try:
            given = next(self.inner)
            step, after = plan._step(plan._position)
            after = plan._settled(after)
            if self._with_info:
                given = given, plan._info(step)
        except StopIteration:
            self.close()
            raise
        except Exception as caught:
            self._loader.close()
            if self._loader.num_workers == 0:
                raise
            # Hazard: one of torch's frames refers to the error, a circle in which the workers would live on, until a
            # forked child collects it, and tries to end them. Their traceback is in the text.
            exc = caught.with_traceback(None)
            if isinstance(exc, (TensorCacheError, OSError)):
                # torch makes another error of the worker's text alone: without kind, offset and errno
                self._loader.dataset[plan._step(plan._position)[0]]
            raise exc from None
        except BaseException:
            self._loader.close()
            raise
        # Hazard: an interrupt after a call here would lose the batch. So no calls from here on.
        plan._is_resumed = False
        plan._position = after
        return given

    def close(self) -> None:
        self.inner = None
        if self._plan._leader is not None and self._plan._leader() is self:
            self._plan._leader = None


def _same(batch: Any) -> Any:
    return batch
