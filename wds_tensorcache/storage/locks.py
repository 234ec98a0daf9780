"""Locks by which a living process claims a file or folder; the system releases them when the process ends."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from wds_tensorcache.storage.threads import call_when_gone

__all__ = ["Held", "locked_folder", "open_regular"]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_REGULAR = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_WAIT_S = 10.0  # for a process that holds the lock and changes nothing in the folder; six times as long in total


class Held:
    """An open file or folder, and its lock, if taken. Both last until `close`, the last reference, or the end of the process.

    Threads/fork: any thread. It is closed in a forked child, so that the child does not keep the lock of a killed parent.

    Attributes:
        path: Path at which it was opened.
        fd: The descriptor; -1 when it is closed.
    """

    def __init__(self, path: str, flags: int) -> None:
        self.path, self.fd = path, -1
        self._pid = os.getpid()
        self._is_locked = False
        with _opening:
            self.fd = os.open(path, flags | _FLAGS, 0o666)
            # a single C call, which acts once; an interrupt arrives before it or after it
            self._close: Callable[[], Any] = partial(deque, map(os.close, filter(_OPEN.pop, [self.fd])), 0)
            _OPEN[self.fd] = call_when_gone(self, self._close)

    def lock(self) -> bool | None:
        """Take the lock if it is free.

        Returns:
            True if it was free, False if not; None if the system or the file system has no locks.
        """
        if fcntl is None:
            return None
        try:
            self._is_locked = True  # set first: an interrupt may arrive right after the call
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def close(self) -> None:
        """Release the lock, and close the file or folder."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid():  # already closed, in a forked child
            if self._is_locked and fcntl is not None:
                # Hazard: a child that was forked meanwhile may not have closed its copy yet, and would keep the lock.
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_UN)
            self._close()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_OPEN: dict[int, Any] = {}  # by descriptor, the net that closes it
_opening = threading.RLock()  # no fork between opening a descriptor and noting it


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Exclude other processes from changing shared files in a folder, if the system has locks.

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
            # Hazard: many writers may hold the lock in turn, each briefly. They change the folder, unlike a process that hangs.
            still_since = now if changed_at != before else still_since
            if now - still_since >= _WAIT_S or now - begun >= 6 * _WAIT_S:
                who = f"process {_holder(held.fd) or 'unknown'} has kept the folder locked for {now - begun:.0f} s"
                raise FileExistsError(f"{folder}: {who}; wait for its end or end it, or write to another folder")
            time.sleep(pause_s := min(2 * pause_s, 0.05))
        yield


def _holder(fd: int) -> int | None:
    """Return the pid of the process that holds the lock of an open file or folder; None if unknown."""
    status = os.fstat(fd)
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in map(str.split, table):
            if line[1] == "FLOCK" and where in line:
                return int(line[4])
    return None


def open_regular(path: str) -> Held | None:
    """Open a file in a folder; return None if it is not an ordinary file, does not exist, or belongs to another user."""
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
