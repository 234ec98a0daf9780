"""Jobs on threads with results in order, and values of a process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, TimeoutError
from concurrent.futures.thread import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MEANWHILE_S = 0.1  # pause between two calls of `meanwhile`


class Threads(ThreadPoolExecutor):
    """An executor that still works after the main thread has ended.

    It then runs jobs in the caller's thread. Python starts no more threads, but still runs other threads and the functions
    of `atexit`, which may write or read samples.
    """

    _is_open = True

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if not self._is_open:
                raise
        super().shutdown()  # waits for earlier jobs, so that the order is kept
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as exc:
            future.set_exception(exc)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_open = False
        super().shutdown(wait, cancel_futures=cancel_futures)


class computed_once(Generic[_Result]):
    """A decorator like `functools.cached_property`, but without a lock.

    Threads may compute a value at the same time.
    """

    def __init__(self, compute: Callable[[Any], _Result]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> _Result:
        if instance is None:
            return self  # type: ignore[return-value]
        # Fork: before Python 3.12, all objects of a class share the lock of `functools.cached_property`. A child that was
        # forked while a thread held it would wait forever.
        value = vars(instance)[self._compute.__name__] = self._compute(instance)
        return value


def per_process(make: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return a function that returns one result of `make` per process.

    All threads of the process get the same result. A forked child makes its own executors and locks: it has no threads of its
    parent, and locks that these threads held remain locked.
    """
    return partial(value_of_process, {}, make)


def value_of_process(values: dict[int, _Result], make: Callable[[], _Result]) -> _Result:
    """Return this process's value in `values`, by process id. Make it if missing; see `per_process`."""
    pid = os.getpid()
    value = values.get(pid)
    # atomic, so that all threads get the same value; the value of a forked child's parent is kept, but not used
    return values.setdefault(pid, make()) if value is None else value


def run_in_order(
    jobs: Iterable[_Item],
    run: Callable[[_Item], _Result],
    executor: Executor | None,
    threads: int,
    meanwhile: Callable[[], object] | None = None,
) -> Generator[_Result, None, None]:
    """Yield `run(job)` for each job, in order.

    With an executor, the caller submits up to two later jobs per thread. While it waits for a job, it calls `meanwhile` ten
    times a second.
    """
    waiting: deque[Future[_Result]] = deque()
    try:
        for job in jobs:
            if executor is None:
                yield run(job)
                continue
            waiting.append(executor.submit(run, job))
            if len(waiting) > 2 * threads:
                yield _result_of(waiting.popleft(), meanwhile)
        while waiting:
            yield _result_of(waiting.popleft(), meanwhile)
    finally:
        for future in waiting:
            future.cancel()


def _result_of(future: Future[_Result], meanwhile: Callable[[], object] | None) -> _Result:
    try:
        while meanwhile is not None and not future.done():
            try:
                return future.result(_MEANWHILE_S)
            except TimeoutError:  # an error of the wait, or of the job
                meanwhile()
        return future.result()
    finally:
        del future  # an error's traceback refers to this frame, which would keep the future in a cycle
