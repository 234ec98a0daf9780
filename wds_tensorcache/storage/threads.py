"""Threads that run jobs for a caller that may be interrupted at any moment.

Hazard: `concurrent.futures` waits with `threading.Condition`, which is Python code. A KeyboardInterrupt inside it can leave
a lock held forever, or release a lock that is not held. Here a caller waits in single C calls: an interrupt arrives before
or after each call, not inside it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from operator import methodcaller
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = [
    "NO_FORK",
    "Cancelled",
    "Job",
    "Living",
    "ThreadPool",
    "call_when_gone",
    "end_all",
    "interrupt_again",
    "run_in_order",
    "wait_for",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# No thread forks while another thread holds this lock, for example between opening a descriptor and recording it. Otherwise the
# child has a descriptor that it does not know.
NO_FORK = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=NO_FORK.release)

# After an interrupt, or when a pool is dropped, wait at most this long: threads may need a lock that the waiting code holds.
_AT_MOST_S = 1.0
_MEANWHILE_S = 0.1  # how long to wait between two calls of `meanwhile`


class _Net(weakref.ref):  # type: ignore[type-arg]
    call: Callable[[], Any] = tuple  # `tuple()` does nothing; for an interrupt before `call` is set


_CALL = methodcaller("call")


def call_when_gone(thing: Any, call: Callable[[], Any]) -> Any:
    """Call a function when an object is freed, unless the returned handle is released first.

    Hazard: if a KeyboardInterrupt arrives inside a Python callback, the interpreter prints it and drops it. So the function,
    and all that it calls, must be implemented in C. It may run inside the garbage collector, so it must not wait for a lock.
    """
    net = _Net(thing, _CALL)
    net.call = call
    return net


class Living(Generic[_Item]):
    """The objects that were added and still exist.

    Hazard: `weakref.WeakSet` removes an object in a Python callback, in which an interrupt would be lost.
    """

    def __init__(self) -> None:
        self._nets: dict[int, Any] = {}

    def add(self, thing: _Item) -> None:
        self._nets[id(thing)] = call_when_gone(thing, partial(self._nets.pop, id(thing), None))

    def __iter__(self) -> Iterator[_Item]:
        return (thing for net in list(self._nets.values()) if (thing := net()) is not None)


class Cancelled(Exception):
    """Error with which `Job.result` reports a job that was cancelled before it began."""


class Job(Generic[_Result]):
    """A call that another thread executes; any number of threads may wait for it."""

    __slots__ = ("_calls", "_error", "_is_running", "_value", "is_done")

    def __init__(self, call: Callable[..., _Result], *args: Any) -> None:
        self._calls: list[tuple[Callable[..., _Result], tuple[Any, ...]]] = [(call, args)]
        self._value: Any = None
        self._error: BaseException | None = None
        self.is_done = False
        self._is_running = _thread.allocate_lock()
        self._is_running.acquire()

    def run(self) -> None:
        """Execute the call, unless it was cancelled."""
        try:
            call, args = self._calls.pop()  # atomic, so only one thread gets it
        except IndexError:
            return
        try:
            self._value = call(*args)
        except BaseException as exc:
            self._error = exc
        del call, args
        self._end()
        del self  # the error's traceback refers to this frame, and would keep the job alive

    def cancel(self) -> bool:
        """Prevent the call, so that `result` raises Cancelled; return False if the call has already begun."""
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
        """Wait until the call has ended or was cancelled; return False after `timeout_s` (no limit if negative)."""
        if timeout_s < 0:
            while not self.is_done:
                with self._is_running:
                    pass
        elif not self.is_done and self._is_running.acquire(True, timeout_s):
            self._is_running.release()
        return self.is_done

    def result(self) -> _Result:
        """Wait for the call; return its result or raise its error. Raise Cancelled if it was cancelled."""
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            return self._value  # type: ignore[no-any-return]
        finally:
            del self


def wait_for(jobs: Iterable[Job[Any]]) -> None:
    """Wait until all jobs are done, without raising their errors."""
    for job in jobs:
        job.wait()


class _Crew:
    """State that the threads of a pool share. No thread refers to the pool itself, so dropping the pool frees it."""

    def __init__(self, count: int, name: str) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()  # jobs to run; any other item ends a thread
        self.is_begun = False
        self.net: Any = None  # ends the threads when the pool is dropped
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
            # Thread.start waits with a Condition, so a separate thread calls it. No call may come between these two lines,
            # since an interrupt may arrive after any call.
            self.is_begun = True
            _thread.start_new_thread(self._starting.run, ())
        except RuntimeError:  # the system allows no more threads
            self.is_begun = False
            raise

    def _start(self) -> None:
        _ENDED.clear()
        for number, end in enumerate(self._ends):
            thread = threading.Thread(target=end.run, name=f"{self._name}_{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads; the existing ones run all jobs
                if not number:
                    self._work()
                return
            self._threads.append(thread)

    def _work(self) -> None:
        self._idents.add(_thread.get_ident())
        while True:
            job = self.jobs.get()
            if not isinstance(job, Job):
                self.jobs.put(job)  # to end the next thread, too
                return
            job.run()
            del job  # otherwise this frame would keep the job's memory until the next job

    def cancel(self) -> None:
        """Cancel the jobs that have not begun."""
        with contextlib.suppress(Empty):
            while True:
                job = self.jobs.get_nowait()
                if not isinstance(job, Job):
                    self.jobs.put(job)
                    return
                job.cancel()

    def end(self, timeout_s: float = -1) -> None:
        """End the threads after all jobs in the queue.

        Wait for each thread at most `timeout_s` (no limit if negative), unless the caller is one of them.
        """
        self.net = None
        self.jobs.put(None)
        _OPEN.discard(self)
        is_mine = self.is_begun and self._pid == os.getpid()
        if not is_mine or _thread.get_ident() in self._idents:
            return
        if self._starting.wait(timeout_s):
            for end, thread in zip(self._ends, self._threads, strict=False):
                if end.wait(timeout_s):
                    thread.join()  # about to end
        _ENDED.extend(self._threads)


class ThreadPool:
    """Threads that run jobs; the first job starts them.

    Jobs begin in the order of `submit`. The end of the `with` block, and `close`, wait until all jobs are done. When the
    pool is dropped, or the interpreter ends, the threads end after their current jobs.

    Threads/fork: any number of threads may use a pool at once; a forked child does not have its parent's threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._crew = _Crew(count, name)
        self._is_closed = False

    def submit(self, call: Callable[..., _Result], *args: Any) -> Job[_Result]:
        """Return a job that a thread will run. After `close`, the job is cancelled at once."""
        job = Job(call, *args)
        self.put(job)
        return job

    def put(self, job: Job[Any]) -> None:
        """Let a thread run a job, which the caller already knows if an interrupt ends this call."""
        if not self._crew.is_begun:
            end = _end_dropped(self._crew)
            next(end)
            self._crew.net = weakref.ref(self, end.send)
            self._crew.begin()
        self._crew.jobs.put(job)
        if self._is_closed:
            job.cancel()

    def close(self, *, cancel: bool = False, timeout_s: float = -1) -> None:
        """Wait for all jobs and threads to end; with `cancel`, cancel jobs that have not begun.

        Wait at most `timeout_s` for each thread (no limit if negative). If called from one of the threads, do not wait.
        """
        self._is_closed = True
        if cancel:
            self._crew.cancel()
        try:
            self._crew.end(timeout_s)
        except BaseException:  # an interrupt: the threads already know that they must end
            self._crew.end(_AT_MOST_S)
            raise

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_in_order(
    jobs: Iterable[_Item],
    run: Callable[[_Item], _Result],
    pool: ThreadPool | None,
    threads: int,
    meanwhile: Callable[[], object] | None = None,
) -> Generator[_Result, None, None]:
    """Yield `run(job)` for each job, in order. With a pool, up to two later jobs per thread are submitted ahead.

    With a pool, `meanwhile` is called ten times a second while the caller waits for a job.
    """
    waiting: deque[Job[_Result]] = deque()
    try:
        for job in jobs:
            if pool is None:
                yield run(job)
                continue
            waiting.append(pool.submit(run, job))
            if len(waiting) > 2 * threads:
                yield _result_of(waiting.popleft(), meanwhile)
        while waiting:
            yield _result_of(waiting.popleft(), meanwhile)
    finally:
        for each in waiting:
            each.cancel()


def _result_of(job: Job[_Result], meanwhile: Callable[[], object] | None) -> _Result:
    while meanwhile is not None and not job.wait(_MEANWHILE_S):
        meanwhile()
    return job.result()


def _end_dropped(crew: _Crew) -> Generator[None, object, None]:
    """End a pool's threads when the pool is freed, which may happen at any point of the caller's code.

    Hazard: an interrupt may arrive before the first line of a callback. This generator, when resumed, is already inside its
    `try`.
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
    """Interrupt the main thread again, after an interrupt has ended the callback of a weak reference.

    This must be the last call in the callback. Otherwise the interrupt is lost: the interpreter prints an error that a callback
    raises, and drops it.
    """
    _thread.start_new_thread(_thread.interrupt_main, ())  # a call from this thread could interrupt the callback again


_OPEN: set[_Crew] = set()

# Threads that have ended. `threading` keeps a weak reference to each, with a callback in Python, in which an interrupt would
# be lost. So they are freed in `_Crew._start`, whose thread is never interrupted.
_ENDED: list[threading.Thread] = []


@atexit.register
def end_all() -> None:
    """End all threads, before the interpreter ends."""
    for crew in list(_OPEN):
        crew.cancel()
        crew.end()
