"""Locks on byte ranges of a file, which the kernel releases when all processes that have the file open are gone."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from struct import Struct

from wds_tensorcache.storage.threads import NO_FORK, Living, call_when_gone

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

    The holder of a lock is this object, not a thread or a process (Linux, "open file description locks"). Two objects of this
    class exclude each other, even in one thread. The kernel releases the locks when the last process that has this object's
    file open closes it or ends.

    Args:
        path: Path of an existing file.

    Attributes:
        path: Path of the file.
        fd: Descriptor of the open file, closed by `close`, or when this object is freed.
        in_children: Set this to True to keep the file open in forked children. They then share this object's locks, even after
            this process ends.

    Raises:
        OSError: The file does not exist, is a symbolic link, or cannot be opened.

    Threads/fork: any thread; all threads of a process share the locks. A forked child closes its copy, unless `in_children`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.in_children = False
        with NO_FORK:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            # closes once, however often it is called
            self._close: Callable[[], object] = partial(deque, map(os.close, [self.fd]), 0)
            self._net = call_when_gone(self, self._close)
            _OPENED.add(self)

    def close(self) -> None:
        """Close the file. The locks remain as long as a forked child has the file open; `unlock` releases them at once."""
        self.fd = -1
        with NO_FORK:  # otherwise a child that is forked during the system call inherits the file and its locks
            self._close()

    def lock(self, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock `length` bytes from byte `begin` on, or all bytes from there on if `length` is 0.

        Returns:
            True if the lock was taken; False if `wait` is False and another holder has locked one of the bytes.
        """
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
        """Release the locks of this object on `length` bytes from byte `begin` on, or on all bytes from there on if it is 0."""
        if self.fd < 0:
            return  # closed, for example in a child that was forked while a lock was held
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, begin, length, 0))

    @contextmanager
    def held(self, begin: int) -> Iterator[None]:
        """Wait for the exclusive lock of byte `begin`, and hold it during the `with` block."""
        try:
            self.lock(begin, wait=True)
            yield
        finally:
            self.unlock(begin)

    def locked_by_others(self, begin: int, length: int) -> list[int]:
        """Return the first byte of each range in `[begin, begin + length)` that other holders have locked, ascending."""
        found, todo = [], [(begin, begin + length)]
        while todo:
            begin, end = todo.pop()
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
            # the kernel returns any lock in the range, not always the first one
            kind, _, first, nbytes, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                first, last = max(first, begin), first + nbytes if nbytes else end
                found.append(first)
                todo += [part for part in ((begin, first), (last, end)) if part[0] < part[1]]
        return sorted(found)


_OPENED: Living[RangeLocks] = Living()


def _close_in_child() -> None:
    for locks in _OPENED:
        if not locks.in_children:
            locks.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
