"""Local files: positioned reads, maps, a bound on how many are open, and what is known of where they lie."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError, MissingShardError, TarFormatError
from wds_tensorcache.storage.locks import call_when_gone
from wds_tensorcache.storage.system import MEMORY, file_system

__all__ = ["LEASE_FDS", "Files", "Identity", "ShardFile"]

Identity = tuple[int, int, int]  # inode, bytes, modification time in ns
_HAS_PREAD, _HAS_PREADV = hasattr(os, "pread"), hasattr(os, "preadv")
_MAX_BUFFERS = 1024  # IOV_MAX
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_UNKNOWN = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NO_FILE = frozenset({errno.ENXIO, errno.ENODEV, errno.ELOOP})
_ONE_BYTE = [bytearray(1)]


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


# each descriptor that is open for read leases, and the idle ones of its file
LEASE_FDS: dict[int, list[int]] = {}


_NETS: dict[int, Any] = {}  # by descriptor: one that is closed stays until the next file with its number


class ShardFile:
    """One open file. Reads have no shared position, so any number of threads and forked processes may read at once.

    The file closes when the last reference is gone: one that is being read is never closed under the reader.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # O_NONBLOCK: opening a FIFO that is called like a shard would wait for somebody to write into it
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self.fd = os.open(path, flags)
        except OSError as exc:
            if exc.errno in _NO_FILE:
                raise FormatError("expected a file, not a socket, device or link to itself", kind="unreadable").at(
                    path
                ) from exc
            raise
        self.lease_fds: list[int] = []  # idle descriptors for leases
        fds = chain([self.fd], filter(LEASE_FDS.pop, self.lease_fds))
        _NETS[self.fd] = call_when_gone(self, partial(deque, map(os.close, fds), 0))
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("expected a file, not a folder, pipe or device", kind="unreadable").at(path)
        self.nbytes = status.st_size
        self.identity = _identity(status)
        self._map: mmap.mmap | None = None
        self._array: np.ndarray[Any, Any] | None = None
        self._tensor: torch.Tensor | None = None
        self._tells = bool(_NOWAIT)  # until the file system says that it cannot
        self._is_memory: bool | None = None  # asked when needed
        self.may_lease: bool | None = None  # whether a read lease is worth trying; asked when needed

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`.

        Raises:
            FormatError: The file ends before.
        """
        pread = os.pread if _HAS_PREAD else _seek_and_read
        data = pread(self.fd, end - begin, begin)
        while len(data) < end - begin:  # the system stops at 2 GiB
            more = pread(self.fd, end - begin - len(data), begin + len(data))
            if not more:
                raise self._cut_short()
            data += more
        return data

    def _cut_short(self) -> FormatError:
        what = f"the file ends at byte {os.fstat(self.fd).st_size}: it was cut short"
        return TarFormatError(what, kind="truncated").at(self.path)

    def check_unchanged(self) -> None:
        """Raise FormatError if the file was written to since it was opened: what is known of its bytes is no longer true.

        Before maps are used, and after reads. One system call.
        """
        found = _identity(os.fstat(self.fd))
        if found[1] < self.nbytes:
            raise self._cut_short()
        if found != self.identity:
            raise FormatError("the shard was changed while it was open: open it again").at(self.path)

    def check_is(self, fd: int) -> None:
        """Raise FormatError unless a descriptor is of this file, which was not written to since it was opened here."""
        self.check_unchanged()
        if _identity(os.fstat(fd)) != self.identity:
            raise FormatError("another file has this name since it was opened: try again").at(self.path)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Fill `buffers` (1-D, of bytes), one behind the other, from `begin`: as few calls as the system allows.

        Raises:
            FormatError: The file ends before they are full: it was cut short.
        """
        if _HAS_PREADV and len(buffers) == 1 and os.preadv(self.fd, buffers, begin) == len(buffers[0]):
            return
        self._fill(buffers, begin)

    def read_resident(self, buffers: Sequence[Any], begin: int) -> bool:
        """Fill `buffers` if that needs no disk; else return False, with anything in them. Never waits.

        True without a word where the system cannot tell: the caller then reads nothing twice.
        """
        while self._tells and buffers:
            try:
                count = os.preadv(self.fd, buffers[:_MAX_BUFFERS], begin, _NOWAIT)
                if count != sum(map(len, buffers[:_MAX_BUFFERS])):
                    return False
                begin += count
                buffers = buffers[_MAX_BUFFERS:]
            except OSError as exc:
                if not self._is_unable(exc):
                    return False
        if buffers:
            self._fill(buffers, begin)
        return True

    def _is_unable(self, error: OSError) -> bool:
        """Return whether the file system cannot tell what is in memory, which is then known; False if something is not.

        Raises:
            OSError: `error`, if it is neither.
        """
        if error.errno in _UNKNOWN:
            self._tells = False
            return True
        if not isinstance(error, BlockingIOError):
            raise error
        return False

    def is_resident(self, begin: int) -> bool:
        """Return whether the byte at `begin` is in memory; False where the system cannot tell."""
        while self._tells:
            try:
                return os.preadv(self.fd, _ONE_BYTE, begin, _NOWAIT) == 1
            except OSError as exc:
                if not self._is_unable(exc):
                    return False
        if self._is_memory is None:
            self._is_memory = file_system(self.path)[0] in MEMORY
        return self._is_memory

    def will_need(self, begin: int, end: int) -> None:
        """Tell the system to read `[begin, end)` in the background."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _fill(self, buffers: Sequence[Any], begin: int) -> None:
        if not _HAS_PREADV:
            for buffer in buffers:
                memoryview(buffer)[:] = self.read(begin, begin + len(buffer))
                begin += len(buffer)
            return
        position = 0
        # one call per 1,024 buffers; the system also stops at 2 GiB
        while position < len(buffers):
            count = os.preadv(self.fd, buffers[position : position + _MAX_BUFFERS], begin)
            if not count and any(map(len, buffers[position : position + _MAX_BUFFERS])):
                raise self._cut_short()
            begin += count
            while position < len(buffers) and count >= len(buffers[position]):
                count -= len(buffers[position])
                position += 1
            if count:
                buffers = [buffers[position][count:], *buffers[position + 1 :]]
                position = 0

    def map(self) -> mmap.mmap:
        """Return the whole file as a read-only map, made on first use.

        Hazard: where a file is cut short in place, or the disk cannot read a page, reading the map kills the process (SIGBUS).
        `Maps` copies safely.
        """
        if self._map is None:
            with _lock:
                if self._map is None:
                    # a map keeps a descriptor of its own unless it is told not to
                    untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
                    self.check_unchanged()
                    try:
                        self._map = mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_READ, **untracked)
                    except ValueError:  # cut short since
                        self.check_unchanged()
                        raise
        return self._map

    def array(self) -> np.ndarray[Any, Any]:
        """Return the map as uint8, which torch takes without a warning. Memory: a view; never write into it."""
        if self._array is None:
            self._array = view_bytes(memoryview(self.map()))
        return self._array

    def tensor(self) -> torch.Tensor:
        """Return the map as a uint8 tensor. Memory: a view; never write into it."""
        tensor = self._tensor
        if tensor is None:
            tensor = torch.from_numpy(self.array())
            if type(tensor) is torch.Tensor:  # not a fake one, of a mode that torch is in
                self._tensor = tensor
        return tensor

    def address(self) -> int:
        """Return where the map begins in this process's memory."""
        return self.tensor().data_ptr()


_seeking = threading.Lock()


def _seek_and_read(fd: int, nbytes: int, begin: int) -> bytes:
    """Do what `os.pread` does, where that is missing: threads take turns at the file's position."""
    with _seeking:
        os.lseek(fd, begin, os.SEEK_SET)
        return os.read(fd, nbytes)


class Files:
    """Open files by path, at most `max_open` at once; the one opened longest ago is dropped first.

    A `fixed` file that was replaced or changed since it was first opened is not opened again: what is known of its bytes
    is no longer true.

    Threads/fork/pickle: safe everywhere; a copy in another process opens its own files, which must be the same.
    """

    def __init__(
        self, max_open: int | None = None, fixed: bool = True, identities: Mapping[str, Identity] | None = None
    ) -> None:
        if max_open is not None and max_open < 1:
            raise ValueError(f"max_open_files={max_open}, expected at least 1")
        self.max_open = max_open or _default_max_open()
        self._fixed = fixed
        self._open: dict[str, ShardFile] = {}
        self._identities = dict(identities or {})
        self._closed = False

    def get(self, path: str) -> ShardFile:
        """Return the file, opened if it is not.

        Raises:
            OSError: It cannot be opened; a MissingShardError if it is not there.
            FormatError: It is not the one that was opened before.
            ValueError: `close` was called.
        """
        file = self._open.get(path)
        if file is not None:
            return file
        with _lock:
            if self._closed:
                raise ValueError(f"{path}: the cache is closed; load what is needed before, or keep it open")
            file = self._open.get(path)
            if file is None:
                while len(self._open) >= self.max_open:
                    del self._open[next(iter(self._open))]
                try:
                    file = ShardFile(path)
                except FileNotFoundError as exc:
                    raise MissingShardError("the shard is not there: copy it again").at(path) from exc
                if self._fixed and self._identities.setdefault(path, file.identity) != file.identity:
                    raise FormatError("the shard was changed since this cache was opened: open it again").at(path)
                self._open[path] = file
        return file

    def expect(self, path: str) -> None:
        """Let nothing but the file that is at `path` now be opened under it later.

        Raises:
            OSError: There is none.
        """
        self._identities.setdefault(path, _identity(os.stat(path)))

    def reopen(self, path: str) -> ShardFile:
        """Return the file that has this path now, whatever had it when it was opened."""
        with _lock:
            self._open.pop(path, None)
        return self.get(path)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close every file; reads that are under way finish first. Views of maps stay valid as long as they live."""
        with _lock:
            self._closed = True
            self._open.clear()

    def __reduce__(self) -> Any:
        return Files, (self.max_open, self._fixed, self._identities)


_lock = threading.Lock()  # of what opens and maps files


def _renew_lock() -> None:
    """Called in a forked child: a thread that held the lock is not there to release it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _default_max_open() -> int:
    """Return a quarter of the descriptors that this process may have: maps take a second one each."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        return 256
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))
