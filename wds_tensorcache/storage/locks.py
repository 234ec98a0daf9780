"""Locks on files, on folders, and on byte ranges of a file.

The system releases them when the processes that hold them end. On some network file systems, files and folders are not locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from struct import Struct

# names of files that a writer, and a write by Ray, lock in their folder
_LOCK = re.compile(r"\..+\.lock|\.ray-[0-9a-f]{8}\.writing", re.DOTALL).fullmatch
_FOLDER_WAIT_S = 60.0  # many writers may change a manifest in turn, each for an instant
CAN_LOCK_RANGES = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
_RANGE = Struct("@hhqqi0q")  # type, whence, first byte, length (0 for all bytes after it), pid
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})


def wait_for(take: Callable[[], bool | None], wait_s: float) -> bool | None:
    """Call `take` until it is not False, at most for `wait_s` seconds. Return the last result."""
    until, pause_s = time.monotonic() + wait_s, 0.0002
    while (is_taken := take()) is False and time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    return is_taken


class OwnedFile:
    """An open file or folder. It is closed by `close`, or when this object is freed.

    Attributes:
        fd: Descriptor; -1 after `close`.
        in_children: True if forked children keep their copies of the descriptor.

    Threads/fork: any thread. A forked child closes its copy of the descriptor, unless `in_children` is True.
    """

    in_children = False

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        self.fd = os.open(path, flags, 0o666)
        self._closing = weakref.finalize(self, os.close, self.fd)
        _OPEN[self] = None

    def close(self) -> None:
        self.fd = -1
        self._closing()


class Flock(OwnedFile):
    """An exclusive lock on a file or folder until `close`.

    Args:
        wait_s: Seconds for which the constructor waits for the lock.

    Attributes:
        is_locked: True with the lock, False if another process or object held it, None if the file system has no locks.
    """

    is_locked: bool | None = False

    def __init__(self, path: str, flags: int = os.O_RDONLY, wait_s: float = 0.0) -> None:
        super().__init__(path, flags)
        self.is_locked = wait_for(lambda: _flock(self.fd, fcntl.LOCK_EX), wait_s)

    def close(self) -> None:
        """Release the lock, and close the file or folder."""
        if self.fd >= 0 and self.is_locked:
            # Closing is not enough if a child that was forked just now has not closed its copy yet.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        super().close()


def _flock(fd: int, kind: int) -> bool | None:
    """Take a lock; return False if it is held, None without locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[bool]:
    """Hold the lock of a folder while shared files in it change.

    Yields True with the lock, and False if the file system has no locks on folders, for example NFS. Raises FileExistsError if
    another process or thread still held the lock after 60 s.
    """
    with contextlib.closing(Flock(folder, wait_s=_FOLDER_WAIT_S)) as lock:
        if lock.is_locked is False:
            problem = f"another process has locked the folder for {_FOLDER_WAIT_S:.0f} s"
            raise FileExistsError(f"{folder}: {problem}; wait until that process ends, or write to another folder")
        yield lock.is_locked is True


def find_writer(folder: str) -> str | None:
    """Return "this process" or "another process" if a writer is active.

    Otherwise, return None. A write by Ray counts, too. The manifest may not list the new shards of an active writer yet. On a
    file system without locks, a writer counts as active until its lock file is deleted.
    """
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if _LOCK(name)]
    return next((holder_of(path) for path in paths if is_held(path)), None)


def holder_of(path: str) -> str:
    """Return "this process" if it holds a `Flock` of the file.

    Otherwise, return "another process". Without locks, every open `Flock` counts as held.
    """
    files = [ref() for ref in _OPEN.keyrefs()]  # a copy, because other threads may open files now
    own = [os.path.realpath(file.path) for file in files if isinstance(file, Flock) and file.is_locked is not False]
    return "this process" if os.path.realpath(path) in own else "another process"


def is_held(path: str) -> bool:
    """Return whether a process may hold the lock of a file. The check takes the lock for an instant."""
    try:
        file = OwnedFile(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as exc:
        return not isinstance(exc, FileNotFoundError)
    with contextlib.closing(file):
        return _flock(file.fd, fcntl.LOCK_SH) is not True


def lock_range(fd: int, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock bytes of an open file; see `RangeLocks.lock`."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(fd, command, _RANGE.pack(kind, os.SEEK_SET, begin, length, 0))
    except OSError as exc:
        if exc.errno in _BUSY:
            return False
        raise
    return True


class RangeLocks(OwnedFile):
    """An open file whose bytes can be locked, exclusively or shared.

    The holder of a lock is this object, not a thread or a process (Linux, "open file description locks"). Two objects of this
    class exclude each other, even in one thread. The kernel releases the locks when the last process with this
    object's open file closes the file or ends; `unlock` releases them at once.

    Raises:
        OSError: The file does not exist, is a symbolic link, or cannot be opened.

    Threads/fork: any thread; all threads of a process share the locks. With `in_children`, forked children share them, too,
        even after this process ends.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)

    def lock(self, begin: int, length: int = 1, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock `length` bytes from byte `begin` on. Return whether the lock was taken.

        A `length` of 0 means all later bytes. With `shared`, other holders may share the lock. With `wait`, wait until no other
        holder has a conflicting lock.
        """
        return lock_range(self.fd, begin, length, shared=shared, wait=wait)

    def unlock(self, begin: int, length: int = 1) -> None:
        """Release this object's locks on bytes; arguments are as for `lock`."""
        if self.fd < 0:
            return  # closed, for example in a child that was forked while a lock was held
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_UNLCK, os.SEEK_SET, begin, length, 0))

    @contextlib.contextmanager
    def held(self, begin: int) -> Iterator[None]:
        """Wait for the exclusive lock of byte `begin`, and hold it."""
        try:
            self.lock(begin, wait=True)
            yield
        finally:
            self.unlock(begin)

    def locked_by_others(self, begin: int, length: int) -> list[int]:
        """Return the first byte of each range that other holders have locked.

        The ranges are those in `[begin, begin + length)`, ascending.
        """
        locked, todo = [], [(begin, begin + length)]
        while todo:
            begin, end = todo.pop()
            asked = _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
            # the kernel returns any lock in the range, not always the first lock
            kind, _, first, nbytes, _ = _RANGE.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                first, last = max(first, begin), first + nbytes if nbytes else end
                locked.append(first)
                todo += [part for part in ((begin, first), (last, end)) if part[0] < part[1]]
        return sorted(locked)


_OPEN: weakref.WeakKeyDictionary[OwnedFile, None] = weakref.WeakKeyDictionary()


def _close_in_child() -> None:
    for file in _OPEN:
        if not file.in_children:
            OwnedFile.close(file)  # without unlocking the parent's file


# Fork: the kernel releases a lock when every process that has the file open has closed it. The child's copy would keep the
# lock of a killed parent. A comparison of process ids cannot help, because the child may never use the file.
os.register_at_fork(after_in_child=_close_in_child)
