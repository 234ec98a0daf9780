"""Locks on files and folders that say that a living process writes them; the system takes them back when it ends."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

__all__ = [
    "Held",
    "call_when_gone",
    "locked_folder",
    "open_regular",
]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_REGULAR = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_WAIT_S = 10.0  # for a process that has locked a folder and changes nothing in it; in all, six times as long


class _Net(weakref.ref):  # type: ignore[type-arg]
    call: Callable[[], Any] = tuple  # nothing, where an interrupt came before it was set


_CALL = methodcaller("call")


def call_when_gone(thing: Any, call: Callable[[], Any]) -> Any:
    """Let a function be called when an object is gone, unless what is returned here has gone before it.

    Hazard: an interrupt that comes in a callback written in Python is printed by the interpreter, and lost. So the function has
    to be in C, and all that it calls.
    """
    net = _Net(thing, _CALL)
    net.call = call
    return net


class Held:
    """An open file or folder, and its lock, if it was taken: until `close`, the last reference, or the end of the process.

    Threads/fork: any thread. A forked child has it closed, so that it does not keep the lock of a parent that was killed.

    Attributes:
        path: Where it was opened.
        fd: The descriptor; -1 when it is closed.
    """

    def __init__(self, path: str, flags: int) -> None:
        self.path, self.fd = path, -1
        self._pid = os.getpid()
        self._is_locked = False
        with _opening:
            self.fd = os.open(path, flags | _FLAGS, 0o666)
            # one call in C, which does it once; an interrupt comes before it or after it
            self._close: Callable[[], Any] = partial(deque, map(os.close, filter(_OPEN.pop, [self.fd])), 0)
            _OPEN[self.fd] = call_when_gone(self, self._close)

    def lock(self) -> bool | None:
        """Take the lock, if it is free.

        Returns:
            Whether it was free; None if the system or the file system has no locks.
        """
        if fcntl is None:
            return None
        try:
            self._is_locked = True  # perhaps; an interrupt may come right after the call
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def close(self) -> None:
        """Release the lock, and close the file or folder."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid():  # a forked child has closed it
            if self._is_locked and fcntl is not None:
                # Hazard: a child that was forked meanwhile may not have closed its copy yet, and would keep the lock.
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_UN)
            self._close()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_OPEN: dict[int, Any] = {}  # by descriptor, what closes it when its object is gone
_opening = threading.RLock()  # no fork between opening a descriptor and noting it


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Let one process at a time change what is shared in a folder, where the system has locks.

    Raises:
        FileExistsError: Another process has locked the folder, and nothing in it has changed for 10 s.
    """
    if os.name != "posix":
        yield
        return
    with Held(folder, os.O_RDONLY) as held:
        begun = still_since = time.monotonic()
        changed_at = os.fstat(held.fd).st_mtime_ns
        pause_s = 0.0005
        while held.lock() is False:
            now, before, changed_at = time.monotonic(), changed_at, os.fstat(held.fd).st_mtime_ns
            # Hazard: many writers take turns, each for a moment. They rename files here; a process that hangs does not.
            still_since = now if changed_at != before else still_since
            if now - still_since >= _WAIT_S or now - begun >= 6 * _WAIT_S:
                who = f"process {_holder(held.fd) or 'unknown'} has kept the folder locked for {now - begun:.0f} s"
                raise FileExistsError(f"{folder}: {who}; wait for its end or end it, or write to another folder")
            time.sleep(pause_s := min(2 * pause_s, 0.05))
        yield


def _holder(fd: int) -> int | None:
    """Return the pid of a process that has locked an open file or folder; None if the system does not say."""
    status = os.fstat(fd)
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in map(str.split, table):
            if line[1] == "FLOCK" and where in line:
                return int(line[4])
    return None


def open_regular(path: str) -> Held | None:
    """Open a file that a listing gave; None if it is a link, folder, FIFO, socket or device, has gone, or is another user's."""
    try:
        file = Held(path, _REGULAR)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fd).st_mode):
        return file
    file.close()
    return None


def _close_in_child() -> None:
    for fd in _OPEN:
        os.close(fd)
    _OPEN.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_in_child)
