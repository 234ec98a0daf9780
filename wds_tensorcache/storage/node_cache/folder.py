"""The folder of a node's cache: its owner, its files, and the space that they take together."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from wds_tensorcache.storage.atomic import replace
from wds_tensorcache.storage.node_cache.block_file import (
    BLOCK,
    OTHERS_MAY_WRITE,
    SUFFIX,
    SYNC_BYTE,
    BlockFile,
    BlockRuns,
    is_own_file,
    open_block_file,
    write_layout,
)
from wds_tensorcache.storage.node_cache.unusable import Busy, NoRoom, Stopped
from wds_tensorcache.storage.range_locks import CAN_LOCK_RANGES, RangeLocks
from wds_tensorcache.storage.system import file_system
from wds_tensorcache.storage.urls import is_url

# file with the number of bytes in use; its first byte is the lock for adding and removing files and blocks
_SPACE = "space"
_FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}").fullmatch
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp").fullmatch
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_UNWRITABLE = _NO_SPACE | _FORBIDDEN
_WAIT_S = 60.0  # a process that holds the lock longer was probably stopped
_MAX_ATTEMPTS = 10
_KEPT_FREE = 50  # the cache leaves this part of the file system free
# ext4 lists so many runs of a file's blocks in one further block, which the file also takes on disk
_RUNS_PER_TABLE = 170
_SPARE = 64  # eviction frees this part of the limit at once, so that it does not run for every block


def lock_within(locks: RangeLocks, begin: int, length: int, timeout_s: float, *, shared: bool = False) -> bool:
    """Take a lock; return False if it was not free within the time. A process that was stopped may hold it forever."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.0002
    while not locks.lock(begin, length, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    return True


def open_folder(path: str | os.PathLike[str], max_nbytes: int | None) -> CacheFolder:
    """Create the folder of a cache if needed, and check it.

    Raises:
        NotImplementedError: The system is not Linux, whose locks on byte ranges belong to open files, not to processes.
        ValueError: The path is empty or a url, or on a network file system, which other nodes use, too.
        PermissionError: The folder belongs to another user, or other users may write into it.
        NotADirectoryError: The path is a file, or leads through one.
        OSError: The folder cannot be created for any other reason.

    A folder that cannot be created on a disk that is full or read-only has no effect but a warning, when it is needed.
    """
    if not CAN_LOCK_RANGES:
        raise NotImplementedError("cache_dir= needs Linux: other systems lack its locks on byte ranges of a file")
    if not os.fspath(path):
        raise ValueError("cache_dir= is empty, expected the path of a folder")
    if is_url(os.fspath(path)):
        raise ValueError("cache_dir= is a url, expected the path of a folder on a local disk")
    path = os.path.realpath(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.stat(path)
    except OSError as exc:
        if isinstance(exc, (FileExistsError, NotADirectoryError)):
            raise NotADirectoryError(errno.ENOTDIR, "cache_dir= leads through a file; pass another path", path) from exc
        if exc.errno not in _UNWRITABLE:
            raise type(exc)(
                exc.errno, f"cache_dir= cannot be created ({exc.strerror}); pass another path", path
            ) from exc
        return CacheFolder(path, max_nbytes)  # reads then warn, and do without it
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "cache_dir= is a file; pass the path of a folder", path)
    if status.st_uid != os.geteuid() or status.st_mode & OTHERS_MAY_WRITE:
        rights = f"owner {status.st_uid} and mode {stat.filemode(status.st_mode)}"
        raise PermissionError(
            f"cache_dir={path!r} has {rights}, expected a folder of user {os.geteuid()} into which no other user may write; "
            "pass another folder, or correct its owner and mode"
        )
    kind, is_network = file_system(path)
    if is_network:
        raise ValueError(
            f"cache_dir={path!r} is on {kind}, a network file system, whose locks and speed do not suit a cache; pass a "
            "folder on a local disk of this node"
        )
    return CacheFolder(path, max_nbytes)


class CacheFolder:
    """A checked folder. Files of other programs in it are ignored: never counted, changed or deleted.

    Threads/fork/pickle: safe everywhere; a copy in another process uses the same folder.

    Attributes:
        path: Absolute path.
        max_nbytes: The most bytes that the files of the folder may take on disk together; None for all but a fiftieth of the
            file system.
    """

    def __init__(self, path: str, max_nbytes: int | None) -> None:
        self.path, self.max_nbytes = path, max_nbytes
        self._is_counted = False

    def open_file(self, digest: bytes, nbytes: int) -> BlockFile:
        """Open the file of an object, or create it.

        Raises:
            NoRoom, Busy: There is no room for it.
            OSError: The folder or its disk cannot be written.
        """
        path = os.path.join(self.path, digest.hex() + SUFFIX)
        file = open_block_file(path, digest, nbytes)
        if file is not None and file.is_of_this_boot():
            return file
        with self._naming_folder(), self._lock_space() as space:
            file = open_block_file(path, digest, nbytes)  # another process may have been faster
            if file is None:
                return self._create(path, digest, nbytes, space)
            if not file.is_of_this_boot():
                file.forget_unsynced()
            return file

    def reserve(self, wanted: Sequence[tuple[BlockFile, BlockRuns]]) -> None:
        """Allocate disk space for absent blocks, which the caller has locked; evict other files if needed.

        Raises:
            NoRoom, Busy: There is no room for all of them.
            OSError: The folder or its disk cannot be written.
        """
        needed = BLOCK * sum(last - first for _, runs in wanted for first, last in runs)
        tables = BLOCK * sum(1 + len(runs) // _RUNS_PER_TABLE for _, runs in wanted)
        with self._naming_folder(), self._lock_space() as space:
            self._make_room(needed + tables, space)
            try:
                self._allocate(wanted, needed, space)
            except OSError as exc:
                if exc.errno not in _NO_SPACE:
                    raise
                # Less space is free than the file system reports, for example because of a quota.
                self._evict(needed, space, at_least=needed)
                self._allocate(wanted, needed, space)

    def sync_file(self, digest: bytes, nbytes: int) -> None:
        """Wait until the blocks of a file are on disk, unless it is evicted or the disk has errors."""
        path = os.path.join(self.path, digest.hex() + SUFFIX)
        with contextlib.suppress(OSError), closing(RangeLocks(path)) as locks:
            file = open_block_file(path, digest, nbytes)
            # the lock prevents eviction
            if file is not None and locks.lock(SYNC_BYTE, shared=True) and file.is_current():
                file.sync()

    def nbytes_in_use(self) -> int:
        """Return the number of bytes that the files of the folder take on disk. Cost: one system call for each file."""
        return sum(nbytes for _, nbytes, _ in self._files())

    def _allocate(self, wanted: Sequence[tuple[BlockFile, BlockRuns]], needed: int, space: _Space) -> None:
        used_nbytes, before = space.nbytes, sum(_disk_nbytes(file.fd) for file, _ in wanted)
        space.set(used_nbytes + needed)  # first: this process may be killed after any line
        try:
            for file, runs in wanted:
                for run in runs:
                    begin, end = file.extent(run)
                    os.posix_fallocate(file.fd, begin, end - begin)
        finally:
            space.set(used_nbytes + sum(_disk_nbytes(file.fd) for file, _ in wanted) - before)

    def _create(self, path: str, digest: bytes, nbytes: int, space: _Space) -> BlockFile:
        """Create the file of an object under a temporary name, then rename it."""
        needed = 2 * BLOCK + nbytes // BLOCK
        self._make_room(needed, space)
        making = os.path.join(self.path, f".{digest.hex()}.{secrets.token_hex(8)}.tmp")
        used_nbytes = space.nbytes
        space.set(used_nbytes + needed)  # first: this process may be killed after any line
        try:
            fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(fd, 0o600)  # a umask may have removed permissions
                write_layout(fd, digest, nbytes)
                used_nbytes += _disk_nbytes(fd)
            finally:
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                replaced = os.lstat(path)  # a damaged file
                used_nbytes -= 512 * replaced.st_blocks if stat.S_ISREG(replaced.st_mode) else 0
            replace(making, path)
            space.set(max(0, used_nbytes))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(making)
            raise
        file = open_block_file(path, digest, nbytes)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "another program has removed or changed a file of the cache", path)
        return file

    def _make_room(self, needed: int, space: _Space) -> None:
        """Evict files until `needed` more bytes fit.

        Raises:
            NoRoom, Busy: They cannot fit.
        """
        if self.max_nbytes is not None and needed + BLOCK > self.max_nbytes:
            raise NoRoom(f"one read needs {needed + BLOCK:,} bytes, but cache_nbytes is {self.max_nbytes:,}")
        if not space.is_known or not self._is_counted:
            # Other programs may have added or deleted files since the folder was last used.
            space.set(self.nbytes_in_use())
            self._is_counted = True
        if self._room(needed, space) < 0:
            self._evict(needed, space)

    def _room(self, needed: int, space: _Space) -> int:
        """Return the number of bytes left after adding `needed` bytes; negative if they do not fit."""
        disk = os.statvfs(self.path)
        room = disk.f_frsize * (disk.f_bavail - disk.f_blocks // _KEPT_FREE)
        if self.max_nbytes is not None:
            room = min(room, self.max_nbytes - BLOCK - space.nbytes)  # `space` itself takes a block
        return room - needed

    def _evict(self, needed: int, space: _Space, *, at_least: int = 0) -> None:
        """Remove the least recently used files that no process is filling, until `needed` more bytes fit, and some spare.

        Args:
            at_least: Remove at least this many bytes.

        Raises:
            NoRoom, Busy: They cannot fit.
        """
        self._remove_unfinished()
        files = sorted(self._files())
        total = sum(nbytes for _, nbytes, _ in files)
        space.set(total)
        excess = max(at_least, -self._room(needed, space))
        if excess <= 0:
            return
        if excess > total:
            raise NoRoom(f"{self.path}: the disk is full, even without the {total:,} bytes of the cache")
        spare = 0 if self.max_nbytes is None else self.max_nbytes // _SPARE
        freed = 0
        for _, nbytes, path in files:
            if freed >= excess + spare:
                break
            if _remove(path):
                freed += nbytes
                space.set(max(0, space.nbytes - nbytes))
        if freed < excess:
            raise Busy

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield time of the last use, bytes on disk, and path of each file of the cache."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _FILE(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, 512 * status.st_blocks, entry.path

    def _remove_unfinished(self) -> None:
        """Delete files that processes were making when they were killed. The lock is held, so no process is making any."""
        for name in os.listdir(self.path):
            if _UNFINISHED(name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, name))

    @contextlib.contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Say of an error that forbids writing that it is about the folder, not about a file that the user does not know."""
        try:
            yield
        except OSError as exc:
            if exc.errno not in _FORBIDDEN:
                raise
            remedy = "correct its permissions, or pass another folder as cache_dir="
            raise OSError(exc.errno, f"the folder cannot be written ({exc.strerror}); {remedy}") from exc

    @contextlib.contextmanager
    def _lock_space(self) -> Iterator[_Space]:
        """Hold the lock for adding and removing files and blocks.

        Raises:
            OSError: The folder cannot be written.
            Stopped: Another process held the lock for too long.
        """
        path = os.path.join(self.path, _SPACE)
        for _ in range(_MAX_ATTEMPTS):
            with closing(self._open_space(path)) as locks:
                if not lock_within(locks, 0, 1, _WAIT_S):
                    raise Stopped(f"{path} was locked for {_WAIT_S:.0f} s; a process that uses the cache was stopped")
                if os.fstat(locks.fd).st_nlink:  # else the folder was deleted while this process waited
                    yield _Space(locks.fd)
                    return
        raise FileNotFoundError(errno.ENOENT, "the folder of the cache is deleted again and again", path)

    def _open_space(self, path: str) -> RangeLocks:
        try:
            locks = RangeLocks(path)
        except FileNotFoundError:
            os.makedirs(self.path, 0o700, exist_ok=True)  # the folder may have been deleted
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            locks = RangeLocks(path)
        if not is_own_file(os.fstat(locks.fd)):
            locks.close()
            raise PermissionError(f"{path} is not a regular file of user {os.geteuid()}; delete it")
        return locks


class _Space:
    """The number of bytes in use, in the file `space`, while its lock is held.

    A process that is killed may leave a number that is too large, never one that is too small. The next eviction corrects it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        content = os.pread(fd, 9, 0)
        self.is_known = len(content) == 8
        self.nbytes = int.from_bytes(content, "little") if self.is_known else 0

    def set(self, nbytes: int) -> None:
        self.nbytes, self.is_known = nbytes, True
        os.pwrite(self._fd, nbytes.to_bytes(8, "little"), 0)


def _disk_nbytes(fd: int) -> int:
    return 512 * os.fstat(fd).st_blocks


def _remove(path: str) -> bool:
    """Remove a file of the cache and free its space, unless a process is filling it; return whether it was removed."""
    try:
        locks = RangeLocks(path)
    except OSError:
        return False
    with closing(locks):
        # A process that fills or syncs the file, this one included, has locked bytes through another open file.
        if not is_own_file(os.fstat(locks.fd)) or not locks.lock(0, 0):
            return False
        try:
            os.unlink(path)
            # A process that keeps the file open, perhaps without using it, would keep its space, too.
            os.ftruncate(locks.fd, 0)
        except OSError:
            return False
    return True
