"""Common parts of `tc.Loader` and `tc.torch_loader`: iterations over an epoch, and the state that a checkpoint saves."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.training.stats import Clock
from wds_tensorcache.training.step_reader import StepReader
from wds_tensorcache.training.step_sampler import StepSampler
from wds_tensorcache.training.steps import Position, RowCounts, Step

__all__ = ["BaseLoader", "Read"]

# a batch; the mask of its padding on the loader's device (None: on the CPU), and the transforms that changed shapes; its step;
# and the position after the step
Read = tuple[Any, tuple[Any, Sequence[Any]], Step, Position]
_THREADS = "tensorcache-loader"


class BaseLoader(ABC):
    """Base class of the loaders: they read the batches of a `StepSampler`, and keep the state after the last one returned.

    A loader with another batch size, or another number of ranks or workers, can load the state, and continues with the
    samples that were not used.
    """

    _plan: StepSampler
    _collate: Any = None  # how the batches are collated, for `BatchInfo.mask`
    _reader: StepReader
    _clock: Clock
    _running: Callable[[], _Batches | None] = staticmethod(lambda: None)  # a weak reference to the current iteration
    _pool_sizes: tuple[int, ...] = ()  # number of threads of each of an iteration's pools
    _num_iterations = 0
    _planned = 0  # the first step that the current iteration has not begun to read

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_running"}  # a copy has no iteration

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is equal on all ranks."""
        return len(self._plan)

    def __repr__(self) -> str:
        stats = self.stats()
        shown = f"{type(self).__name__}{repr(self._plan).removeprefix('StepSampler')}"
        return shown + (f"\n  {stats}" if stats.num_batches else "")

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._plan.epoch

    @property
    def num_batches_left(self) -> int:
        """Number of batches from the next one to the end of its epoch, equal on all ranks.

        After the last batch of an epoch, it is the number of batches of the next epoch. After a state that was saved with
        another batch size, `len(loader) - num_batches_left` is the used part of the epoch in batches of this loader's size.
        """
        self._plan._find_rank()
        return self._plan._course.num_steps(self._plan._position)

    def count_rows(self) -> RowCounts:
        """Return how many rows the batches of an epoch have over all ranks, and how many are padded, repeated or dropped."""
        return self._plan.count_rows()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin the given epoch; see `StepSampler.set_epoch`.

        This ends the current iteration, unless it is at the beginning of that epoch. An iteration from which no batch was
        requested yet begins that epoch.
        """
        self._plan.set_epoch(epoch)

    def with_info(self) -> Iterable[tuple[Any, BatchInfo]]:
        """Return an iterable of pairs `(batch, BatchInfo)`; each iteration over it is an epoch."""
        return _WithInfo(self)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; after `load_state_dict`, continue the state's epoch. This ends the current iteration."""
        return self._begin(with_info=False)

    def _begin(self, *, with_info: bool) -> Iterator[Any]:
        BaseLoader.close(self)  # a TorchLoader keeps its persistent workers
        self._num_iterations += 1
        self._planned = 0
        running = _Batches(self, with_info=with_info)
        self._running = weakref.ref(running)
        return running

    @abstractmethod
    def stats(self) -> Any:
        """Return how long training has waited for batches."""

    @abstractmethod
    def _read_batches(self, pools: Sequence[Executor | None], *, with_info: bool) -> Iterator[Read]:
        """Yield the batches of an epoch, starting at the sampler's position.

        `pools` has a pool for each of `_pool_sizes`; None for 0.
        """

    def _end_after(self, exc: BaseException, running: _Batches) -> None:
        """End an iteration after an error or an interrupt."""
        running.close(wait=isinstance(exc, Exception))  # after Ctrl-C, slow reads end later

    def set_weights(self, weights: Any) -> int:
        """Change the weights of the samples, or of the mix (`{"a": 0.5, …}`), for all steps that have not begun.

        `{"a": […]}` changes the weights of the samples in a cache of the mix, if the loader was made with such weights.

        A step has begun when the reading of its batch is scheduled; this may happen ahead of training.

        Returns:
            Number of the first step with the new weights.

        Raises:
            ValueError: The loader has no weights, or the new weights do not match it.
        """
        running = self._running()
        is_reading = running is not None and not running.is_closed
        return self._change_weights(weights, self._planned if is_reading else 0)

    def _change_weights(self, weights: Any, planned: int) -> int:
        now = self._plan._position.step
        self._plan._weights.change(max(now, planned), weights, now)
        return max(now, planned)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch returned, as a dict for JSON, equal on all ranks.

        It contains the loader's weights, if it has any.

        Raises:
            RuntimeError: Another data loader has begun to iterate over this loader's sampler, so only that data loader has
                the state.
        """
        if self._plan._is_elsewhere:
            raise RuntimeError(
                "another data loader iterates over this loader's sampler: save that data loader's state. If accelerate's "
                "skip_first_batches made it, it has none: to resume, load this loader's state instead of skipping batches"
            )
        return self._plan._state(self._plan._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch of a state, with this loader's batch size and number of ranks.

        The loader takes over the state's weights; call `set_weights` afterwards to change them.

        Raises:
            ValueError: The state is damaged, or belongs to a loader with other samples, seed, shuffle or mix.
        """
        position = self._plan._load(state)
        # a larger step may not fit into the rest of the epoch
        self._plan._move(self._plan._settled(position), is_resumed=True)

    def close(self) -> None:
        """End the iteration and its threads. The position is kept, and the caches stay open."""
        running = self._running()
        if running is not None:
            running.close()


class _WithInfo:
    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loader._begin(with_info=True)


class _Batches(Iterator[Any]):
    """Iterator over the rest of an epoch, which begins when the first batch is requested.

    Any exception that `next` raises ends the iteration, including an interrupt at any line. The last line before a batch is
    returned moves the loader's position, so the state counts exactly the batches that the caller received.

    Threads: one thread calls `next`; any thread may call `close`.
    """

    def __init__(self, loader: BaseLoader, *, with_info: bool) -> None:
        self._loader, self._with_info = loader, with_info
        self._num_iterations, self._num_moves = loader._num_iterations, loader._plan._num_moves
        self._pid = os.getpid()
        self._pools = [ThreadPoolExecutor(count, _THREADS) if count else None for count in loader._pool_sizes]
        weakref.finalize(self, _end, self._pools, self._pid)  # if it is abandoned
        self._read: Iterator[Read] | None = None
        self._is_in_next = self.is_closed = False
        self._clock = loader._clock
        self._clock.begin()

    def __next__(self) -> Any:
        loader, plan = self._loader, self._loader._plan
        if self._num_iterations != loader._num_iterations:
            raise RuntimeError("another iteration of this loader has begun, which ended this iteration")
        if self._pid != os.getpid():
            raise RuntimeError("this iteration's threads are in the process that began it; begin an iteration here")
        # Lightning calls `iter` before `set_epoch`; until a batch is requested, the iteration has no position
        if self._num_moves != plan._num_moves and self._read is not None:
            self.close()
        if self.is_closed:
            raise StopIteration
        if self._is_in_next:
            raise RuntimeError(
                "this iteration is already reading a batch; `next` was called by another thread, or by code that it runs"
            )
        try:
            self._is_in_next = True
            self._clock.ask()
            if self._read is None:
                # until a batch is returned, another iteration would also begin here
                plan._move(plan._beginning(), is_resumed=True)
                self._num_moves = plan._num_moves
                self._read = loader._read_batches(self._pools, with_info=self._with_info)
            given, (is_padding, edits), step, after = next(self._read)
            if self._with_info:
                given = given, loader._reader.info(step, is_padding, loader._collate, edits)
            self._clock.give()
            self._is_in_next = False
        except StopIteration:
            self.close()
            raise
        except BaseException as exc:
            was_closed = self.is_closed  # by another thread, so that no more reads begin
            loader._end_after(exc, self)
            if was_closed and isinstance(exc, RuntimeError):
                raise StopIteration from exc
            raise
        if self.is_closed:
            self.close()  # a thread of the pool may have called `close`, which cannot wait for that thread itself
            raise StopIteration
        # Hazard: an interrupt after the position has moved would lose the batch. Without calls, none arrives from here on.
        plan._is_resumed = False
        plan._position = after
        return given

    def close(self, *, wait: bool = True) -> None:
        """End the iteration; a thread that waits in `next` receives no batch."""
        self.is_closed = True
        wait = wait and not threading.current_thread().name.startswith(_THREADS)  # a thread cannot wait for itself
        _end(self._pools, self._pid, wait)
        self._read = iter(())


def _end(pools: Sequence[Executor | None], pid: int, wait: bool = False) -> None:
    for pool in pools:
        if pool is not None and pid == os.getpid():
            pool.shutdown(wait, cancel_futures=True)
