"""Threads that read the next batches of an epoch before DALI requests them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

__all__ = ["ReadAhead"]


class ReadAhead:
    """The batches of a function `read(epoch, iteration)`, read ahead up to the end of an epoch.

    A request for any other batch than the next discards all batches that were read ahead. An error of `read` is raised by the
    request for its batch, and a repeated request reads the batch again.

    Args:
        num_threads: Number of batches to read at the same time; 0 reads each batch on request.
        num_batches: Number of batches to read ahead.

    Threads/fork/pickle: one thread requests batches; a forked child begins its own threads; a copy reads on request.
    """

    def __init__(self, num_threads: int, num_batches: int) -> None:
        if min(num_threads, num_batches) < 0:
            raise ValueError(f"num_threads={num_threads}, prefetch_batches={num_batches}: expected 0 or more")
        self.num_threads, self.num_batches = num_threads, num_batches
        self._pool: ThreadPoolExecutor | None = None
        self._jobs = deque[Future[Any]]()
        self._next = (0, 0)  # epoch and iteration of the first job
        self._pid = os.getpid()

    def read(self, read: Callable[[int, int], Any], epoch: int, iteration: int, num_iterations: int) -> Any:
        """Return `read(epoch, iteration)`; the epoch has `num_iterations`."""
        if not self.num_threads:
            return read(epoch, iteration)
        if self._pid != os.getpid():
            self._pool, self._pid = None, os.getpid()
            self._jobs.clear()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, "tensorcache-dali")
        if self._next != (epoch, iteration):
            self.discard()
        for ahead in range(iteration + len(self._jobs), min(iteration + self.num_batches + 1, num_iterations)):
            self._jobs.append(self._pool.submit(read, epoch, ahead))
        self._next = epoch, iteration + 1
        job = self._jobs.popleft()
        try:
            return job.result()
        finally:
            del job  # an error's traceback refers to this frame, and would keep the job

    def discard(self) -> None:
        """Discard the batches that were read ahead."""
        while self._jobs:
            self._jobs.popleft().cancel()

    def wait(self) -> None:
        """Wait until the threads have read all batches ahead."""
        wait(list(self._jobs))

    def __reduce__(self) -> Any:
        return ReadAhead, (0, self.num_batches)
