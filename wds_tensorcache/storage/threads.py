"""Threads that run jobs for a caller that may be interrupted at any moment.

Hazard: `concurrent.futures` waits by `threading.Condition`, which is Python code. A KeyboardInterrupt inside of it can leave
a lock held, for which other threads wait forever, or release one that is not held, which is a RuntimeError. Here a caller
waits by single calls into the interpreter: when the interrupt comes, each is done or has not begun.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Cancelled", "Job", "ThreadPool", "interrupt_again", "wait_for"]

_Result = TypeVar("_Result")

# How long an interrupt, or the drop of a pool, waits for threads: they may need a lock that the waiting code holds.
_AT_MOST_S = 1.0


class Cancelled(Exception):
    """A job was cancelled before it began."""


class Job(Generic[_Result]):
    """A call that another thread makes; any number of threads may wait for it."""

    __slots__ = ("_calls", "_error", "_is_running", "_value", "is_done")

    def __init__(self, call: Callable[..., _Result], *args: Any) -> None:
        self._calls: list[tuple[Callable[..., _Result], tuple[Any, ...]]] = [(call, args)]
        self._value: Any = None
        self._error: BaseException | None = None
        self.is_done = False
        self._is_running = _thread.allocate_lock()
        self._is_running.acquire()

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        try:
            call, args = self._calls.pop()  # one thread gets it: that is one step of the interpreter
        except IndexError:
            return
        try:
            self._value = call(*args)
        except BaseException as exc:
            self._error = exc
        del call, args
        self._end()
        del self  # the error has a traceback, which has this frame

    def cancel(self) -> bool:
        """Return whether the call had not begun; then it never will, and `result` raises Cancelled."""
        try:
            self._calls.pop()
        except IndexError:
            return False
        self._error = Cancelled("the job was cancelled before it began")
        self._end()
        return True

    def _end(self) -> None:
        self.is_done = True
        self._is_running.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the call has returned or was cancelled; return False if that took longer than `timeout_s`."""
        if timeout_s < 0:
            while not self.is_done:
                with self._is_running:
                    pass
        elif not self.is_done and self._is_running.acquire(True, timeout_s):
            self._is_running.release()
        return self.is_done

    def result(self) -> _Result:
        """Wait, and return what the call did.

        Raises:
            Cancelled: It was cancelled.
            BaseException: Whatever the call raised.
        """
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            return self._value  # type: ignore[no-any-return]
        finally:
            del self


def wait_for(jobs: Iterable[Job[Any]]) -> None:
    """Wait until all jobs are done; their errors are not raised."""
    for job in jobs:
        job.wait()


class _Crew:
    """State that the threads of a pool share. They do not refer to the pool, so that it is freed when the caller drops it."""

    def __init__(self, count: int, name: str) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()  # jobs; anything else ends a thread
        self.is_begun = False
        self.net: Any = None  # what ends the threads when the pool is dropped
        self._ends = [Job(self._work) for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._idents: set[int] = set()
        self._name = name
        self._starting = Job(self._start)
        self._pid = os.getpid()

    def begin(self) -> None:
        """Start the threads, once."""
        _OPEN.add(self)
        try:
            # By a thread of its own: Thread.start waits by Condition. No calls in between, after which an interrupt may come.
            self.is_begun = True
            _thread.start_new_thread(self._starting.run, ())
        except RuntimeError:  # the system gives no more threads
            self.is_begun = False
            raise

    def _start(self) -> None:
        _ENDED.clear()
        for number, end in enumerate(self._ends):
            thread = threading.Thread(target=end.run, name=f"{self._name}_{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads: those that there are do it all
                if not number:
                    self._work()
                return
            self._threads.append(thread)

    def _work(self) -> None:
        self._idents.add(_thread.get_ident())
        while True:
            job = self.jobs.get()
            if not isinstance(job, Job):
                self.jobs.put(job)  # for the next thread
                return
            job.run()
            del job  # while this waits for the next one, nothing of the last is kept

    def cancel(self) -> None:
        """Cancel the jobs that no thread has begun."""
        with contextlib.suppress(Empty):
            while True:
                job = self.jobs.get_nowait()
                if not isinstance(job, Job):
                    self.jobs.put(job)
                    return
                job.cancel()

    def end(self, timeout_s: float = -1) -> None:
        """Let the threads end when they have done what they are given, and wait for them, unless this is one of them."""
        self.net = None
        self.jobs.put(None)
        _OPEN.discard(self)
        is_mine = self.is_begun and self._pid == os.getpid()
        if not is_mine or _thread.get_ident() in self._idents:
            return
        if self._starting.wait(timeout_s):
            for end, thread in zip(self._ends, self._threads, strict=False):
                if end.wait(timeout_s):
                    thread.join()  # all but over
        _ENDED.extend(self._threads)


class ThreadPool:
    """Threads that run jobs; the first job starts them.

    Jobs begin in the order in which they were given. The end of the `with` block, and `close`, wait until all are done. Where a
    pool is dropped, or the interpreter ends, its threads end with the jobs that they have begun.

    Threads/fork/pickle: any thread may use it, and several at once; a forked child has none of its parent's threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._crew = _Crew(count, name)
        self._is_closed = False

    def submit(self, call: Callable[..., _Result], *args: Any) -> Job[_Result]:
        """Let a thread make a call. After `close`, it is cancelled at once."""
        job = Job(call, *args)
        if not self._crew.is_begun:
            end = _end_dropped(self._crew)
            next(end)
            self._crew.net = weakref.ref(self, end.send)
            self._crew.begin()
        self._crew.jobs.put(job)
        if self._is_closed:
            job.cancel()
        return job

    def close(self, *, cancel: bool = False, timeout_s: float = -1) -> None:
        """Wait for all jobs, or with `cancel` for those that have begun, and for the threads to end.

        Called by one of the threads, it does not wait.
        """
        self._is_closed = True
        if cancel:
            self._crew.cancel()
        try:
            self._crew.end(timeout_s)
        except BaseException:  # an interrupt; the threads have been told
            self._crew.end(_AT_MOST_S)
            raise

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end_dropped(crew: _Crew) -> Generator[None, object, None]:
    """End threads when the last reference to their pool has gone, which may be anywhere in the caller's code.

    Hazard: an interrupt may come when a callback is called, before its first line. A generator that goes on is in its `try`.
    """
    try:
        yield
        crew.cancel()
        crew.end(_AT_MOST_S)
    except KeyboardInterrupt:
        crew.end(_AT_MOST_S)
        interrupt_again()
    yield


def interrupt_again() -> None:
    """Let a KeyboardInterrupt come once more; the last call of the callback of a weak reference in which it came.

    What such a callback raises has no caller: the interpreter would print and forget it.
    """
    _thread.start_new_thread(_thread.interrupt_main, ())  # not at once, which would be in the callback still


_OPEN: set[_Crew] = set()

# Threads that have ended. `threading` has a weak reference to each with a callback in Python, in which an interrupt would be
# printed and forgotten: so they are freed by a thread that is never interrupted.
_ENDED: list[threading.Thread] = []


@atexit.register
def _end_all() -> None:
    """End all threads while there is an interpreter for them to end in."""
    for crew in list(_OPEN):
        crew.cancel()
        crew.end()
