"""Local files: positioned reads, maps, a bound on how many are open, and what is known of where they lie."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError

__all__ = ["Files", "Identity", "ShardFile", "file_system", "memory_nbytes"]

Identity = tuple[int, int, int]  # inode, bytes, modification time in ns
_HAS_PREADV = hasattr(os, "preadv")
_MAX_BUFFERS = 1024  # IOV_MAX
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_UNKNOWN = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "9p", "beegfs", "gpfs", "afs", "gluster", "virtiofs")


class ShardFile:
    """One open file. Reads have no shared position, so any number of threads and forked processes may read at once.

    The file closes when the last reference is gone: one that is being read is never closed under the reader.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self.fd = os.open(path, flags)
        weakref.finalize(self, os.close, self.fd).atexit = False
        status = os.fstat(self.fd)
        self.nbytes = status.st_size
        self.identity: Identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._array: np.ndarray[Any, Any] | None = None
        self._tells = bool(_NOWAIT)  # until the file system says that it cannot
        self._is_memory = file_system(path)[0] in ("tmpfs", "ramfs")

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`.

        Raises:
            FormatError: The file ends before.
        """
        if not hasattr(os, "pread"):
            return bytes(self.map()[begin:end])
        data = os.pread(self.fd, end - begin, begin)
        if len(data) < end - begin:
            rest = bytearray(end - begin - len(data))
            self.read_into([memoryview(rest)], begin + len(data))
            data += rest
        return data

    def read_into(self, buffers: Sequence[memoryview], begin: int) -> None:
        """Fill `buffers` (1-D, bytes), one behind the other, from `begin`: as few calls as the system allows.

        Raises:
            FormatError: The file ends before they are full: it was cut short.
        """
        self._fill(buffers, begin, 0)

    def read_resident(self, buffers: Sequence[memoryview], begin: int) -> bool:
        """Fill `buffers` if that needs no disk; else return False, with anything in them. Never waits.

        True without a word where the system cannot tell: the caller then reads nothing twice.
        """
        if self._tells:
            try:
                return os.preadv(self.fd, buffers[:_MAX_BUFFERS], begin, _NOWAIT) == sum(map(len, buffers))
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno not in _UNKNOWN:
                    raise
                self._tells = False
        self._fill(buffers, begin, 0)
        return True

    def is_resident(self, begin: int) -> bool:
        """Return whether the byte at `begin` is in memory; False where the system cannot tell."""
        resident = self.read_resident([memoryview(bytearray(1))], begin)
        return resident if self._tells else self._is_memory

    def will_need(self, begin: int, end: int) -> None:
        """Tell the system to read `[begin, end)` in the background."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _fill(self, buffers: Sequence[memoryview], begin: int, position: int) -> None:
        if not _HAS_PREADV:
            for buffer in buffers:
                buffer[:] = (
                    self.read(begin, begin + len(buffer)) if hasattr(os, "pread") else self._slice(begin, buffer)
                )
                begin += len(buffer)
            return
        # one call per 1,024 buffers; the system also stops at 2 GiB
        while position < len(buffers):
            count = os.preadv(self.fd, buffers[position : position + _MAX_BUFFERS], begin)
            if not count and any(map(len, buffers[position:])):
                raise FormatError(f"{self.path}: the file ends at byte {begin}, inside of a member: it was cut short")
            begin += count
            while position < len(buffers) and count >= len(buffers[position]):
                count -= len(buffers[position])
                position += 1
            if count:
                buffers = [buffers[position][count:], *buffers[position + 1 :]]
                position = 0

    def _slice(self, begin: int, buffer: memoryview) -> bytes:
        data = self.map()[begin : begin + len(buffer)]
        if len(data) < len(buffer):
            raise FormatError(f"{self.path}: the file ends at byte {begin + len(data)}, inside of a member")
        return data

    def map(self) -> mmap.mmap:
        """Return the whole file as a read-only map, made on first use. A file cut short under a map kills the process."""
        if self._map is None:
            with self._lock:
                if self._map is None:
                    # a map keeps a descriptor of its own unless it is told not to
                    untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
                    self._map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ, **untracked)
        return self._map

    def array(self) -> np.ndarray[Any, Any]:
        """Return the map as uint8, which torch takes without a warning. Memory: a view; never write into it."""
        if self._array is None:
            self._array = view_bytes(memoryview(self.map()))
        return self._array

    def address(self) -> int:
        """Return where the map begins in this process's memory."""
        return int(self.array().__array_interface__["data"][0])


class Files:
    """Open files by path, at most `max_open` at once; the one opened longest ago is dropped first.

    Threads/fork/pickle: safe everywhere; a copy in another process opens its own files.
    """

    def __init__(self, max_open: int | None = None) -> None:
        self.max_open = max_open or _default_max_open()
        self._open: dict[str, ShardFile] = {}
        self._lock = threading.Lock()
        self._closed = False
        _ALL.add(self)

    def get(self, path: str) -> ShardFile:
        """Return the file, opened if it is not.

        Raises:
            OSError: It cannot be opened.
            ValueError: `close` was called.
        """
        file = self._open.get(path)
        if file is not None:
            return file
        with self._lock:
            if self._closed:
                raise ValueError(f"{path}: the cache is closed; load what is needed before, or keep it open")
            file = self._open.get(path)
            if file is None:
                while len(self._open) >= self.max_open:
                    del self._open[next(iter(self._open))]
                file = self._open[path] = ShardFile(path)
        return file

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close every file; reads that are under way finish first. Views of maps stay valid as long as they live."""
        with self._lock:
            self._closed = True
            self._open.clear()

    def renew_lock(self) -> None:
        """Called in a forked child: a thread that held the lock is not there to release it."""
        self._lock = threading.Lock()
        for file in self._open.values():
            file._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Files, (self.max_open,)


_ALL: weakref.WeakSet[Files] = weakref.WeakSet()


def _renew_locks() -> None:
    for files in list(_ALL):
        files.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _default_max_open() -> int:
    """Return a quarter of the descriptors that this process may have: maps take a second one each."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        return 256
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))


def file_system(path: str) -> tuple[str, bool]:
    """Return the type of the file system that `path` is on, "" if unknown, and whether it is a network one."""
    path = os.path.realpath(path)
    found, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields, _, rest = line.partition(" - ")
                point = fields.split(" ")[4].replace("\\040", " ")
                if len(point) >= len(found) and (path + "/").startswith(point.rstrip("/") + "/"):
                    found, kind = point, rest.split(" ")[0]
    except OSError:
        return "", False
    return kind, kind.startswith(_NETWORK)


def memory_nbytes() -> int | None:
    """Return the bytes of physical memory, None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
