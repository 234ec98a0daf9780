"""Locks on byte ranges of a file. The kernel releases them when the last process with the open file closes it or ends."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

from wds_tensorcache.storage.locks import OwnedFile

CAN_LOCK_RANGES = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
_FLOCK = Struct("@hhqqi0q")  # type, whence, first byte, length (0 for all bytes after it), pid
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})


def lock_range(fd: int, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock bytes of the open file with descriptor `fd`; see `RangeLocks.lock`."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, begin, length, 0))
    except OSError as exc:
        if exc.errno in _BUSY:
            return False
        raise
    return True


class RangeLocks(OwnedFile):
    """An open file whose bytes can be locked: exclusively by one holder, or shared by any number of holders.

    The holder of a lock is this object, not a thread or a process (Linux, "open file description locks"). Two objects of this
    class exclude each other, even in one thread. The kernel releases the locks when the last process with this
    object's open file closes the file or ends.

    Args:
        path: Path of an existing file.

    Attributes:
        path: Path of the file.
        fd: Descriptor of the open file, closed by `close`, or when this object is freed. Its locks remain as long as a forked
            child has the file open; `unlock` releases them at once.
        in_children: Set this to True to keep the file open in forked children. They then share this object's locks, even after
            this process ends.

    Raises:
        OSError: The file does not exist, is a symbolic link, or cannot be opened.

    Threads/fork: any thread; all threads of a process share the locks. A forked child closes its copy, unless `in_children`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)

    def lock(self, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock `length` bytes from byte `begin` on, or all later bytes if `length` is 0.

        Args:
            shared: Let other holders share the lock. Otherwise the lock is exclusive.
            wait: Wait until no other holder has a conflicting lock.

        Returns:
            True if the lock was taken; False if `wait` is False and another holder has a conflicting lock.
        """
        return lock_range(self.fd, begin, length, shared=shared, wait=wait)

    def unlock(self, begin: int, length: int = 1) -> None:
        """Release this object's locks on `length` bytes from byte `begin` on, or on all later bytes if `length` is 0."""
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
        locked, todo = [], [(begin, begin + length)]
        while todo:
            begin, end = todo.pop()
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
            # the kernel returns any lock in the range, not always the first lock
            kind, _, first, nbytes, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                first, last = max(first, begin), first + nbytes if nbytes else end
                locked.append(first)
                todo += [part for part in ((begin, first), (last, end)) if part[0] < part[1]]
        return sorted(locked)
