"""Batches for training, read ahead by threads."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from wds_tensorcache.arguments import as_int, check_options
from wds_tensorcache.codec.lazy import check_device
from wds_tensorcache.reading.batch.batch_memory import SPENT, to_device
from wds_tensorcache.reading.batch.collate import collate_for
from wds_tensorcache.reading.choose import Choose
from wds_tensorcache.reading.remote.batches_ahead import NUM_THREADS, BatchesAhead, remote_url
from wds_tensorcache.reading.transfer import Transfer, copying_stream
from wds_tensorcache.storage.remote.fetch import MADE
from wds_tensorcache.storage.threads import Cancelled, Job, ThreadPool, wait_for
from wds_tensorcache.training.base_loader import BaseLoader, Read
from wds_tensorcache.training.skipping import LoaderBatches, LoaderPositions
from wds_tensorcache.training.stats import Clock, LoaderStats, Timing
from wds_tensorcache.training.step_reader import Transform, as_transforms, transformed
from wds_tensorcache.training.step_sampler import StepOptions, StepSampler
from wds_tensorcache.training.steps import Position, Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Loader"]

_Waiting = deque[tuple[Step, Position, "Job[Any] | None"]]
_NUM_THREADS = _PREFETCH_BATCHES = 2
_REMEDIES = {  # by names of arguments of torch's DataLoader
    "drop_last": "last_batch='drop'",
    "num_workers": "num_threads=, since threads read the batches, or tc.torch_loader",
    "prefetch_factor": "prefetch_batches=",
    "collate_fn": "collate=",
    "choices": "choose=",
}


class Loader(BaseLoader):
    """The batches of a cache for training, as `read_batch` returns them, read ahead by threads.

    Each loop `for batch in loader`, or `for batch, info in loader.with_info()`, is an epoch. `state_dict` returns the state
    after the last batch returned; a loader with another batch size or number of ranks can load it.

    Args:
        cache, batch_size: As in `StepSampler`.
        device, pin_memory, collate, pad_value: As in `read_batch`.
        choose: Alternatives as in `read_batch`. One of them is chosen for each sample, with equal probability. The choice is a
            pure function of seed, epoch and sample index, so it does not depend on batch size and ranks, and resumes
            exactly. `info.choices` says what was chosen.
        transform: Function of a batch and its `BatchInfo` that returns the batch, or a list of such functions, which run in
            order. They run in the loader's threads, several batches at the same time.
        num_threads: Number of batches to read at the same time; 0 reads each batch on request in the caller's thread. The
            default is 2. If shards are at urls, it is 16, since their threads wait for requests most of the time. After
            eight batches in a row that needed no request, as from a node's cache, it is 2 until a batch needs one.
        prefetch_batches: Number of batches to read ahead. The default is 2. If shards are at urls, it begins with 4, and
            grows while training waits for requests, up to 32 batches or 1 GiB, if the server's latency and rate require
            that. After eight batches in a row that needed no request, it is 2, and may grow again.
        steps: Other options of `StepSampler`.

    Raises:
        ValueError: Arguments are mutually exclusive, or out of range.
        BatchError: A name or pattern in `collate`, `pad_value` or `choose` matches no tensor.
        RuntimeError (when a batch is requested): A transform failed; the message names the step.

    Memory: `prefetch_batches + 1` batches, besides those that the caller keeps. On a GPU, a batch keeps its memory until the
        work that was queued on it has ended; if the CPU runs several steps ahead of the GPU, that is as many more batches.
    Threads/fork/pickle: one thread iterates, any thread may call `close`; only in the process that made the loader.
        Abandoning an iteration, or calling `close`, ends its threads; the next iteration begins the next epoch.
    """

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
        **steps: Unpack[StepOptions],
    ) -> None:
        check_options(Loader, steps, StepOptions.__annotations__, _REMEDIES)
        threads = _NUM_THREADS if num_threads is None else as_int("num_threads", num_threads)
        ahead = _PREFETCH_BATCHES if prefetch_batches is None else as_int("prefetch_batches", prefetch_batches)
        if min(threads, ahead) < 0:
            raise ValueError(f"num_threads={threads}, prefetch_batches={ahead}: expected 0 or more")
        self._plan = StepSampler(cache, batch_size, **steps)
        url = remote_url(self._plan._caches)
        self._ahead = BatchesAhead(url, None if prefetch_batches is None else ahead)
        # at urls, the second pool reads while no batch needs requests
        self._pool_sizes = (NUM_THREADS, threads) if num_threads is None and url is not None else (threads,)
        self._reader = self._plan._reader(choose)
        collate = collate_for(self._plan._caches, collate, pad_value, self._reader.chosen_names)
        self._transforms = as_transforms(transform)
        # each thread of the loader reads whole batches, so reading one batch needs no further threads
        self._thread_reader = self._reader.single_threaded()
        self._device, self._collate = device, collate
        self._read_options = {"device": device, "pin_memory": pin_memory, "collate": collate, "pad_value": pad_value}
        self._is_flushed = False
        self._waiting: Callable[[], _Waiting | None] = lambda: None  # weak reference to the batches that are read ahead
        self._clock = Clock()

    def _read_batches(self, pools: Sequence[ThreadPool | None], *, with_info: bool) -> Iterator[Read]:
        plan, waiting = self._plan, _Waiting()
        self._waiting = weakref.ref(waiting)
        check_device(self._device)
        device = Transfer(self._device).device  # threads have another current GPU
        runs_functions = bool(self._transforms) or callable(self._read_options["collate"])
        if runs_functions and device is not None and device.type == "cuda":
            # they may use tensors that were made before the loop
            copying_stream(device).wait_stream(torch.cuda.current_stream(device))
        planned = plan._position
        epoch = planned.epoch
        while True:
            if self._is_flushed:
                # `pause` does not know these jobs any more, so those that already run end here
                wait_for([job for *_, job in waiting if job is not None and not job.cancel()])
                waiting.clear()
                planned, self._is_flushed = plan._position, False
            pool = pools[-1] if self._ahead.is_local else pools[0]
            while len(waiting) <= self._ahead.count and planned.epoch == epoch:
                step, after = plan._course.step(planned)
                planned = plan._settled(after)
                job = None if pool is None else pool.submit(self._read, step, device, with_info)
                waiting.append((step, planned, job))
                self._planned = planned.step
            if not waiting:
                return
            step, after, job = waiting.popleft()
            has_waited = job is not None and not job.is_done
            try:
                transfer, *found = self._read(step, device, with_info) if job is None else job.result()
            except Cancelled:
                return
            del job
            transfer.hand_over()
            timing = found.pop()
            self._clock.take(timing)
            self._ahead.note(timing.nbytes, has_waited=has_waited, has_requested=timing.num_requests > 0)
            yield (*map(found.pop, (0, 0)), step, after)  # without a reference that would keep the batch alive

    def _read(self, step: Step, device: torch.device | None, with_info: bool) -> tuple[Transfer, Any, Any, Timing]:
        """Return a batch, and what its `BatchInfo` needs; see `Read`. The caller of `next` must call `hand_over`."""
        began, nbytes, transfer_s, num_requests = perf_counter(), SPENT.nbytes, SPENT.transfer_s, MADE.num_requests
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
                batch, edits = transformed(batch, info, self._transforms), info._edits
                done = perf_counter()
            if self._transforms or callable(self._read_options["collate"]):
                transfer.add(batch)
        transfer_s = SPENT.transfer_s - transfer_s
        num_requests = MADE.num_requests - num_requests
        timing = Timing(read - began - transfer_s, done - read, transfer_s, SPENT.nbytes - nbytes, num_requests, done)
        return transfer, batch, (is_padding, edits), timing

    @property
    def sampler(self) -> StepSampler:
        """The sampler of this loader's steps. Lightning calls its `set_epoch` when an epoch begins."""
        return self._plan

    def stats(self) -> LoaderStats:
        """Return how long training and the loader have waited for each other, with times and bytes of each stage."""
        return self._clock.stats()

    def pause(self) -> None:
        """Pause the threads until the next batch is requested, after waiting until they have read all batches ahead.

        Call this before work that other threads disturb, such as the capture of a CUDA graph.
        """
        wait_for([job for *_, job in list(self._waiting() or ()) if job is not None])

    def set_weights(self, weights: Any, *, strict: bool = False) -> int:
        """Change the weights of the samples, or of the mix (`{"a": 0.5, …}`), and return the first step with the new weights.

        Args:
            weights: New weights; `{"a": […]}` for the samples in a cache of the mix.
            strict: Apply the weights to the next batch, and discard batches that were read ahead.

        Raises:
            ValueError: The loader has no weights, or the new weights do not match it.
        """
        step = self._change_weights(weights, 0) if strict else super().set_weights(weights)
        self._is_flushed |= strict
        return step

    prefetch_factor = None  # of a DataLoader that skips batches

    @property
    def batch_sampler(self) -> LoaderPositions:
        """The positions of the batches, for trainers that skip batches to resume, as accelerate's `skip_first_batches` does."""
        return LoaderPositions(self)

    @property
    def dataset(self) -> LoaderBatches:
        """The batches by position, for trainers that skip batches to resume."""
        return LoaderBatches(self)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch, which is collated already."""
        return batch

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled; use torch_loader for worker processes, and state_dict for checkpoints"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
