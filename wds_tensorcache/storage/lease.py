"""Read leases: while a process holds one, Linux delays processes that truncate the file or open it for writing.

If a mapped file is truncated during a copy, the process gets SIGBUS. Under a lease, the file cannot be truncated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import weakref
from collections.abc import Sequence

from wds_tensorcache.storage.files import LEASE_FDS, ShardFile
from wds_tensorcache.storage.system import LOCAL, file_system

if sys.platform == "linux":
    import fcntl
    import signal

__all__ = ["Leases"]

# the number of descriptors that leases may use; half of them stay open for the next copy
_MAX_OPEN = 64
# the kernel breaks a lease after `lease-break-time`; if that is shorter than this, it could end during a copy
_MIN_BREAK_TIME_S = 5
# temporary: another process writes the file, or descriptors or memory are short; other errors are permanent
_PASSING = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_opening = threading.RLock()  # no fork between opening a descriptor and noting it


class Leases:
    """Read leases, each on a separate open file description, so that releasing one does not release those of other threads.

    Hold them only for one copy: a process that opens the shard for writing waits until `release`, or until they are freed.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, list[int]]] = []
        self._net = weakref.finalize(self, _release, self._taken)
        self._net.atexit = False

    def take(self, files: Sequence[ShardFile]) -> bool:
        """Take a lease on each file. If one is unavailable or not trusted, take none and return False."""
        if sys.platform != "linux" or len(LEASE_FDS) + sum(not file.lease_fds for file in files) > _MAX_OPEN:
            return False
        for file in files:
            try:
                if file.may_lease is None:
                    file.may_lease = _is_trusted(file)
            except OSError:  # descriptors or memory are short: the next copy tries again
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
        """Take a lease on one more file; raise OSError if none is available, EAGAIN if the file is open for writing."""
        if sys.platform == "linux":
            idle = file.lease_fds
            try:
                fd = idle.pop()
            except IndexError:
                with _opening:
                    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    LEASE_FDS[fd] = idle
            self._taken.append((fd, idle))
            # the kernel announces a break by SIGIO, which kills; SIGURG is ignored, and without an owner nothing is sent
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETOWN, 0)

    def are_held(self) -> bool:
        """Return False if a process waits for one of the leases."""
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
            # only closing would leave the lease with a child that was forked meanwhile
            with contextlib.suppress(OSError):  # there was none, or the kernel took it back
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        # Hazard: an interrupt between these two costs a descriptor, but never keeps a lease, nor gives one out twice.
        taken.pop()
        idle.append(fd)
        while len(LEASE_FDS) > _MAX_OPEN // 2 and idle:
            with contextlib.suppress(IndexError):  # other threads take descriptors of the file, too
                fd = idle.pop()
                del LEASE_FDS[fd]
                os.close(fd)


def _is_trusted(file: ShardFile) -> bool:
    """Return whether a lease on `file` keeps every writer away for long enough."""
    with open("/proc/sys/fs/lease-break-time", encoding="ascii") as setting:
        break_time_s = int(setting.read())  # 0: no limit
    kind, _ = file_system(f"/proc/self/fd/{file.fd}")
    status = os.fstat(file.fd)
    # Hazard: reading a hole of a tmpfs file allocates memory; without free memory, it ends in SIGBUS.
    is_sparse = kind == "tmpfs" and status.st_blocks * 512 < status.st_size
    return kind in LOCAL and not is_sparse and not 0 < break_time_s < _MIN_BREAK_TIME_S


def _forget() -> None:
    """Close inherited descriptors in a forked child; they would keep the parent's leases after the parent ends."""
    for fd, idle in LEASE_FDS.items():
        os.close(fd)
        idle.clear()
    LEASE_FDS.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget)
