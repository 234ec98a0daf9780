"""Files of shards: positioned reads, memory maps, and a limit on descriptors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from wds_tensorcache.codec.views import view_address
from wds_tensorcache.errors import FormatError, MissingShardError, TarFormatError
from wds_tensorcache.storage.system import MAX_BUFFERS, MEMORY, device_kind, memory_nbytes, skip_bytes
from wds_tensorcache.storage.threads import per_process
from wds_tensorcache.storage.urls import is_url

if TYPE_CHECKING:
    from wds_tensorcache.storage.remote.remote_file import RemoteFile, RemoteIdentity

Identity = tuple[int, int, int]  # inode, length in bytes, modification time in ns
_COPIED_NBYTES = 1 << 16  # from this size on, a copy out of a map takes as little as half the time of a read
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_NO_FILE = frozenset({errno.ENXIO, errno.ENODEV, errno.ELOOP})
# A FIFO may have a shard's name. Without O_NONBLOCK, opening it would wait for a process that writes to it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK
_CAN_MAP = sys.platform == "linux" and sys.maxsize > 1 << 32 and bool(_NOWAIT)
# Bounds on the maps of a process. A system allows 65,530 by default. The kernel keeps 8 bytes for each page of 4 KiB that was
# touched, so with the second bound at most a 128th of memory.
_MAX_MAPS = 1 << 14
_MAX_MAPPED_NBYTES = 4 * memory_nbytes()


if _CAN_MAP:
    _libc: Any = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_MAP_FAILED = (1 << 64) - 1


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


class Descriptor:
    """An open file descriptor, which is closed when this object is freed."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Any = os.close) -> None:
        close(self.fd)


class _Map:
    """A read-only memory map of a file, unmapped when it is freed."""

    count = total_nbytes = 0  # of all maps of the process

    def __init__(self, fd: int, nbytes: int) -> None:
        # SIGBUS: if the file is truncated in place, or the disk cannot read a page, reading the map kills the process.
        # Not `mmap.mmap`, which keeps a second descriptor before Python 3.13.
        self.address: int = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if self.address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        weakref.finalize(self, _unmap, self.address, nbytes).atexit = False
        _Map.count += 1
        _Map.total_nbytes += nbytes


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)
    _Map.count -= 1
    _Map.total_nbytes -= nbytes


def are_resident(addresses: np.ndarray[Any, Any], nbytes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return whether all pages of each range are in memory, bool `[n]`.

    `shows_pages` must be True for each file.
    """
    begins = addresses & -mmap.PAGESIZE
    sizes = addresses + nbytes - begins
    pages = np.zeros((len(begins), int(sizes.max(initial=0)) // mmap.PAGESIZE + 1), np.uint8)
    deque(map(_libc.mincore, begins.tolist(), sizes.tolist(), range(pages.ctypes.data, 1 << 63, pages.shape[1])), 0)
    is_resident: np.ndarray[Any, Any] = (pages & 1).sum(1) == -(-sizes // mmap.PAGESIZE)
    return is_resident


def announce(addresses: np.ndarray[Any, Any], nbytes: np.ndarray[Any, Any]) -> None:
    """Ask the system to read ranges of maps in the background."""
    begins = addresses & -mmap.PAGESIZE
    sizes = addresses + nbytes - begins
    deque(map(_libc.madvise, begins.tolist(), sizes.tolist(), repeat(mmap.MADV_WILLNEED)), 0)


class ShardFile:
    """A local file that threads and forked processes can read at once.

    All files of a process share one limit on descriptors. Beyond the limit, the oldest descriptor is closed, and a later read
    opens the file again. Maps need no descriptor.

    Args:
        may_map: Whether `address` may map the file.
        manifest: The manifest that lists the file, for messages.

    Raises:
        FormatError: `path` is not an ordinary file.
        OSError: The file cannot be opened, or does not exist.

    Threads/fork: any thread; a forked child shares descriptors and maps.
    """

    is_remote = False

    def __init__(self, path: str, may_map: bool = True, manifest: str | None = None) -> None:
        self.path = path
        self._manifest = manifest
        descriptor, status = self._open()
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("expected a file, found a folder, pipe or device", kind="unreadable").at(path)
        self._begin(path, status, may_map)
        self._keep(descriptor)

    def _begin(self, path: str, status: os.stat_result, may_map: bool) -> None:
        self.path = path
        self.nbytes = status.st_size
        self.identity = _identity(status)
        self._device = status.st_dev
        self._descriptor: Descriptor | None = None
        self._may_map = may_map and _CAN_MAP
        self._map: _Map | None = None
        # Hazard: for users who neither own a file nor may write to it, `mincore` reports every page as in memory.
        self.shows_pages = status.st_uid == os.geteuid() or os.access(path, os.W_OK)

    def _open(self) -> tuple[Descriptor, os.stat_result]:
        try:
            descriptor = Descriptor(os.open(self.path, _FLAGS))
        except OSError as exc:
            if exc.errno in _NO_FILE:
                problem = "expected a file, found a socket, device or circular link"
                raise FormatError(problem, kind="unreadable").at(self.path) from exc
            raise
        return descriptor, os.fstat(descriptor.fd)

    def _keep(self, descriptor: Descriptor) -> None:
        """Keep a descriptor for later reads; close the oldest beyond the limit."""
        with _lock():
            while len(_open_files) >= (_max_open or default_max_open()):
                # A file may be freed at any moment, and leaves the dict then.
                oldest = next(iter(_open_files), None)
                if oldest is None:
                    break
                oldest._descriptor = None
                _open_files.pop(oldest, None)
            self._descriptor = descriptor
            _open_files[self] = None

    def descriptor(self) -> Descriptor:
        """Return a descriptor. Raise FormatError if the file was replaced, changed or deleted."""
        descriptor = self._descriptor
        if descriptor is None:
            try:
                descriptor, status = self._open()
            except FileNotFoundError as exc:
                raise _missing_file(self.path, self._manifest) from exc
            if _identity(status) != self.identity:
                raise self._changed(status)
            self._keep(descriptor)
        return descriptor

    def check_unchanged(self) -> None:
        """Raise FormatError if the file was written to. Cost: one system call.

        The error is also raised if the file was replaced or deleted while its descriptor was closed.
        """
        descriptor = self._descriptor
        try:
            status = os.stat(self.path) if descriptor is None else os.fstat(descriptor.fd)
        except FileNotFoundError as exc:
            raise _missing_file(self.path, self._manifest) from exc
        if (status.st_ino, status.st_size, status.st_mtime_ns) != self.identity:
            raise self._changed(status)

    def _changed(self, status: os.stat_result) -> Exception:
        if status.st_ino == self.identity[0] and status.st_size < self.nbytes:
            return self._cut_short(status.st_size)
        return _changed_file(self.path)

    def _cut_short(self, nbytes: int) -> Exception:
        problem = f"the file was cut short and ends at byte {nbytes}; copy it again"
        return TarFormatError(problem, kind="truncated").at(self.path)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`. Raise FormatError as `descriptor` does, or if the file is too short."""
        descriptor = self.descriptor()
        try:
            content = os.pread(descriptor.fd, end - begin, begin)
            while len(content) < end - begin:  # one call reads at most 2 GiB
                more = os.pread(descriptor.fd, end - begin - len(content), begin + len(content))
                if not more:
                    raise self._cut_short(os.fstat(descriptor.fd).st_size)
                content += more
        except OSError as exc:  # as of a failing disk
            exc.filename = self.path
            raise
        return content

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Fill 1-D byte buffers in order, from offset `begin` on. Raise FormatError as `read` does."""
        left = sum(map(len, buffers))
        if left >= _COPIED_NBYTES and begin + left <= self.nbytes:
            view = self.view(begin, begin + left)
            if view is not None:
                at = 0
                for buffer in buffers:
                    np.asarray(buffer)[:] = view[at : at + len(buffer)]  # releases the GIL
                    at += len(buffer)
                return
        descriptor = self.descriptor()
        # one call fills at most 1,024 buffers and reads at most 2 GiB
        try:
            while left:
                count = os.preadv(descriptor.fd, buffers[:MAX_BUFFERS], begin)
                if not count and any(map(len, buffers[:MAX_BUFFERS])):
                    raise self._cut_short(os.fstat(descriptor.fd).st_size)
                left -= count
                if left:
                    begin, buffers = begin + count, skip_bytes(buffers, count)
        except OSError as exc:
            exc.filename = self.path
            raise

    def address(self) -> int:
        """Return the address of the file's map, or 0 without a map.

        No file is mapped on network file systems, outside Linux, or beyond the process's limits on maps.
        """
        if self._map is not None:
            return self._map.address
        if not self._may_map or not self.nbytes:
            return 0
        descriptor = self.descriptor()
        with _lock():
            if self._map is None:
                if _Map.count >= _MAX_MAPS or _Map.total_nbytes + self.nbytes > _MAX_MAPPED_NBYTES:
                    return 0
                # On a network file system, a page fault takes too long, and another machine may truncate the file (SIGBUS).
                _, is_network = device_kind(self._device, self.path)
                self._may_map = not is_network
                with suppress(OSError):  # a file system without maps, or no memory for a map
                    self._map = _Map(descriptor.fd, self.nbytes) if self._may_map else None
                self._may_map = self._map is not None
            return self._map.address if self._map is not None else 0

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any] | None:
        """Return the map's bytes `[begin, end)`, uint8 `[end - begin]`, or None without a map.

        Memory: aliases the map and keeps it alive. The array is marked writable to avoid torch's warning; never write to it.
        """
        self.check_unchanged()
        address = self.address()
        return view_address(address + begin, end - begin, self._map) if address else None

    def read_many(self, begins: Iterable[int], ends: Iterable[int]) -> Iterable[bytes]:
        """Return the bytes of small ranges. The caller must call `check_unchanged` afterwards."""
        view = self.view(0, self.nbytes)
        if view is None:
            return map(self.read, begins, ends)
        stored = view.data
        return [stored[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]

    def read_through(self) -> AbstractContextManager[Callable[[int, int], bytes]]:
        """Return a context manager that yields a `read` function for one pass."""
        return nullcontext(self.read)

    def is_resident(self, begin: int) -> bool:
        """Return whether the byte at `begin` is in memory. Without system support, True only on tmpfs and ramfs."""
        if _NOWAIT:
            descriptor = self.descriptor()
            with suppress(OSError):  # not in memory, or no support in the file system
                return os.preadv(descriptor.fd, [bytearray(1)], begin, _NOWAIT) == 1
        return device_kind(self._device, self.path)[0] in MEMORY

    def will_need(self, begin: int, end: int) -> None:
        """Ask the system to read `[begin, end)` into memory in the background."""
        if hasattr(os, "posix_fadvise"):
            descriptor = self.descriptor()
            os.posix_fadvise(descriptor.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)


def open_if_exists(path: str) -> ShardFile | None:
    try:
        return ShardFile(path)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise


File: TypeAlias = "ShardFile | RemoteFile"  # the reads of a `RemoteFile` are requests


class Files:
    """The files of an open cache, by path or url. `get` refuses a changed file.

    Args:
        may_map: Whether batches may be copied from memory maps.
        max_open: Maximum number of descriptors of local shards that the process keeps, for all caches; None leaves the limit
            unchanged.
        node_cache: The `NodeCache` through which remote files are read.
        identities: Identities of the expected files, by path or url.
        manifests: Path of the manifest that lists a file, by path or url of the file, for messages.

    Threads/fork/pickle: safe everywhere. A copy in another process opens the files again, and refuses changed files.
    """

    def __init__(
        self,
        may_map: bool = True,
        max_open: int | None = None,
        node_cache: Any = None,
        identities: Mapping[str, Identity | RemoteIdentity] | None = None,
        manifests: Mapping[str, str] | None = None,
    ) -> None:
        global _max_open
        if max_open is not None:
            _max_open = max_open
        self.may_map = may_map and _CAN_MAP
        self._max_open, self._node_cache = max_open, node_cache
        self._identities: dict[str, Any] = dict(identities or {})
        self._manifests = dict(manifests or {})
        self._files: dict[str, File] = {}
        self._closed = False

    def get(self, path: str) -> File:
        """Return the file at a path or url. This makes no request.

        Raises:
            OSError: The file cannot be opened; MissingShardError if it does not exist.
            FormatError: The path is not an ordinary file, or the file differs from the expected file.
            ValueError: `close` was called.
        """
        file = self._files.get(path)
        if file is not None:
            return file
        if self._closed:
            raise ValueError(f"{path}: the cache is closed; load all tensors before closing it, or keep it open")
        return self._files.setdefault(path, self._open(path, self._manifests.get(path)))

    def _open(self, path: str, manifest: str | None) -> File:
        if is_url(path):
            from wds_tensorcache.storage.remote.remote_file import RemoteFile

            nbytes, tag = self._identities.get(path, (None, None))
            return RemoteFile(path, nbytes, tag, manifest, self._node_cache)
        try:
            file = ShardFile(path, self.may_map, manifest)
        except FileNotFoundError as exc:
            raise _missing_file(path, manifest) from exc
        if self._identities.setdefault(path, file.identity) != file.identity:
            raise _changed_file(path)
        return file

    def expect(
        self, path: str, manifest: str | None = None, status: os.stat_result | None = None, nbytes: int | None = None
    ) -> None:
        """Record a local file's state, or a remote file's length.

        `get` then refuses a local file in another state. A recorded state never changes.

        Args:
            manifest: Path of the manifest that lists the file, for messages.
            status: Status of a local file, if it is known.
            nbytes: Length of a remote file, if it is known.

        Raises:
            OSError: The file cannot be examined; MissingShardError if it does not exist.
        """
        if manifest is not None:
            self._manifests[path] = manifest
        if is_url(path):
            self._identities.setdefault(path, (nbytes, None))
            return
        try:
            self._identities.setdefault(path, _identity(status or os.stat(path)))
        except FileNotFoundError as exc:
            raise _missing_file(path, manifest) from exc

    def manifest_of(self, path: str) -> str | None:
        return self._manifests.get(path)

    def close(self) -> None:
        """Close each file once no read uses it. Then `get` raises ValueError; views of maps stay valid."""
        self._closed = True
        self._files.clear()
        if self._node_cache is not None:
            self._node_cache.close()

    def __reduce__(self) -> Any:
        identities = self._identities | {path: file.identity for path, file in list(self._files.items())}
        return Files, (self.may_map, self._max_open, self._node_cache, identities, self._manifests)


def _changed_file(path: str) -> FormatError:
    return FormatError("the shard was changed since it was opened; open it again").at(path)


def _missing_file(path: str, manifest: str | None) -> MissingShardError:
    problem, remedy = "the shard does not exist", "copy it again"
    if manifest is not None:
        problem += f", but {manifest} lists it"
        remedy += ", or let `tensorcache repair` (tc.repair) write the remaining shards into another folder"
    return MissingShardError(f"{problem}; {remedy}").at(path)


# Files with a descriptor, in the order in which they were opened; of the whole process.
_open_files: weakref.WeakKeyDictionary[ShardFile, None] = weakref.WeakKeyDictionary()
_max_open: int | None = None  # chosen by a caller
_lock = per_process(threading.Lock)  # held while a file enters `_open_files`, or is mapped


def default_max_open() -> int:
    """Return a quarter of the process's descriptor limit, from 8 to 256."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))
