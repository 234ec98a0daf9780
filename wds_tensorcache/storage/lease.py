"""Read leases: while a process holds one, Linux delays processes that truncate the file or open it for writing.

If a mapped file is truncated while a process copies from the map, SIGBUS kills the process. A lease prevents the truncation.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import weakref
from collections.abc import Sequence

from wds_tensorcache.storage.files import LEASE_FDS, ShardFile
from wds_tensorcache.storage.system import LOCAL, file_system

if sys.platform == "linux":
    import fcntl
    import signal

__all__ = ["Leases"]

# the most descriptors that leases may use; up to half as many stay open between copies
_MAX_OPEN = 64
# The kernel revokes a lease `lease-break-time` after another process wants the file. If that time is shorter than this, a
# lease could end during a copy, so leases are not used.
_MIN_BREAK_TIME_S = 5
# After these errors, the next copy tries a lease again: another process had the file open for writing, or descriptors or
# memory were short. After any other error, this file gets no lease.
_PASSING = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Leases:
    """Read leases, each on a separate open file description, so that releasing one keeps the leases of other threads.

    Call `release` after each copy: until then, or until this object is freed, a process that opens a shard for writing waits.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, list[int]]] = []
        self._net = weakref.finalize(self, _release, self._taken)
        self._net.atexit = False

    def take(self, files: Sequence[ShardFile]) -> bool:
        """Take a lease on every file and return True. If one lease is unavailable or not safe, take none and return False."""
        if sys.platform != "linux" or len(LEASE_FDS) + sum(not file.lease_fds for file in files) > _MAX_OPEN:
            return False
        for file in files:
            try:
                if file.may_lease is None:
                    file.may_lease = _is_trusted(file)
            except OSError:  # descriptors or memory are short; the next copy tries again
                break
            if not file.may_lease:
                break
            try:
                self._add(file)
            except OSError as exc:
                file.may_lease = exc.errno in _PASSING
                break
        else:
            return True
        _release(self._taken)
        return False

    def _add(self, file: ShardFile) -> None:
        """Take a lease on one more file; raise OSError if it is unavailable, with EAGAIN if the file is open for writing."""
        if sys.platform == "linux":
            idle = file.lease_fds
            try:
                fd = idle.pop()
            except IndexError:
                fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                LEASE_FDS[fd] = idle
            self._taken.append((fd, idle))
            # The kernel signals that another process wants the file. The default, SIGIO, would kill this process; SIGURG is
            # ignored. F_SETOWN 0 then stops all signals.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETOWN, 0)

    def are_held(self) -> bool:
        """Return whether all leases are held, and no other process waits for one of the files."""
        return sys.platform == "linux" and all(
            fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK for fd, _ in self._taken
        )

    def release(self) -> None:
        """Release all leases."""
        _release(self._taken)
        self._net.detach()


def _release(taken: list[tuple[int, list[int]]]) -> None:
    while taken:
        fd, idle = taken[-1]
        if sys.platform == "linux":
            # closing alone is not enough: a child that was forked meanwhile would keep the lease
            with contextlib.suppress(OSError):  # no lease was taken, or the kernel revoked it
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        # Hazard: an interrupt between these two lines leaks a descriptor, but cannot keep a lease or use a descriptor twice.
        taken.pop()
        idle.append(fd)
        while len(LEASE_FDS) > _MAX_OPEN // 2 and idle:
            with contextlib.suppress(IndexError):  # another thread took the last idle descriptor
                fd = idle.pop()
                del LEASE_FDS[fd]
                os.close(fd)


def _is_trusted(file: ShardFile) -> bool:
    """Return whether a lease on `file` blocks every writer for long enough to copy."""
    with open("/proc/sys/fs/lease-break-time", encoding="ascii") as setting:
        break_time_s = int(setting.read())  # 0: no limit
    kind, _ = file_system(f"/proc/self/fd/{file.fd}")
    status = os.fstat(file.fd)
    # Hazard: reading a hole in a tmpfs file allocates memory, and raises SIGBUS if there is none left.
    is_sparse = kind == "tmpfs" and status.st_blocks * 512 < status.st_size
    return kind in LOCAL and not is_sparse and not 0 < break_time_s < _MIN_BREAK_TIME_S


def _forget() -> None:
    """Close the inherited descriptors in a forked child, so that it does not keep its parent's leases after the parent ends."""
    for fd, idle in LEASE_FDS.items():
        os.close(fd)
        idle.clear()
    LEASE_FDS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
