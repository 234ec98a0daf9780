"""Properties of the machine: file systems, memory and cores."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

__all__ = ["LOCAL", "MEMORY", "file_system", "memory_nbytes", "num_cores", "overcommit_is_off", "start_writeback"]

# Leases on these bind every writer. Those on network file systems do not bind other hosts, nor those on stacked file
# systems the layer below.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})
MEMORY = frozenset({"tmpfs", "ramfs"})
_NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "9p", "beegfs", "gpfs", "afs", "gluster", "virtiofs")
_IS_LINUX = sys.platform == "linux"
_SYNC_FILE_RANGE_WRITE = 2
_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}


def file_system(path: str) -> tuple[str, bool]:
    """Return the type of the file system that contains `path` ("" if unknown), and whether it is a network file system."""
    # mountinfo escapes characters as \ooo
    path = os.path.realpath(path).translate(_ESCAPES)
    ends = [at for at, character in enumerate(path) if character == "/"]
    parents = {"/", path, *(path[:end] for end in ends)}
    found, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                point = line.split(" ", 5)[4]
                if point in parents and len(point) >= len(found):
                    found, kind = point, line.partition(" - ")[2].split(" ")[0]
    except OSError:
        return "", False
    return kind, kind.startswith(_NETWORK)


def memory_nbytes() -> int | None:
    """Return the size of physical memory in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def overcommit_is_off() -> bool:
    """Return whether the system refuses to overcommit memory, so that private maps of shards count against its limit."""
    try:
        with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return False


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_writeback(fd: int, begin: int, nbytes: int) -> None:
    """Let the disk begin to write what was changed in a range of a file, on Linux. `os.fsync` reports errors."""
    if _IS_LINUX:
        _sync_file_range(fd, begin, nbytes, _SYNC_FILE_RANGE_WRITE)


if _IS_LINUX:
    _sync_file_range: Any = ctypes.CDLL(None).sync_file_range
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
