"""Batches for training, read ahead by threads, and states for checkpoints."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from threading import current_thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from wds_tensorcache.arguments import as_int, check_options
from wds_tensorcache.codec.lazy import check_device
from wds_tensorcache.reading.batch.batch_memory import SPENT, to_device
from wds_tensorcache.reading.batch_info import BatchInfo
from wds_tensorcache.reading.batches_ahead import NUM_THREADS, BatchesAhead, remote_url
from wds_tensorcache.reading.choose import Choose
from wds_tensorcache.reading.collate import collate_for
from wds_tensorcache.reading.transfer import Transfer, copying_stream
from wds_tensorcache.storage.remote.fetch import COUNTS
from wds_tensorcache.storage.threads import Threads
from wds_tensorcache.training.options import REMEDIES, StepOptions
from wds_tensorcache.training.plan import Position, RowCounts, Step
from wds_tensorcache.training.sampler import StepSampler, show_step_options
from wds_tensorcache.training.stats import LoaderStats, Timing
from wds_tensorcache.training.step_reader import StepReader, Transform, apply_transforms, as_transforms

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NUM_THREADS = _PREFETCH_BATCHES = 2
_THREAD_NAME = "tensorcache-loader"
_LEFT_WAITS_S = 1.0  # limit of an abandoned loop's wait for its threads: a server may not answer for minutes


class Read(NamedTuple):
    """A batch that was read ahead, with its step and times."""

    step: Step
    after: Position  # after the step
    batch: list[Any]  # contains the batch, which the loop takes out, so that nothing else keeps its memory
    is_padding: torch.Tensor | None = None  # on the loader's device; if None, `StepReader.info` makes it on the CPU
    edits: Sequence[Any] = ()  # transforms that have changed shapes
    timing: Any = None  # times of the batch's stages; None if they are unknown
    transfer: Any = None  # copies of the batch to a GPU; the thread that iterates must call `hand_over`


class BaseLoader(ABC):
    """Base class of the loaders. It iterates over the steps of a `StepSampler`, whose position follows the batches returned."""

    _sampler: StepSampler
    _collate: Any = None  # the argument `collate`, for `BatchInfo.mask`
    _reader: StepReader
    _stats: LoaderStats
    _current: object = None  # identity of the last iteration; None if it was closed
    _reads: Generator[Read, None, None] | None = None
    # steps whose batches were not returned yet, each with the position after it
    _scheduled: deque[tuple[Step, Position]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_current": None, "_reads": None, "_scheduled": None}  # a copy has no iteration

    def __len__(self) -> int:
        """Return the number of batches in an epoch, equal on all ranks."""
        return len(self._sampler)

    def __repr__(self) -> str:
        stats = f"\n  {self._stats}" if self._stats.num_batches else ""
        return f"{type(self).__name__}{repr(self._sampler).removeprefix('StepSampler')}{stats}"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch in this iteration.

        After the last batch of an epoch, it is the next epoch. After a loop that was abandoned within an epoch, a new iteration
        begins the epoch after this one, unless `on_early_exit` is `"continue"`.
        """
        return self._sampler.epoch

    @property
    def num_batches_left(self) -> int:
        """Number of batches left in `epoch`, equal on all ranks.

        After the last batch of an epoch, it is the number of batches of the next epoch. After loading a state that was saved
        with another batch size, `len(loader) - num_batches_left` is the used part of the epoch in batches of this loader's
        size.
        """
        self._sampler._find_rank()
        return self._sampler._plan.num_steps(self._sampler._position)

    def count_rows(self) -> RowCounts:
        """Count the rows and dropped samples of an epoch over all ranks."""
        return self._sampler.count_rows()

    def stats(self) -> LoaderStats:
        """Return the times and bytes of all batches returned so far.

        They are sums over all loops. The result is a copy, which later batches do not change.
        """
        return replace(self._stats)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin the given epoch; see `StepSampler.set_epoch`.

        The call ends the current iteration, unless it is at the beginning of that epoch. An iteration from which no batch was
        requested yet begins that epoch. With `on_early_exit="continue"`, the call has no effect after the first batch.
        """
        self._sampler.set_epoch(epoch)

    def with_info(self) -> Iterable[tuple[Any, BatchInfo]]:
        """Return an iterable of pairs `(batch, BatchInfo)`, to use like the loader."""
        return _WithInfo(self)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or continue after the last batch returned.

        It continues after `load_state_dict`, or with `on_early_exit="continue"`. An earlier iteration ends.
        """
        return self._begin(with_info=False)

    def _begin(self, *, with_info: bool) -> Iterator[Any]:
        BaseLoader.close(self)  # a TorchLoader keeps its persistent workers
        self._current = iteration = object()
        return self._iterate(iteration, os.getpid(), with_info=with_info)

    def _iterate(self, iteration: object, pid: int, *, with_info: bool) -> Generator[Any, None, None]:
        """Yield the batches of a loop, which any thread may close."""
        # the epoch begins when the first batch is requested, because Lightning calls `set_epoch` after `iter`
        sampler, given_at, num_moves = self._sampler, None, -1
        reads: Generator[Read, None, None] | None = None
        try:
            while True:
                asked_at = perf_counter()
                if self._current is None:
                    return
                if self._current is not iteration:
                    raise RuntimeError("another iteration of this loader has begun, which ended this iteration")
                if os.getpid() != pid:
                    raise RuntimeError("this iteration belongs to the process that began it; begin an iteration here")
                if reads is not None and num_moves != sampler._num_moves:
                    return
                if reads is None:
                    # until a batch is returned, another iteration would also begin here
                    sampler._move(sampler._beginning(), is_resumed=True)
                    num_moves = sampler._num_moves
                    reads = self._reads = self._read_batches(with_info)
                sampler._before = sampler._position
                try:
                    read = next(reads, None)
                    if read is not None and with_info:
                        record = read.step, read.is_padding, self._collate, read.edits
                        read.batch[0] = read.batch[0], self._reader.info(*record)
                except Exception:
                    if self._current is iteration:
                        raise
                    return  # another thread has closed the iteration, in which reading fails
                if read is None or self._current is not iteration:
                    return
                given_at = self._stats._count(asked_at, given_at, read.timing)
                # the state counts exactly the batches that the caller received
                sampler._is_resumed = False
                sampler._position = read.after
                yield read.batch.pop()
        finally:
            if reads is not None:
                try:  # noqa: SIM105  # at the end of the interpreter, names of modules are gone
                    reads.close()
                except ValueError:  # the generator is executing: another thread closes it
                    pass

    @abstractmethod
    def _read_batches(self, with_info: bool) -> Generator[Read, None, None]:
        """Yield the batches from the sampler's position on; update `_scheduled`."""

    def set_weights(self, weights: Any) -> int:
        """Change the weights for all steps that are not scheduled yet.

        `weights` contains the weights of all samples, or of all caches in a mix (`{"a": 0.5, …}`). `{"a": […]}` changes the
        weights of the samples in a cache of the mix, if the loader was made with weights of the samples in that cache.

        In an iteration, `prefetch_batches` steps of the same loop are scheduled after the last batch returned. By default, 32
        steps are scheduled if shards are at urls, however many batches are read ahead. In a `torch_loader`, the number is
        `num_workers * prefetch_factor`. Without threads or workers, no step is scheduled. So ranks that change the weights at
        the same step also use the new weights from the same step on. A state contains the weights at the time of `state_dict`.
        So a run that resumes before the first step with new weights uses them at once.

        Returns:
            Number of the first step with the new weights.

        Raises:
            ValueError: The loader has no weights, or the new weights do not match it; nothing is changed then.
        """
        self._sampler._plan.weights.change(weights)
        return self._scheduled[-1][1].step if self._scheduled else self._sampler._position.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch returned, equal on all ranks.

        It is a dict for JSON. It contains the loader's weights, if the loader has any. The first call reads all keys of the
        caches, because the state contains a hash of them.

        Raises:
            RuntimeError: Another data loader has begun to iterate over this loader's sampler, so only that data loader has
                the state.
        """
        if self._sampler._is_elsewhere:
            raise RuntimeError(
                "another data loader iterates over this loader's sampler: save that data loader's state. If accelerate's "
                "skip_first_batches made it, it has none: to resume, load this loader's state instead of skipping batches"
            )
        return self._sampler._plan.state(self._sampler._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch of a state.

        The current iteration ends; the next one continues. The loader keeps its batch size, number of ranks and `last_batch`,
        and takes over the state's weights; call `set_weights` afterwards to change them.

        Raises:
            ValueError: The state is damaged, has another version, or belongs to a loader with other samples or options, such as
                `seed`, `shuffle`, `mix` or `bucket_by`. Nothing is changed then.
        """
        plan = self._sampler._plan
        # a larger step may not fit into the rest of the epoch
        self._sampler._move(plan.settle(plan.load(state)), is_resumed=True)

    def close(self) -> None:
        """End the iteration and its threads. The position is kept, and the caches stay open.

        The ended iteration yields no further batch. The next one begins as after an abandoned loop.
        """
        self._current = None
        reads, self._reads = self._reads, None
        if reads is not None:
            # the generator is executing: `next` in another thread ends it, or the code that called this method
            with suppress(ValueError):
                reads.close()


class _WithInfo:
    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loader._begin(with_info=True)


class Loader(BaseLoader):
    """The batches of a cache for training, read ahead by threads.

    Batches are as `read_batch` returns them. Each loop `for batch in loader`, or `for batch, info in loader.with_info()`, is
    an epoch. `state_dict` returns the state after the last batch returned; a loader with another batch size or number of ranks
    can load it.

    Args:
        cache, batch_size: As in `StepSampler`; by default, a batch has one sample.
        device, pin_memory, collate, pad_value: As in `read_batch`.
        choose: Alternatives as in `read_batch`. One alternative is chosen for each sample, with equal probability, or by
            weight. The choice is a pure function of seed, epoch and sample index, so it does not depend on batch size and
            ranks, and resumes exactly. `info.choices` contains the choices.
        transform: Function of a batch and its `BatchInfo` that returns the batch, or a list of such functions, which run in
            order. They run in the loader's threads, several batches at the same time.
        num_threads: Number of batches to read at the same time, at most `prefetch_batches + 1`. 0 reads each batch on request
            in the caller's thread, and nothing ahead. The default is 2. If shards are at urls, it is 16, because the threads
            wait for requests most of the time.
        prefetch_batches: Number of batches to read ahead. The default is 2. If shards are at urls, it begins with 4. While
            training waits for requests, it grows up to 32 batches or 1 GiB, as the server's latency and rate require. After
            eight batches in a row that needed no request, it is 2, and may grow again.
        on_early_exit: Start of a loop after an abandoned loop: `"next_epoch"`, or `"continue"`, after the last batch returned.
            With `"continue"`, each loop has `len(loader)` batches unless it is abandoned, also across the end of an epoch.
            `set_epoch` then has no effect after the first batch.
        steps: Options of `StepSampler`: `shuffle`, `seed`, `bucket_by` and all others.

    Raises:
        ValueError, KeyError: As for `StepSampler`; or `collate` or `on_early_exit` is unknown, `choose` has a wrong form, or a
            number is out of range.
        TypeError: As for `StepSampler`; or a transform is not a function, a name in `collate` or `pad_value` is not a string,
            or an option is unknown.
        BatchError: A name or pattern in `collate` or `pad_value` matches no tensor, or in `choose` neither a tensor nor a value
            of the first sample.

    Raises (when a batch is requested):
        RuntimeError: A transform failed or returned None. The message names the step, and `__cause__` is the transform's
            error. Or another iteration has begun, or this one began in another process.
        TensorCacheError: A transform raised it; a note names the transform and the step.
        And the errors of `read_batch`.

    Memory: `prefetch_batches + 1` batches, besides the batches that the caller keeps. On a GPU, a batch keeps its memory until
        the work that was queued on it has ended. If the CPU runs several steps ahead of the GPU, as many more batches are in
        memory.
    Threads/fork/pickle: one thread iterates, and any thread may call `close`. Abandoning an iteration, or calling `close`,
        ends its threads; the next iteration begins as `on_early_exit` says. A forked child cannot continue its parent's
        iteration, but may begin one. A loader cannot be pickled.
    """

    batch_sampler = None  # Lightning asks for it
    # of the current iteration
    _pool: Threads | None = None
    _jobs: Iterable[Future[Any]] = ()  # reads of the first steps of `_scheduled`

    @show_step_options
    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        num_threads: int | None = None,
        prefetch_batches: int | None = None,
        collate: Any = "stack",
        pad_value: Any = 0,
        choose: Choose | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        on_early_exit: str = "next_epoch",
        **steps: Unpack[StepOptions],
    ) -> None:
        check_options(Loader, steps, StepOptions.__annotations__, REMEDIES)
        threads = _NUM_THREADS if num_threads is None else as_int("num_threads", num_threads)
        ahead = _PREFETCH_BATCHES if prefetch_batches is None else as_int("prefetch_batches", prefetch_batches)
        if min(threads, ahead) < 0:
            raise ValueError(f"num_threads={threads}, prefetch_batches={ahead}: expected 0 or more")
        self._sampler = StepSampler(cache, batch_size, **steps)
        self._sampler._set_early_exit(on_early_exit)
        caches = self._sampler._plan.caches
        url = remote_url(caches)
        self._ahead = BatchesAhead(url, None if prefetch_batches is None else ahead)
        self._num_threads = NUM_THREADS if num_threads is None and url is not None else threads
        self._reader = self._sampler._reader(choose)
        collate = collate_for(caches, collate, pad_value, self._reader.alternatives.names)
        self._transforms = as_transforms(transform)
        # each thread of the loader reads whole batches, so reading one batch needs no further threads
        self._thread_reader = self._reader.single_threaded()
        self._device, self._collate = device, collate
        self._read_options = {"device": device, "pin_memory": pin_memory, "collate": collate, "pad_value": pad_value}
        self._stats = LoaderStats()

    def _read_batches(self, with_info: bool) -> Generator[Read, None, None]:
        plan, planned, pid = self._sampler._plan, self._sampler._position, os.getpid()
        check_device(self._device)
        device = Transfer(self._device).device  # threads have another current GPU
        runs_functions = bool(self._transforms) or callable(self._read_options["collate"])
        if runs_functions and device is not None and device.type == "cuda":
            # functions may use tensors that were made before the loop
            copying_stream(device).wait_stream(torch.cuda.current_stream(device))
        pool = self._pool = Threads(self._num_threads, _THREAD_NAME) if self._num_threads else None
        # ranks read different numbers of batches ahead, but must use new weights from the same step on
        num_scheduled = 0 if pool is None else self._ahead.most
        scheduled, jobs = deque[tuple[Step, Position]](), deque[Future[Any]]()
        self._scheduled, self._jobs = scheduled, jobs
        _STARTED[self] = None
        end = self._sampler._end_of_loop(planned)
        try:
            while True:
                while len(scheduled) <= num_scheduled and planned.step < end:
                    step, after = plan.step(planned)
                    planned = plan.settle(after)
                    scheduled.append((step, planned))
                if not scheduled:
                    return
                has_waited = False
                if pool is not None:
                    for pair in islice(scheduled, len(jobs), self._ahead.count + 1):
                        jobs.append(pool.submit(self._read, *pair, device, with_info))
                    has_waited = not jobs[0].done()
                pair = scheduled.popleft()
                read: Read = self._read(*pair, device, with_info) if pool is None else jobs.popleft().result()
                read.transfer.hand_over()
                nbytes, has_requested = read.timing.nbytes, read.timing.num_requests > 0
                self._ahead.note(nbytes, has_waited=has_waited, has_requested=has_requested)
                yield read
        finally:
            if pool is not None and os.getpid() == pid:
                _end(pool, jobs)
            scheduled.clear()
            jobs.clear()

    def _read(self, step: Step, after: Position, device: Any, with_info: bool) -> Read:
        began, nbytes, transfer_s, num_requests = perf_counter(), SPENT.nbytes, SPENT.transfer_s, COUNTS.num_requests
        transfer = Transfer(device)
        with transfer.copying():
            batch = self._thread_reader.read(step, self._read_options)
            read = done = perf_counter()
            needs_mask = with_info or self._transforms
            is_padding: Any = to_device(torch.from_numpy(step.is_padding), False, device) if needs_mask else None
            edits: list[Any] = []
            if self._transforms:
                # training gets another mask, because a transform may write into its own
                info = self._thread_reader.info(step, is_padding.clone(), self._collate)
                batch, edits = apply_transforms(batch, info, self._transforms), info._edits
                done = perf_counter()
            if self._transforms or callable(self._read_options["collate"]):
                transfer.add(batch)
        transfer_s = SPENT.transfer_s - transfer_s
        num_requests = COUNTS.num_requests - num_requests
        timing = Timing(read - began - transfer_s, done - read, transfer_s, SPENT.nbytes - nbytes, num_requests, done)
        return Read(step, after, [batch], is_padding, edits, timing, transfer)

    @property
    def sampler(self) -> StepSampler:
        """The sampler of this loader's steps. Lightning calls its `set_epoch` when an epoch begins."""
        return self._sampler

    def pause(self) -> None:
        """Wait until the threads have read all batches ahead. They then do nothing until the next batch is requested.

        Call this before work that other threads would disturb, for example the capture of a CUDA graph.
        """
        wait(self._jobs)

    def close(self) -> None:
        self._current = None  # before reading fails in another thread
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=not _is_reader(), cancel_futures=True)
        super().close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled; use torch_loader for worker processes, and state_dict for checkpoints"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end(pool: Threads, jobs: Iterable[Future[Any]]) -> None:
    """End the threads of an iteration; wait briefly for running reads."""
    running = [job for job in jobs if not job.cancel()]
    pool.shutdown(wait=False)
    if not _is_reader() and not wait(running, _LEFT_WAITS_S).not_done:
        pool.shutdown()


# when the interpreter has cleared its modules, a suspended generator cannot end its threads
_STARTED: WeakKeyDictionary[Loader, None] = WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    for ref in _STARTED.keyrefs():  # a copy, because daemon threads may still begin iterations
        if (loader := ref()) is not None:
            loader.close()


def _is_reader() -> bool:
    """Return whether this is a reading thread, which would wait for itself."""
    return current_thread().name.startswith(_THREAD_NAME)
