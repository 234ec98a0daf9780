"""Work in a forked child, whose limits, patches and death do not reach the other tests."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch


def start(work: Callable[[], object]) -> int:
    """Run `work` in a forked child, which prints the traceback of an exception; return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # Hazard: OpenMP's threads do not survive a fork.
            work()
            status = 0
        except BaseException as exc:
            status = (isinstance(exc, OSError) and exc.errno) or 1
            # Hazard: a limit on the length of files holds for the captured output, too.
            with contextlib.suppress(OSError):
                traceback.print_exc()
                sys.stderr.flush()
        finally:
            os._exit(status)
    return child


def finish(children: list[int]) -> list[int]:
    """Wait for children, and return their exit codes, as `run_in_child` does."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_in_child(work: Callable[[], object], kill_after_s: float | None = None) -> int:
    """Run `work` in a forked child, which prints the traceback of an exception.

    Args:
        work: Called in the child.
        kill_after_s: The child is killed if it still runs then.

    Returns:
        0; the number of an OSError; 1 after another exception; or minus the number of the signal that ended the child.
    """
    child = start(work)
    if kill_after_s is not None:
        deadline = time.monotonic() + kill_after_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
    return finish([child])[0]


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait until a condition is true; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def limit_descriptors(num_free: int) -> None:
    """Let this process open only `num_free` more files, however many are open."""
    is_open = set(map(int, os.listdir("/dev/fd")))
    limit = 0
    while num_free:
        num_free -= limit not in is_open
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let Python switch between threads 500 times as often as usual."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(seconds)
