"""A torch `DataLoader` with an exact state. Worker processes read the batches; the main process keeps the state."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Sequence
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wds_tensorcache.arguments import check_options
from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.reading.choose import Choose
from wds_tensorcache.reading.collate import collate_for
from wds_tensorcache.storage.urls import WRITABLE
from wds_tensorcache.training.loader import BaseLoader, Read
from wds_tensorcache.training.options import REMEDIES, StepOptions
from wds_tensorcache.training.plan import Step
from wds_tensorcache.training.sampler import StepSampler, show_step_options
from wds_tensorcache.training.stats import LoaderStats
from wds_tensorcache.training.step_reader import Transform, apply_transforms, as_transforms

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StepDataset(Dataset[Any]):
    """A map-style dataset of the batches of a `StepSampler`. `dataset[step]` reads the batch of one step.

    It has no length, and reads into host memory. Pass it to a data loader with its sampler, and with `batch_size=None`.

    Args:
        sampler: Sampler of the caches to read.
        collate, pad_value: As for `read_batch`.
        choose, transform: As for `tc.Loader`; the process that reads a batch calls `transform`, usually a worker.
        with_info: Return pairs of a batch and its `BatchInfo`. A `BatchInfo` from a worker process contains keys, shapes and
            choices in place of the cache.

    Raises:
        TypeError: `sampler` is not a `StepSampler`, or a transform is not a function.
        ValueError, BatchError: `collate`, `pad_value` or `choose` is wrong, as for `tc.Loader`.

    Raises (when indexed):
        TypeError: The index is not a `Step`.
        ValueError: The sampler's loader has a state, and a trainer skips fewer batches than the state has used.
        RuntimeError, TensorCacheError: A transform failed, as for `tc.Loader`.
        And the errors of `read_batch`.

    Threads/fork/pickle: works with fork and spawn. Workers read the caches; they do not know the sampler's position.
    """

    def __init__(
        self,
        sampler: StepSampler,
        *,
        collate: Any = "stack",
        pad_value: Any = 0,
        choose: Choose | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        with_info: bool = False,
    ) -> None:
        if not isinstance(sampler, StepSampler):
            raise TypeError(f"expected a tc.StepSampler of the cache, got {type(sampler).__name__}")
        reader = sampler._reader(choose)
        collate = collate_for(sampler._plan.caches, collate, pad_value, reader.alternatives.names)
        self.sampler: StepSampler | None = sampler
        # worker processes share the cores, so each process reads without threads
        self._reader = reader.single_threaded()
        self._options = {"collate": collate, "pad_value": pad_value}
        self._transforms = as_transforms(transform)
        self._with_info = with_info
        self._checks_edits = False  # `TorchLoader.with_info` must know of all changes of shapes

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sampler": None}

    def __getitem__(self, step: Step) -> Any:
        if step is None:
            raise ValueError("the loaded state has used more batches of the epoch than the trainer skips")
        if not isinstance(step, Step):
            raise TypeError(
                f"a StepDataset is indexed by a Step, got {step!r:.200}; pass its sampler to the data loader"
            )
        batch = self._reader.read(step, self._options)
        if not self._with_info and not self._transforms:
            return batch
        info = self._reader.info(step, collate=self._options["collate"])
        batch = apply_transforms(batch, info, self._transforms)
        if self._checks_edits and not all(any(edit is listed for listed in self._transforms) for edit in info._edits):
            raise ValueError(
                f"a function in transform= called {info._edits[0]!r:.100}, so info.mask and info.shapes would be wrong: "
                "pass what it called in the list, as transform=[tc.drop_text(…), …], or use tc.Loader"
            )
        if not self._with_info:
            return batch
        # a transform may have changed the mask of the first record
        info = self._reader.info(step, collate=self._options["collate"], edits=info._edits)
        # in a worker, an error during pickling would not reach the caller, and the loop would hang; copy here, as pickle does
        return batch, info if get_worker_info() is None else copy(info)

    __getitems__ = __getitem__  # torch calls this for each item of a batch sampler


@show_step_options
def torch_loader(
    cache: Any = None,
    batch_size: int = 1,
    *,
    num_workers: int = 0,
    collate: Any = "stack",
    pad_value: Any = 0,
    choose: Choose | None = None,
    transform: Transform | Sequence[Transform] | None = None,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: Any = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], Any] | None = None,
    on_early_exit: str = "next_epoch",
    **steps: Unpack[StepOptions],
) -> TorchLoader:
    """Return a torch `DataLoader` of a cache's batches with an exact state.

    Prefer `tc.Loader`, which needs no workers. This function is for trainers that require a `DataLoader`, and for a `collate`
    with Python code that workers should run in parallel.

    Args:
        cache, batch_size: As for `StepSampler`.
        collate, pad_value: As for `read_batch`; if `collate` is a function, the workers call it.
        choose, transform, on_early_exit: As for `tc.Loader`; the workers call `transform`, with batches in host memory. Without
            workers, the process of the loop reads each batch on request, and calls `transform` and `collate`.
        num_workers, pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, timeout, worker_init_fn: As for
            `torch.utils.data.DataLoader`. Workers that read from s3, gs or az are started by `forkserver` by default, since
            obstore does not work in forked processes. `transform`, `collate` and `worker_init_fn` must then be picklable.
        steps: Options of `StepSampler`, such as `shuffle`, `seed` and `bucket_by`.

    Raises:
        ValueError: Arguments are mutually exclusive, or out of range. Also in a loop over `with_info()`, if a function in
            `transform` calls a transform that changes shapes.
        TypeError: An option is unknown. Also when iterating, if an argument cannot be pickled for the workers.
        KeyError, BatchError, RuntimeError: As for `StepSampler` and `tc.Loader`. A RuntimeError from a worker has no
            `__cause__`; its text contains the worker's traceback.
    """
    check_options(torch_loader, steps, StepOptions.__annotations__, REMEDIES)
    if num_workers == 0 and timeout > 0:
        raise ValueError(f"timeout={timeout} applies only to worker processes, but num_workers=0; leave it out")
    if prefetch_factor is not None and num_workers > 0 and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor={prefetch_factor}, expected at least 1")
    sampler = StepSampler(cache, batch_size, **steps)
    sampler._set_early_exit(on_early_exit)
    return TorchLoader(
        StepDataset(sampler, collate=collate, pad_value=pad_value, choose=choose, transform=transform),
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
    )


class TorchLoader(BaseLoader, DataLoader[Any]):
    """torch's `DataLoader` with a state that follows the last returned batch. `torch_loader` makes it.

    The state is exact for any number of workers, before and after resuming, and `tc.Loader` accepts it too. An error in a
    worker ends the iteration, and is raised in the main process. Errors of this package and OSError keep their attributes. Any
    other error from a worker has no `__cause__`, but the worker's traceback in its text. The position stays after the last
    returned batch.

    Lightning saves and restores the state. accelerate's `prepare` returns this loader, on any number of ranks. From then on,
    its batches are on accelerate's device, and accumulated gradients are used at the end of each epoch.

    Threads/fork/pickle: used by one thread, in the process that made the loader.
    """

    # accelerate reads these attributes while it accumulates gradients
    end_of_dataloader = False
    remainder = -1
    _is_prepared = False  # by accelerate

    def __init__(self, dataset: StepDataset, *, batch_sampler: Any = None, **options: Any) -> None:
        """Make a `DataLoader` over steps. Trainers call the class to re-create the loader with their own options.

        Raises:
            TypeError: `dataset` is not a `StepDataset`.
        """
        if not isinstance(dataset, StepDataset) or dataset.sampler is None:
            raise TypeError(f"dataset={dataset!r:.200}, expected a StepDataset")
        self._sampler, self._collate, self._stats = dataset.sampler, dataset._options["collate"], LoaderStats()
        self._reader = self._sampler._reader(dataset._reader.alternatives)
        # workers do not send which transforms have changed shapes
        self._edits = [transform for transform in dataset._transforms if hasattr(transform, "edit_shapes")]
        batch_sampler = self._sampler if batch_sampler is None else batch_sampler  # or Lightning's, which wraps it
        paths = chain.from_iterable(cache._paths() for cache in self._sampler._plan.caches)
        if options.get("num_workers") and any(path.partition("://")[0] in WRITABLE for path in paths):
            # obstore does not work in a child that was forked after its first use
            options["multiprocessing_context"] = options.get("multiprocessing_context") or "forkserver"
        super().__init__(dataset, batch_sampler=batch_sampler, **{"collate_fn": _same} | options)
        # Lightning and accelerate would distribute the steps of this rank among all ranks again without these attributes.
        vars(self)["sampler"] = self._sampler  # a DistributedSampler

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Always True, so that accelerate's `prepare` returns this loader unchanged."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Note that accelerate's `prepare` has returned this loader."""
        self._is_prepared = value

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_iterator": None}  # it owns the persistent workers

    def __iter__(self) -> Any:
        return self._begin(with_info=False)

    def _read_batches(self, with_info: bool) -> Generator[Read, None, None]:
        dataset: Any = self.dataset
        if dataset._checks_edits != with_info:
            # persistent workers have a copy of the old value
            dataset._checks_edits, self._iterator = with_info, None
        return self._accelerated(self._read_steps()) if self._is_prepared else self._read_steps()

    def _accelerated(self, reads: Generator[Read, None, None]) -> Generator[Read, None, None]:
        """Yield the batches on accelerate's device, and mark the last batch."""
        from accelerate.state import GradientState, PartialState
        from accelerate.utils import send_to_device

        device, gradients = PartialState().device, GradientState()
        end = self._sampler._end_of_loop(self._sampler._position)
        gradients._add_dataloader(self)
        try:
            for read in reads:
                # after the last batch, accelerate must use all accumulated gradients
                self.end_of_dataloader = read.after.step == end
                read.batch[0] = send_to_device(read.batch[0], device)
                yield read._replace(is_padding=torch.from_numpy(read.step.is_padding).to(device))
        finally:
            reads.close()
            self.end_of_dataloader = False
            gradients._remove_dataloader(self)

    def _read_steps(self) -> Generator[Read, None, None]:
        scheduled = self._scheduled = self._sampler._scheduled = deque()
        try:
            try:
                batches: Any = DataLoader.__iter__(self)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                self._check_pickles(error)
                raise
            while True:
                try:
                    batch = [next(batches)]
                except StopIteration:
                    return
                except BaseException as caught:
                    self._iterator = None  # torch's iterator, which owns the persistent workers
                    if not isinstance(caught, Exception):
                        raise
                    # A frame of torch in the traceback refers to the error. This cycle would keep the workers alive
                    # until a forked child collects it and tries to end them. The worker's traceback is in the error's text.
                    batches, exc = None, caught.with_traceback(None) if self.num_workers else caught
                    if self.num_workers and isinstance(exc, (TensorCacheError, OSError)):
                        # torch re-creates the error from its text alone; reading again raises it with kind, offset and errno
                        self.dataset[scheduled[0][0]]
                    raise exc from None
                step, after = scheduled.popleft()
                yield Read(step, after, batch, edits=self._edits)
        finally:
            if self._sampler._scheduled is scheduled:
                self._sampler._scheduled = None
            scheduled.clear()

    def _check_pickles(self, exc: Exception) -> None:
        """Raise TypeError if an argument cannot be sent to workers."""
        options = {
            "collate": self._collate,
            "transform": self.dataset._transforms,  # type: ignore[attr-defined]
            "worker_init_fn": self.worker_init_fn,
        }
        for name, value in options.items():
            try:
                pickle.dumps(value)
            except Exception:
                raise TypeError(
                    f"{name}= of torch_loader cannot be sent to worker processes: {exc}. Define the function with def at the "
                    "top of a module, not as a lambda or inside a function; or use multiprocessing_context='fork', "
                    "num_workers=0, or tc.Loader"
                ) from exc

    def close(self) -> None:
        """End the iteration and the worker processes. The position is kept, and the caches stay open."""
        super().close()
        self._iterator = None


def _same(batch: Any) -> Any:
    return batch
