"""Forked processes that end with their parent, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def may_fork() -> bool:
    """Return whether a forked child of this process may run torch, and the system kills it when this process ends.

    Hazard: another thread may hold a lock, which the child would have forever. CUDA and Arrow do not work after a fork.
    """
    return (
        _IS_LINUX
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not sys.modules.keys() & {"pyarrow", "jax"}
    )


class Child:
    """A forked process, and the connection to it.

    Args:
        work: Function that the child calls with its end of the connection.
        siblings: Children that were started before this one, which is added to them. Hazard: an interrupt may arrive before
            the caller has the new object, and the child would stay.

    Raises:
        OSError: The system allows no more processes.

    Threads/fork/pickle: used by one thread, in the process that made it. That thread must not end before the child.
    """

    def __init__(self, work: Callable[[Connection], object], siblings: list[Child]) -> None:
        self.connection, theirs = Pipe()
        self._has_ended = False
        parent = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of the threads of OpenBLAS, which handles forks itself
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if not self.pid:
                for connection in (self.connection, *(other.connection for other in siblings)):
                    connection.close()  # otherwise other children would not see that the parent has ended
                _run(work, theirs, parent)
            siblings.append(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()

    def describe_end(self) -> str:
        """Wait until the child has ended, and return how it ended."""
        status = self._wait()
        if status is None:
            return f"worker process {self.pid} has ended"
        if status < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-status).name}"
        return f"worker process {self.pid} has ended with status {status}"

    def kill(self) -> None:
        """Kill the child, without waiting for its end."""
        self.connection.close()
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child."""
        self.kill()
        self._wait()

    def _wait(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the child; None if the system does not tell it."""
        status = None
        if not self._has_ended:
            with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD
                status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._has_ended = True
        return status


def _run(work: Callable[[Connection], object], connection: Connection, parent: int) -> None:
    """Call `work` in the child, and end the child."""
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        gc.freeze()  # a collection would copy the pages of all objects
        torch.set_num_threads(1)  # Hazard: the child does not have the threads of OpenMP, and would wait for them
        if os.getppid() == parent:
            work(connection)
            status = 0
    finally:
        os._exit(status)


if _IS_LINUX:
    _prctl = ctypes.CDLL(None).prctl
