"""A lock on a pattern of shard names, such as `train-%06d.tar`."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref

from wds_tensorcache.storage.locks import Flock, holder_of, is_held
from wds_tensorcache.writing.pattern import ShardPattern

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_WAIT_S = 0.2  # a process that checks the lock holds it for an instant


class WriterLock:
    """The exclusive right to write the shards of a pattern, until `close`.

    The lock is on the file `.PATTERN.lock` in the folder. A missing folder is made. A read-only folder cannot be locked, nor
    can a folder on a file system without locks. Different patterns may still produce the same names, but a shard never
    replaces another shard.

    Attributes:
        is_locked: True if no other process can have the lock; False without locks.

    Raises:
        FileExistsError: Another writer has the lock, or is a rank of the same build with another world size.

    Threads/fork/pickle: as for `Flock`.
    """

    def __init__(self, pattern: ShardPattern) -> None:
        folder = pattern.folder or os.curdir
        path = os.path.join(folder, f".{pattern.name}.lock")
        self.is_locked = False
        while True:
            os.makedirs(folder, exist_ok=True)
            try:
                file = Flock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _WAIT_S)
            except FileNotFoundError:
                continue  # a call that ends has just deleted the empty folder
            except OSError as exc:
                if exc.errno in _FORBIDDEN:
                    return
                raise
            if file.is_locked is False:
                file.close()
                _refuse(pattern, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fd), os.stat(path)):
                    break
            file.close()  # its last holder has just deleted it
        self.is_locked = file.is_locked is True
        self._closing = weakref.finalize(self, _give_back, file, path, os.getpid())
        if not self.is_locked:
            self.close()
            return
        for name in os.listdir(folder):
            other = os.path.join(folder, name)
            shard = name[1:-5]
            is_part = pattern.is_other_world_size(shard) or (other != path and pattern.covers(shard))
            if name.endswith(".lock") and is_part:
                if is_held(other):
                    self.close()
                    _refuse(pattern, other)
                with contextlib.suppress(OSError):  # the file of a killed writer
                    os.unlink(other)

    def close(self) -> None:
        """Release the lock, so that other writers can start."""
        if hasattr(self, "_closing"):
            self._closing()


def _refuse(pattern: ShardPattern, path: str) -> None:
    other = os.path.join(os.path.dirname(path), os.path.basename(path)[1:-5])
    problem = f"another writer is writing {other}; wait until it ends, or write to another folder"
    if holder_of(path) == "this process":
        problem = f"an unfinished writer of this process is writing {other}; close it, as `with tc.ShardWriter(…)` does"
    raise FileExistsError(f"{pattern}: {problem}")


def _give_back(file: Flock, path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked child must not delete its parent's lock file
        with contextlib.suppress(OSError):
            os.unlink(path)
        file.close()
