"""The folder of a node's cache: its owner, files and space."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import inf

from wds_tensorcache.storage.locks import CAN_LOCK_RANGES, RangeLocks, wait_for
from wds_tensorcache.storage.node_cache.block_file import (
    BLOCK,
    MAPPED,
    SUFFIX,
    BlockFile,
    BlockRuns,
    open_block_file,
    write_layout,
)
from wds_tensorcache.storage.owned import OTHERS_MAY_WRITE, check_owner, is_owned, write_file
from wds_tensorcache.storage.system import boot_id, file_system
from wds_tensorcache.storage.urls import is_url, shown

# file with the number of bytes in use; its first byte is the lock for adding and removing files and blocks
_SPACE = "space"
_FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}").fullmatch
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
_WAIT_S = 60.0  # a process that holds a lock longer was probably stopped
_KEPT_FREE = 50  # the cache leaves a 50th of the file system free
# ext4 lists up to this many runs of a file's blocks in one further block, which the file also takes on disk
_RUNS_PER_TABLE = 170
_SPARE = 64  # eviction frees a 64th of the limit at once, so that it does not run for every block


class Bypass(Exception):
    """A signal to read bytes without the cache. Its message is the reason; it is empty if the next read may find room.

    Attributes:
        rest_s: Time in seconds before the next attempt.
    """

    def __init__(self, reason: str = "", rest_s: float = 1.0) -> None:
        super().__init__(reason)
        self.rest_s = rest_s


def lock_within(locks: RangeLocks, begin: int, length: int, *, shared: bool = False) -> None:
    """Take a lock, or raise Bypass after 60 s."""
    if not wait_for(lambda: locks.lock(begin, length, shared=shared), _WAIT_S):
        raise Bypass(f"{locks.path} was locked for {_WAIT_S:.0f} s; a process was stopped", rest_s=60.0)


def open_folder(path: str | os.PathLike[str], max_nbytes: int | None) -> CacheFolder:
    """Create the folder of a cache if needed, and check it.

    Raises:
        NotImplementedError: The system is not Linux, whose locks on byte ranges belong to open files, not to processes.
        ValueError: `max_nbytes` is not positive, or the path is empty, a url, or on a network file system, which is shared by
            several nodes.
        PermissionError: The folder belongs to another user, or other users may write into it.
        NotADirectoryError: The path, or a parent folder in it, is a file.
        OSError: The folder cannot be created for any other reason.

    No error is raised if the disk is full or read-only, or if permissions are missing. Reads then warn once and bypass the
    cache.
    """
    if max_nbytes is not None and max_nbytes < 1:
        raise ValueError(f"cache_nbytes={max_nbytes}, expected at least 1, or None")
    if not (CAN_LOCK_RANGES and boot_id()):
        raise NotImplementedError("cache_dir= needs Linux and its /proc")
    path = os.fspath(path)
    if not path or is_url(path):
        raise ValueError(f"cache_dir={shown(path)!r}, expected the path of a folder on a local disk")
    path = os.path.realpath(path)
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(path, 0o700)
        status = os.stat(path)
    except OSError as exc:
        if exc.errno not in _UNWRITABLE:
            raise
        return CacheFolder(path, max_nbytes)  # reads then warn, and bypass the cache
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "cache_dir= is a file; pass the path of a folder", path)
    check_owner(path, status, stat.S_ISDIR, OTHERS_MAY_WRITE)
    kind, is_network = file_system(path)
    if is_network:
        raise ValueError(f"cache_dir={path!r} is on {kind}, a network file system; pass a folder on a local disk")
    return CacheFolder(path, max_nbytes)


class CacheFolder:
    """The checked folder of a cache. Files of other programs in it are never counted, changed or deleted.

    Threads/fork/pickle: safe everywhere; a copy in another process uses the same folder.

    Attributes:
        path: Absolute path.
        max_nbytes: Maximum number of bytes that the cache's files may take on disk together; None for no limit. A fiftieth
            of the file system stays free in any case.
    """

    def __init__(self, path: str, max_nbytes: int | None) -> None:
        self.path, self.max_nbytes = path, max_nbytes
        self._is_counted = False

    def open_file(self, digest: bytes, nbytes: int) -> BlockFile:
        """Open or create the file of an object. Raise Bypass if there is no room, OSError if the disk cannot be written."""
        path = os.path.join(self.path, digest.hex() + SUFFIX)
        file = open_block_file(path, digest, nbytes)
        if file is not None:
            return file
        with self._lock_space() as space:
            file = open_block_file(path, digest, nbytes)  # another process may have been faster
            if file is None:
                self._make_room(2 * BLOCK + nbytes // BLOCK, space)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # the file is damaged, or of an earlier boot
                write_file(path)
                write_layout(path, digest, nbytes)
                file = open_block_file(path, digest, nbytes)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "another program has removed or changed a file of the cache", path)
        return file

    def reserve(self, wanted: Sequence[tuple[BlockFile, BlockRuns]]) -> None:
        """Allocate disk space for blocks that the caller has locked. Evict files if needed.

        Raises errors as `open_file` does.
        """
        needed = BLOCK * sum(last - first for _, runs in wanted for first, last in runs)
        tables = BLOCK * sum(1 + len(runs) // _RUNS_PER_TABLE for _, runs in wanted)
        with self._lock_space() as space:
            self._make_room(needed + tables, space)
            for file, runs in wanted:
                for run in runs:
                    begin, end = file.extent(run)
                    os.posix_fallocate(file.fd, begin, end - begin)

    def _make_room(self, needed: int, space: int) -> None:
        """Count `needed` more bytes as in use; evict files if needed."""
        limit = inf if self.max_nbytes is None else self.max_nbytes - BLOCK  # `space` itself takes a block
        if needed > limit:
            raise Bypass(f"one read needs {needed + BLOCK:,} bytes, but cache_nbytes is {self.max_nbytes:,}")
        content, disk = os.pread(space, 9, 0), os.statvfs(self.path)
        free = disk.f_frsize * (disk.f_bavail - disk.f_blocks // _KEPT_FREE)
        nbytes = int.from_bytes(content, "little")
        # A process killed after it has increased the number leaves it too large, never too small. So files are counted again
        # before any is evicted. Other programs may have added or deleted files since the folder was last used.
        is_known = self._is_counted and len(content) == 8
        if not is_known or nbytes + needed > limit or needed > free:
            nbytes = self._evict(needed, limit, free)
            self._is_counted = True
        os.pwrite(space, (nbytes + needed).to_bytes(8, "little"), 0)

    def _evict(self, needed: int, limit: float, free: int) -> int:
        """Evict files until `needed` bytes fit; return the remaining files' bytes."""
        files = sorted(self._files())  # the least recently used first
        nbytes = sum(file_nbytes for _, file_nbytes, _ in files)
        excess = max(nbytes + needed - limit, needed - free)
        if excess > nbytes:
            raise Bypass(f"{self.path}: the disk is full, even without the {nbytes:,} bytes of the cache")
        wanted = excess + (self.max_nbytes or 0) // _SPARE if excess > 0 else 0
        freed = 0
        for _, file_nbytes, path in files:
            if freed >= wanted:
                break
            if _remove(path):
                freed += file_nbytes
        if freed < excess:
            raise Bypass(rest_s=0.0)  # all files that could be evicted are being filled
        return nbytes - freed

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield last use, bytes on disk and path of each file."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _FILE(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, 512 * status.st_blocks, entry.path

    @contextlib.contextmanager
    def _lock_space(self) -> Iterator[int]:
        """Lock all additions and removals; yield a descriptor of the file `space`."""
        path = os.path.join(self.path, _SPACE)
        if not os.path.lexists(path):
            os.makedirs(self.path, 0o700, exist_ok=True)  # the folder may have been deleted
            with contextlib.suppress(FileExistsError):
                write_file(path)
        with closing(RangeLocks(path)) as locks:
            check_owner(path, os.fstat(locks.fd), stat.S_ISREG, OTHERS_MAY_WRITE)
            lock_within(locks, 0, 1)
            yield locks.fd


def _remove(path: str) -> bool:
    """Try to remove a file that no process is filling."""
    try:
        with closing(RangeLocks(path)) as locks:
            # A process that fills the file, this one included, has locked bytes through another open file.
            if not is_owned(os.fstat(locks.fd), stat.S_ISREG, OTHERS_MAY_WRITE) or not locks.lock(0, MAPPED):
                return False
            os.unlink(path)
            # Processes that keep the file open, perhaps without using it, would keep its space, too. SIGBUS: a process that
            # has mapped the file would be killed by a read.
            if locks.lock(MAPPED):
                os.ftruncate(locks.fd, 0)
    except OSError:
        return False
    return True
