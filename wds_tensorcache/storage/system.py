"""Properties of the machine, and limits of system calls and files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

# of a manifest, an index or another file that is read as a whole; such a manifest lists about two million shards
MAX_WHOLE_NBYTES = 1 << 28
MAX_BUFFERS = 1024  # IOV_MAX, the most buffers that one system call reads or writes
MEMORY = frozenset({"tmpfs", "ramfs"})
# Errors of a process or system that has no more descriptors or memory. They say nothing about the file at hand.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# beginnings of the names of network file systems; "fuse" stands for many: sshfs, s3fs, glusterfs, juicefs, moosefs, ...
_NETWORK = tuple(
    "nfs cifs smb fuse lustre ceph 9p beegfs gpfs afs gluster virtiofs coda ncp orangefs pvfs2 panfs wekafs ocfs2 gfs2 cvfs "
    "acfs vboxsf vmhgfs prl_fs drvfs".split()
)
_DEVICES: dict[int, tuple[str, bool]] = {}
_IS_LINUX = sys.platform == "linux"
_SYNC_FILE_RANGE_WRITE = 2
_PR_SET_PDEATHSIG = 1
_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}


def file_system(path: str) -> tuple[str, bool]:
    """Return the type of a path's file system ("" if unknown). Also return whether it is a network file system."""
    # mountinfo escapes characters as \ooo
    path = os.path.realpath(path).translate(_ESCAPES)
    ends = [at for at, character in enumerate(path) if character == "/"]
    parents = {"/", path, *(path[:end] for end in ends)}
    mount, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                point = line.split(" ", 5)[4]
                if point in parents and len(point) >= len(mount):
                    mount, kind = point, line.partition(" - ")[2].split(" ")[0]
    except OSError:
        return "", False
    return kind, kind.startswith(_NETWORK)


def device_kind(device: int, path: str) -> tuple[str, bool]:
    """Return `file_system(path)`, cached by `device`, the `st_dev` of the path."""
    if device not in _DEVICES:
        _DEVICES[device] = file_system(path)
    return _DEVICES[device]


def boot_id() -> str:
    """Return an id that changes whenever the machine starts; "" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return boot.read().strip()
    return ""


def memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int | None) -> None:
    """Let Linux kill this process when the thread that started it ends.

    `parent` is the pid of the parent; None if another process forks, as for `forkserver`. If the parent has ended already, this
    process exits at once. On other systems, this does nothing.
    """
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os._exit(1)


def start_writeback(fd: int, begin: int, nbytes: int) -> None:
    """Start writing a changed range to disk, on Linux. `os.fsync` reports errors."""
    if _IS_LINUX:
        _sync_file_range(fd, begin, nbytes, _SYNC_FILE_RANGE_WRITE)


if _IS_LINUX:
    _sync_file_range: Any = ctypes.CDLL(None).sync_file_range
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def skip_bytes(buffers: Sequence[Any], nbytes: int) -> Sequence[Any]:
    """Return `buffers` without their first `nbytes` bytes. Memory: views."""
    for at, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            # Hazard: a slice of a bytearray is a copy.
            return [memoryview(buffer)[nbytes:], *buffers[at + 1 :]]
        nbytes -= len(buffer)
    return []
