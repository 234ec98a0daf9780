"""Uploads in the order of the shards, by one thread, while the caller writes the next shard."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from wds_tensorcache.errors import add_note
from wds_tensorcache.storage.threads import Threads

__all__ = ["Uploads"]

_Result = TypeVar("_Result")
_MAX_WAITING = 2  # shards that are being uploaded or wait for it, while the caller writes another one


class Uploads:
    """A queue of at most two uploads. After an error, later uploads do not begin, so that no number of a shard is left out.

    Args:
        cancel: Function that ends running requests.

    Threads/fork: one caller at a time; in a forked child, methods raise RuntimeError.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._thread = Threads(1, "tensorcache-upload")
        self._waiting: deque[Future[None]] = deque()
        self._failure: BaseException | None = None
        self._pid = os.getpid()

    def call(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Run a call in the thread, after all uploads; return its result. An interrupt of the caller cancels its requests."""
        self.check()
        future = self._thread.submit(call, *args)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                self._cancel()
            raise

    def submit(self, upload: Callable[..., None], *args: Any) -> None:
        """Begin an upload after all earlier ones; wait while there are two. Raise the error of an earlier one."""
        self.check()
        while len(self._waiting) >= _MAX_WAITING:
            wait([self._waiting[0]])
            self._waiting.popleft()
        self.check()
        self._waiting.append(self._thread.submit(self._run, upload, *args))

    def _run(self, upload: Callable[..., None], *args: Any) -> None:
        if self._failure is None:
            try:
                upload(*args)
            except BaseException as exc:
                self._failure = exc

    @property
    def num_waiting(self) -> int:
        """Number of uploads that have not ended; after an error, also those that may have failed."""
        return sum(not future.done() or self._failure is not None for future in self._waiting)

    def check(self) -> None:
        """Raise the error of an upload, if there is one."""
        if self._failure is not None:
            raise self._failure
        if self._pid != os.getpid():
            raise RuntimeError("a writer to a url cannot be used in a forked child; make a writer in each process")

    def close(self, error: BaseException | None) -> None:
        """Wait for all uploads. If the wait is interrupted, cancel them.

        Raise the error of an upload; if `error` is not None, add a note to it instead.
        """
        try:
            self._thread.shutdown()
        except BaseException:
            self._cancel()
            self._thread.shutdown(cancel_futures=True)
            raise
        if error is None:
            self.check()
        elif self._failure is not None and self._failure is not error:
            add_note(error, f"an upload has failed: {self._failure}")
