"""Locks with which a process claims a file or folder; the system releases a lock when the process that holds it ends."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator

__all__ = ["Held", "OwnedFile", "is_being_written", "locked_folder", "open_regular"]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_REGULAR = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
# files that the writer of a pattern, and a write by Ray, create in their folder, and lock until they end
_LOCK = re.compile(r"\.tensorcache\.[0-9a-f]{8}\.lock|\.ray-[0-9a-f]{8}\.writing").fullmatch
_WAIT_S = 10.0  # the longest wait during which nothing in the folder changes; the total wait may be six times as long


class OwnedFile:
    """An open file or folder of this process alone, until `close`, or until this object is freed.

    Hazard: a lock ends when the last process that has the file open closes it. So a forked child closes its copy: otherwise it
    would keep the lock of a parent that is killed.

    Attributes:
        path: Path with which the file or folder was opened.
        fd: Descriptor; -1 after `close`.
        in_children: True if forked children keep their copies.

    Threads/fork: any thread.
    """

    in_children = False

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        self.fd = os.open(path, flags | _FLAGS, 0o666)
        self._closing = weakref.finalize(self, os.close, self.fd)
        _OPEN.add(self)

    def close(self) -> None:
        """Close the file."""
        self.fd = -1
        self._closing()


class Held(OwnedFile):
    """An open file or folder that can be locked.

    It stays open until `close`, or until this object is freed. If `lock` succeeds, it also stays locked until then.

    """

    _is_locked = False

    def lock(self) -> bool | None:
        """Take the lock if it is free.

        Returns:
            True if the lock was taken, False if it is held elsewhere; None if the system or the file system has no locks.
        """
        if fcntl is None:
            return None
        try:
            self._is_locked = True  # set before the call, since an interrupt may arrive right after it
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def close(self) -> None:
        """Release the lock, if taken, and close the file or folder."""
        if self.fd >= 0 and self._is_locked and fcntl is not None:
            # Hazard: closing is not enough if a child that was forked just now has not closed its copy yet.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        super().close()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_OPEN: weakref.WeakSet[OwnedFile] = weakref.WeakSet()


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[bool]:
    """Hold the lock of a folder during the `with` block, so that one process at a time changes shared files in the folder.

    Yields False, and has no effect, if the system or the file system has no locks. NFS has none for folders.

    Raises:
        FileExistsError: The lock was still held elsewhere after 60 s, or after 10 s in which no file was added to the folder or
            removed from it.
    """
    if os.name != "posix":
        yield False
        return
    with Held(folder, os.O_RDONLY) as held:
        begun = still_since = time.monotonic()
        changed_at = os.fstat(held.fd).st_mtime_ns
        pause_s = 0.0005
        while (is_locked := held.lock()) is False:
            now, before, changed_at = time.monotonic(), changed_at, os.fstat(held.fd).st_mtime_ns
            # Hazard: many writers may hold the lock in turn, each briefly. Unlike a process that hangs, they change the folder.
            still_since = now if changed_at != before else still_since
            if now - still_since >= _WAIT_S or now - begun >= 6 * _WAIT_S:
                what = f"locked for {now - begun:.0f} s, now by process {_holder(held.fd) or 'unknown'}"
                raise FileExistsError(f"{folder}: {what}; wait until that process ends, or write to another folder")
            time.sleep(pause_s := min(2 * pause_s, 0.05))
        yield is_locked is True


def is_being_written(folder: str) -> bool:
    """Return whether a writer holds the lock of its pattern, or of its write, in a folder; its new shards may be unlisted.

    Without locks, as on some network file systems, a writer counts as active until its lock file is deleted.
    """
    try:
        # Hazard: a writer that starts during this call must not find its lock file, or that of a killed writer, locked by it.
        with locked_folder(folder):
            return any(_is_held(os.path.join(folder, name)) for name in os.listdir(folder) if _LOCK(name))
    except FileExistsError:  # a process that hangs holds the folder
        return True


def _is_held(path: str) -> bool:
    try:
        file = Held(path, os.O_RDONLY | _REGULAR & ~os.O_RDWR)
    except OSError as exc:
        return not isinstance(exc, FileNotFoundError)
    with file:
        return file.lock() is not True


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
    """Open an ordinary file for reading and writing; return None if it is not one, does not exist, or cannot be opened."""
    try:
        file = Held(path, _REGULAR)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fd).st_mode):
        return file
    file.close()
    return None


def _close_in_child() -> None:
    for file in _OPEN:
        if not file.in_children:
            OwnedFile.close(file)  # without unlocking the parent's file


# A comparison of process ids cannot do this: the child may never use the file, and would keep its lock all the same.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
