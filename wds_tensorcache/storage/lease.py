"""Read leases: while one is held, Linux holds up processes that cut the file short or open it for writing.

A copy from a map of a file that is cut short meanwhile ends in SIGBUS; under a lease the file cannot be cut.
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
from wds_tensorcache.storage.system import LOCAL as _LOCAL
from wds_tensorcache.storage.system import file_system

if sys.platform == "linux":
    import fcntl
    import signal

__all__ = ["Leases"]

# descriptors that leases may take of what the process may have; half of them stay open for the next copy
_MAX_OPEN = 64
# the kernel waits so long for a lease to be given back, and then lets the file be cut: less could end during a copy
_MIN_BREAK_TIME_S = 5
# a writer has the file open, or descriptors or memory are short; all else, such as another owner, stays as it is
_PASSING = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_opening = threading.RLock()  # no fork between opening a descriptor and noting it


class Leases:
    """Read leases, each on an open file description of its own: those of other threads and processes do not end with it.

    Hold them for one copy: a process that opens the shard for writing waits until they are released. They are, too, when the
    last reference to this object has gone.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, list[int]]] = []
        self._net = weakref.finalize(self, _release, self._taken)
        self._net.atexit = False

    def take(self, files: Sequence[ShardFile]) -> bool:
        """Take a lease on each file; return False, with none taken, if one of them cannot be had or trusted."""
        if sys.platform != "linux" or len(LEASE_FDS) + sum(not file.lease_fds for file in files) > _MAX_OPEN:
            return False
        for file in files:
            try:
                if file.may_lease is None:
                    file.may_lease = _is_trusted(file)
            except OSError:  # descriptors or memory are short: it is asked again
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
        """Take a lease on one more file.

        Raises:
            OSError: There is none to be had; EAGAIN if the file is open for writing.
        """
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
        """Return False if a process waits for one of them to be released."""
        return sys.platform == "linux" and all(
            fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK for fd, _ in self._taken
        )

    def release(self) -> None:
        """Give all of them back."""
        _release(self._taken)
        self._net.detach()


def _release(taken: list[tuple[int, list[int]]]) -> None:
    while taken:
        fd, idle = taken[-1]
        if sys.platform == "linux":
            # closing alone would leave the lease to a child that was forked meanwhile
            with contextlib.suppress(OSError):  # there was none, or the kernel took it back
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        # Hazard: an interrupt between these two costs a descriptor, but never leaves a lease, nor gives one out twice.
        taken.pop()
        idle.append(fd)
        if len(LEASE_FDS) > _MAX_OPEN // 2:
            _close(idle)


def _is_trusted(file: ShardFile) -> bool:
    """Return whether a lease on `file` keeps every writer away, and long enough."""
    with open("/proc/sys/fs/lease-break-time", encoding="ascii") as setting:
        break_time_s = int(setting.read())  # 0: without end
    kind, _ = file_system(f"/proc/self/fd/{file.fd}")
    status = os.fstat(file.fd)
    # to read a hole tmpfs needs memory: SIGBUS where it has none left
    is_sparse = kind == "tmpfs" and status.st_blocks * 512 < status.st_size
    return kind in _LOCAL and not is_sparse and not 0 < break_time_s < _MIN_BREAK_TIME_S


def _close(idle: list[int]) -> None:
    """Close the idle descriptors of a file."""
    with contextlib.suppress(IndexError):  # other threads take of them too
        while True:
            fd = idle.pop()
            del LEASE_FDS[fd]
            os.close(fd)


def _forget() -> None:
    """Close what a forked child inherited: the leases are its parent's, and would outlive it."""
    for fd, idle in LEASE_FDS.items():
        os.close(fd)
        idle.clear()
    LEASE_FDS.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget)
