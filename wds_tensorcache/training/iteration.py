"""An iteration of a loader, until its end, another iteration, `close`, an error or an interrupt."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.storage.threads import Cancelled, Job, ThreadPool
from wds_tensorcache.training.steps import Position, Step

__all__ = ["Iteration"]

_Begun = tuple[Step, Position, "Job[Any] | None"]  # a step, the position after it, and who reads it
_INTERRUPTED_WAITS_S = 1.0  # for batches that are being read


class Iteration(Iterator[Any]):
    """The rest of an epoch, read ahead by threads.

    Any exception that `next` raises ends it, an interrupt at any line included. The last line before a batch is returned moves
    the loader's position, so the caller and the state agree on the batches that were given.

    Threads: one calls `next`; any may `close`.
    """

    def __init__(self, loader: Any, *, with_info: bool) -> None:
        self._loader, self._with_info = loader, with_info
        self._plan = loader._plan
        self._number = loader._num_iterations
        self._pid = os.getpid()
        self._pool = ThreadPool(loader._num_threads, "tensorcache-loader") if loader._num_threads else None
        self._waiting: deque[_Begun] = deque()
        self._planned: Position | None = None  # after the last step that was begun; None before the first `next`
        self._epoch = 0
        self._stream: Any = None
        self._is_in_next = False
        self._is_closed = False

    @property
    def planned(self) -> int:
        """First step that was not begun; 0 before the first `next`, and after the end."""
        return 0 if self._planned is None or self._is_closed else self._planned.step

    def __next__(self) -> Any:
        self._loader._check_current(self._number)
        if self._pid != os.getpid():
            raise RuntimeError("this iteration is of another process, whose threads a fork does not have")
        if self._is_closed:
            raise StopIteration
        if self._is_in_next:
            raise RuntimeError("another thread, or what is called here, has asked this iteration for a batch already")
        try:
            self._is_in_next = True
            waiting = self._waiting  # `close` puts another one in its place
            self._read_ahead(waiting)
            if not waiting and not self._is_closed:
                self._plan._position = self._planned
            if not waiting:
                raise StopIteration
            step, after, job = waiting.popleft()
            given = self._loader._read(step, self._stream) if job is None else job.result()
            if self._with_info:
                given = given, self._plan._info(step, self._loader._read_options["device"])
            self._is_in_next = False
        except Cancelled:
            self._end(-1)
            raise StopIteration from None
        except BaseException as exc:
            self._end(-1 if isinstance(exc, Exception) else _INTERRUPTED_WAITS_S)
            raise
        if self._is_closed:
            self._end(-1)  # one of its threads may have closed it, which cannot wait for itself
            raise StopIteration
        # Hazard: an interrupt after a call here would lose the batch. So no calls from here on.
        self._plan._position = after
        return given

    def _read_ahead(self, waiting: deque[_Begun]) -> None:
        """Begin steps until enough are on their way, or the epoch has no more."""
        loader, plan = self._loader, self._plan
        if self._planned is None:
            self._planned = plan._position = plan._beginning()
            plan._is_resumed, self._epoch = False, self._planned.epoch
            self._stream = _stream_of(loader._read_options["device"])
        if loader._is_flushed:
            while waiting:
                _, _, job = waiting.popleft()
                if job is not None:
                    job.cancel()
            self._planned, loader._is_flushed = plan._position, False
        while len(waiting) <= loader._prefetch_batches and self._planned.epoch == self._epoch:
            step, after = plan._step(self._planned)
            self._planned = plan._settled(after)
            job = self._pool.submit(loader._read, step, self._stream) if self._pool is not None else None
            waiting.append((step, self._planned, job))

    def close(self) -> None:
        """End it, and its threads when they have read what they are reading; a thread that waits in `next` gets no batch."""
        self._end(-1)

    def _end(self, timeout_s: float) -> None:
        self._is_closed = True
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close(cancel=True, timeout_s=timeout_s)
        self._waiting = deque()


def _stream_of(device: Any) -> Any:
    """Return the stream on which the caller will use the batches; None if they are not for a GPU."""
    check_device(device)
    if device is None or torch.device(device).type != "cuda":
        return None
    return torch.cuda.current_stream(torch.device(device))
