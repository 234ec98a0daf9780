"""Locks on byte ranges of a file, which the kernel releases when the processes that took them are gone."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from struct import Struct

from wds_tensorcache.storage.threads import call_when_gone

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["CAN_LOCK_RANGES", "RangeLocks"]

CAN_LOCK_RANGES = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
_FLOCK = Struct("@hhqqi0q")  # type, whence, first byte, length (0 for all bytes after it), pid
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})


class RangeLocks:
    """An open file whose bytes can be locked: exclusively by one holder, or shared by any number of holders.

    The holder of a lock is the open file, not a thread or a process: two objects of this class exclude each other, but the
    threads of one process and its forked children hold the locks of one object together (Linux, "open file description locks").
    The kernel releases them after the last of these processes has closed the file or ended.

    Attributes:
        path: Path of the file.
        fd: Descriptor of the open file, closed when this object is freed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._close: Callable[[], object] = partial(
            deque, map(os.close, [self.fd]), 0
        )  # closes once, however often it is called
        self._net = call_when_gone(self, self._close)

    def close(self) -> None:
        """Close the file; the locks are released when forked children have closed it, too."""
        self._close()

    def lock(self, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock `length` bytes from `begin` on; return False if another holder has one of them and `wait` is False."""
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self.fd, command, _FLOCK.pack(kind, os.SEEK_SET, begin, length, 0))
        except OSError as exc:
            if exc.errno in _BUSY:
                return False
            raise
        return True

    def unlock(self, begin: int, length: int = 1) -> None:
        """Release the locks of this object on `length` bytes from `begin` on."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, begin, length, 0))

    @contextmanager
    def held(self, begin: int) -> Iterator[None]:
        """Hold the exclusive lock of one byte during the `with` block, after waiting for it."""
        self.lock(begin, wait=True)
        try:
            yield
        finally:
            self.unlock(begin)

    def locked_by_others(self, begin: int, length: int) -> list[int]:
        """Return the first byte of each range in `[begin, begin + length)` that other holders have locked, ascending."""
        found, end = [], begin + length
        while begin < end:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
            kind, _, first, nbytes, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                break
            found.append(first)
            begin = first + nbytes if nbytes else end
        return found
