"""Local files: reads at given offsets, memory maps, and a limit on the number of open files; remote files by their urls."""

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
from typing import Any, Protocol, cast

import numpy as np
import torch

from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError, MissingShardError, TarFormatError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.remote_file import RemoteFile, RemoteIdentity, missing_shard
from wds_tensorcache.storage.remote.urls import is_url
from wds_tensorcache.storage.system import MAX_BUFFERS, MEMORY, file_system, skip_bytes
from wds_tensorcache.storage.threads import call_when_gone, per_process

__all__ = ["LEASE_FDS", "Files", "Identity", "ShardFile", "default_max_open"]

Identity = tuple[int, int, int]  # inode, length in bytes, modification time in ns
_HAS_PREAD, _HAS_PREADV = hasattr(os, "pread"), hasattr(os, "preadv")
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_UNKNOWN = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NO_FILE = frozenset({errno.ENXIO, errno.ENODEV, errno.ELOOP})
# Hazard: a FIFO may have a shard's name. Without O_NONBLOCK, opening it would wait for a process that writes to it.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK"))

LEASE_FDS: dict[int, list[int]] = {}  # by descriptor opened for read leases, the list of its file's idle descriptors
_NETS: dict[int, Any] = {}  # by descriptor, the handle that closes it; kept until another file has the same descriptor


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


class ShardFile:
    """An open file. Reads do not use the file position, so any number of threads and forked processes may read at once.

    The file is closed when the last reference to this object is gone, never during a read.

    Raises:
        FormatError: `path` is not an ordinary file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.fd = os.open(path, _FLAGS)
        except OSError as exc:
            if exc.errno in _NO_FILE:
                raise FormatError("expected a file, found a socket, device or circular link", kind="unreadable").at(
                    path
                ) from exc
            raise
        self.lease_fds: list[int] = []  # idle descriptors for leases
        fds = chain([self.fd], filter(LEASE_FDS.pop, self.lease_fds))
        _NETS[self.fd] = call_when_gone(self, partial(deque, map(os.close, fds), 0))
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("expected a file, found a folder, pipe or device", kind="unreadable").at(path)
        self._begin(status)

    def _begin(self, status: os.stat_result) -> None:
        """Set the attributes that depend on the status of the open file, and those that are determined later."""
        self.nbytes = status.st_size
        self.identity = _identity(status)
        self._map: mmap.mmap | None = None
        self._array: np.ndarray[Any, Any] | None = None
        self._address = 0  # of the map, once it exists
        self._tensor: torch.Tensor | None = None
        self.nowait = _NOWAIT  # flag for reads that must not wait for a disk; 0 if this file has no such reads
        self._is_memory: bool | None = None  # whether the file is on tmpfs or ramfs; determined when needed
        self.may_lease: bool | None = None  # whether a read lease is worth trying; determined when needed

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`; raise FormatError if the file is too short."""
        pread = os.pread if _HAS_PREAD else _seek_and_read
        content = pread(self.fd, end - begin, begin)
        while len(content) < end - begin:  # one call reads at most 2 GiB
            more = pread(self.fd, end - begin - len(content), begin + len(content))
            if not more:
                raise self._cut_short()
            content += more
        return content

    def _cut_short(self) -> Exception:
        what = f"the file was cut short and ends at byte {os.fstat(self.fd).st_size}; copy it again"
        return TarFormatError(what, kind="truncated").at(self.path)

    def check_unchanged(self) -> None:
        """Raise FormatError if the file was written to since it was opened. One system call."""
        status = os.fstat(self.fd)  # of the open file, whose inode never changes
        if status.st_mtime_ns == self.identity[2] and status.st_size == self.nbytes:
            return
        if status.st_size < self.nbytes:
            raise self._cut_short()
        raise FormatError("the shard was changed while it was open; open it again").at(self.path)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Read from offset `begin` on into the 1-D byte buffers, in order; raise FormatError if the file is too short."""
        if _HAS_PREADV and len(buffers) == 1 and os.preadv(self.fd, buffers, begin) == len(buffers[0]):
            return
        self._fill(buffers, begin)

    def read_resident(self, buffers: Sequence[Any], begin: int) -> bool:
        """Fill `buffers` like `read_into`, without waiting for a disk.

        Return False if some of the bytes are not in memory; `buffers` then have undefined contents. If the system cannot report
        this, read as usual, even if that waits, and return True. Reason: after False, the caller reads all bytes again.
        """
        while self.nowait and buffers:
            some, buffers = buffers[:MAX_BUFFERS], buffers[MAX_BUFFERS:]
            try:
                nbytes = sum(map(len, some))
                if os.preadv(self.fd, some, begin, self.nowait) != nbytes:
                    return False
                begin += nbytes
            except OSError as exc:
                if not self._is_unable(exc):
                    return False
                buffers = [*some, *buffers]
        if buffers:
            self._fill(buffers, begin)
        return True

    def _is_unable(self, error: OSError) -> bool:
        """Return True if the file system lacks reads that do not wait, False if this read would wait; raise any other error."""
        if error.errno in _UNKNOWN:
            self.nowait = 0
            return True
        if not isinstance(error, BlockingIOError):
            raise error
        return False

    def is_resident(self, begin: int) -> bool:
        """Return whether the byte at offset `begin` is in memory; without system support, True only on tmpfs and ramfs."""
        if self.nowait:
            try:
                return os.preadv(self.fd, [bytearray(1)], begin, self.nowait) == 1
            except OSError as exc:
                if not self._is_unable(exc):
                    return False
        if self._is_memory is None:
            self._is_memory = file_system(self.path)[0] in MEMORY
        return self._is_memory

    def will_need(self, begin: int, end: int) -> None:
        """Ask the system to read the bytes `[begin, end)` into memory in the background."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _fill(self, buffers: Sequence[Any], begin: int) -> None:
        if not _HAS_PREADV:
            for buffer in buffers:
                memoryview(buffer)[:] = self.read(begin, begin + len(buffer))
                begin += len(buffer)
            return
        # one call fills at most 1,024 buffers and reads at most 2 GiB
        while buffers:
            count = os.preadv(self.fd, buffers[:MAX_BUFFERS], begin)
            if not count and any(map(len, buffers[:MAX_BUFFERS])):
                raise self._cut_short()
            begin += count
            buffers = skip_bytes(buffers, count)

    def map(self) -> mmap.mmap:
        """Return a read-only memory map of the whole file, created on first use.

        Hazard: if the file is truncated in place, or the disk cannot read a page, reading the map kills the process
        (SIGBUS). `maps.Maps` copies from a map safely.
        """
        if self._map is None:
            with _lock():
                if self._map is None:
                    # by default, mmap duplicates the descriptor
                    untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
                    self.check_unchanged()
                    try:
                        self._map = mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_READ, **untracked)
                    except ValueError:  # truncated since it was opened
                        self.check_unchanged()
                        raise
        return self._map

    def array(self) -> np.ndarray[Any, Any]:
        """Return the map as a 1-D uint8 array, marked writable to avoid torch's warning. Memory: a view; never write to it."""
        if self._array is None:
            array = view_bytes(memoryview(self.map()))
            # first: another thread uses the address as soon as there is an array
            self._address = int(array.__array_interface__["data"][0])
            self._array = array
        return self._array

    def tensor(self) -> torch.Tensor:
        """Return the map as a 1-D uint8 tensor. Memory: a view; never write to it."""
        tensor = self._tensor
        if tensor is None:
            tensor = torch.from_numpy(self.array())
            if type(tensor) is torch.Tensor:  # a real tensor, even under torch's fake mode
                self._tensor = tensor
        return tensor

    def address(self) -> int:
        """Return the address at which the map starts."""
        self.array()
        return self._address


_seeking = threading.Lock()


def _seek_and_read(fd: int, nbytes: int, begin: int) -> bytes:
    """Replace `os.pread` on systems without it; the lock lets one thread at a time move a file position."""
    with _seeking:
        os.lseek(fd, begin, os.SEEK_SET)
        return os.read(fd, nbytes)


class _NodeCache(Protocol):
    """See `node_cache.cache.NodeCache`, which imports this module."""

    def file(self, url: str, nbytes: int | None, tag: str | None, manifest: str | None, /) -> RemoteFile: ...
    def close(self) -> None: ...


class Files:
    """A set of at most `max_open` open files, by path. To open one more, it drops the file that was opened longest ago.

    With `fixed`, a file must not change: if `get` opens it again, and it was replaced or changed, `get` raises FormatError.
    `manifests` contains the manifest that lists a file, by path, for messages about missing files.

    A url stands for a remote file. Remote files have no descriptors, so `max_open` does not count them, and they must never
    change. `remote` contains what is known about them, by url. `node_cache` is the cache through which they are read.

    Threads/fork/pickle: safe everywhere; a copy in another process opens the files again, and with `fixed` expects them
        unchanged.
    """

    def __init__(
        self,
        max_open: int | None = None,
        fixed: bool = True,
        identities: Mapping[str, Identity] | None = None,
        manifests: Mapping[str, str] | None = None,
        remote: Mapping[str, RemoteIdentity] | None = None,
        node_cache: _NodeCache | None = None,
    ) -> None:
        if max_open is not None and max_open < 1:
            raise ValueError(f"max_open_files={max_open}, expected at least 1")
        self.max_open = max_open or default_max_open()
        self._fixed = fixed
        self._open: dict[str, ShardFile] = {}
        self._identities = dict(identities or {})
        self._manifests = dict(manifests or {})
        self._expected: dict[str, RemoteIdentity] = dict(remote or {})  # of remote files that are not in `_remote` yet
        self._remote: dict[str, RemoteFile] = {}
        self._closed = False
        self._node_cache = node_cache

    def get(self, path: str) -> ShardFile:
        """Return the open file at a path or url; open it if needed.

        Raises:
            OSError: The file cannot be opened; MissingShardError if it does not exist.
            FormatError: The path is not an ordinary file or, with `fixed`, has changed since it was first opened.
            ValueError: `close` was called.
        """
        file = self._open.get(path)
        if file is not None:
            return file
        if is_url(path):
            # it has the part of a ShardFile's surface that readers use with the method "pread"
            return cast(ShardFile, self.remote(path))
        with _lock():
            if self._closed:
                raise self._is_closed(path)
            file = self._open.get(path)
            if file is None:
                while len(self._open) >= self.max_open:
                    del self._open[next(iter(self._open))]
                try:
                    file = ShardFile(path)
                except FileNotFoundError as exc:
                    raise self.missing(path) from exc
                if self._fixed and self._identities.setdefault(path, file.identity) != file.identity:
                    raise FormatError("the shard was changed since this cache was opened; open it again").at(path)
                self._open[path] = file
        return file

    def _is_closed(self, path: str) -> ValueError:
        return ValueError(f"{path}: the cache is closed; load all tensors before closing it, or keep it open")

    def remote(self, url: str) -> RemoteFile:
        """Return the remote file at `url`. Cost: one request if its length is unknown.

        Raises:
            MissingShardError: The request found no such object.
            RemoteError: The request failed.
            ValueError: `close` was called.
        """
        if self._closed:
            raise self._is_closed(url)
        file = self._remote.get(url)
        if file is None:
            try:
                make = RemoteFile if self._node_cache is None else self._node_cache.file
                nbytes, tag = self._expected.get(url, (None, None))
                file = make(url, nbytes, tag, self._manifests.get(url))
            except FileNotFoundError as exc:
                raise self.missing(url) from exc
            file = self._remote.setdefault(url, file)
        return file

    def expected_nbytes(self, url: str) -> int | None:
        """Return the length of a remote file; None if it is unknown."""
        file = self._remote.get(url)
        return file.nbytes if file is not None else self._expected.get(url, (None,))[0]

    def known_state(self, url: str) -> ObjectInfo | None:
        """Return the state of a remote file; None if its length or tag is unknown."""
        file = self._remote.get(url)
        nbytes, tag = file.identity if file is not None else self._expected.get(url, (0, None))
        return None if tag is None else ObjectInfo(nbytes, tag)

    def fix(self, url: str, found: ObjectInfo) -> RemoteFile:
        """Return the remote file at `url`, whose state was `found` by a request.

        Raises:
            FormatError: The file has another length than the manifest lists, or was changed since this cache was opened.
        """
        nbytes = self.expected_nbytes(url)
        if nbytes not in (None, found.nbytes) and url in self._manifests and self.known_state(url) is None:
            what = (
                f"the shard has {found.nbytes} bytes, but {self._manifests[url]} says {nbytes}: one of the two is stale"
            )
            raise FormatError(f"{what}; upload both again", kind="index").at(url)
        self._expected.setdefault(url, (found.nbytes, found.tag))
        file = self.remote(url)
        file.fix(found)
        return file

    def missing(self, path: str) -> MissingShardError:
        """Return the error for a shard that does not exist."""
        if is_url(path):
            return missing_shard(path, self._manifests.get(path))
        what, remedy = "the shard does not exist", "copy it again"
        if path in self._manifests:
            what += f", but {self._manifests[path]} lists it"
            remedy += ", or let `tensorcache repair` (tc.repair) write the remaining shards into another folder"
        return MissingShardError(f"{what}; {remedy}").at(path)

    def expect(self, path: str, manifest: str | None = None, status: os.stat_result | None = None) -> int:
        """Record the file now at `path`, so that `get` with `fixed` refuses any other; return its length.

        `manifest` is the manifest that lists the file; `status` is that of the file, if it is known.

        Raises:
            OSError: The file cannot be found; MissingShardError if it does not exist.
        """
        if manifest is not None:
            self._manifests[path] = manifest
        try:
            return self._identities.setdefault(path, _identity(status or os.stat(path)))[1]
        except FileNotFoundError as exc:
            raise self.missing(path) from exc

    def expect_remote(self, url: str, nbytes: int, manifest: str | None = None) -> None:
        """Record the length of the remote file at `url`, and the manifest that lists it. No request."""
        if manifest is not None:
            self._manifests[url] = manifest
        self._expected.setdefault(url, (nbytes, None))

    def reopen(self, path: str) -> ShardFile:
        """Open and return the file that is now at `path`, even if an earlier file is still open."""
        with _lock():
            self._open.pop(path, None)
        return self.get(path)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close each file as soon as no read uses it; `get` then raises ValueError. Views of maps stay valid."""
        with _lock():
            self._closed = True
            self._open.clear()
            self._remote.clear()
        if self._node_cache is not None:
            self._node_cache.close()

    def __reduce__(self) -> Any:
        remote = self._expected | {url: file.identity for url, file in list(self._remote.items())}
        return Files, (self.max_open, self._fixed, self._identities, self._manifests, remote, self._node_cache)


_lock = per_process(threading.Lock)  # held while a file is opened or mapped


def default_max_open() -> int:
    """Return a quarter of the process's descriptor limit, but 8 to 256. A mapped file may take two descriptors."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        return 256
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))
