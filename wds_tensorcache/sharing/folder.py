"""The folders in shared memory: their names, owners, holders and removal."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from wds_tensorcache.errors import FormatError, InvalidKeyError, StaleCacheError
from wds_tensorcache.sharing import reaper
from wds_tensorcache.sharing.reaper import HEAD, HOLDERS, IS_PERSISTENT, NUM_HOLDER_BYTES, REAPER_BYTE, remove_folder
from wds_tensorcache.storage.atomic import replace
from wds_tensorcache.storage.range_locks import CAN_LOCK_RANGES, RangeLocks

__all__ = [
    "SharedFolder",
    "base_folder",
    "check_owner",
    "explained_no_space",
    "find_folders",
    "folder_holders",
    "named_folder",
    "open_folder",
    "read_head",
    "remove_if_left",
    "write_file",
]

_SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[\w-][\w .=+@-]*").fullmatch
_MAX_NAME_NBYTES = 128  # in UTF-8
_ROUNDS = 100
_MAKING_S = 60  # making a folder takes less
_NOT_THE_OWNER = 0o077  # permissions of all other users


def base_folder(directory: str | os.PathLike[str] | None) -> str:
    """Return the folder of all shared folders of this user in `directory`, by default in shared memory.

    Raises:
        NotImplementedError: The system has no locks on byte ranges that survive threads and forks; only Linux has them.
        FileNotFoundError: The directory does not exist.
        PermissionError: The folder belongs to another user, or other users may use it.
    """
    if not CAN_LOCK_RANGES:
        raise NotImplementedError("SharedDataset needs Linux: other systems lack its locks on byte ranges of a file")
    parent = os.path.abspath(_SHARED_MEMORY if directory is None else os.fspath(directory))
    base = os.path.join(parent, f"wds_tensorcache-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
        os.chmod(base, 0o700)  # whatever the umask is
    check_owner(base, os.lstat(base), stat.S_ISDIR)
    return base


def check_owner(path: str, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise PermissionError unless a file or folder has the right kind, and this user alone owns and may use it."""
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _NOT_THE_OWNER:
        what = f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}"
        raise PermissionError(
            f"{path} has {what}; expected one of user {os.geteuid()}, with permissions for this user alone: remove it, or "
            "choose another directory="
        )


def named_folder(base: str, name: str) -> str:
    """Return the path of the folder with a name; raise InvalidKeyError if the name is not a plain one."""
    if not isinstance(name, str) or not _NAME(name) or ".." in name or len(name.encode()) > _MAX_NAME_NBYTES:
        raise InvalidKeyError(
            f"name {name!r:.200}: expected 1 to 128 bytes of letters, digits, or any of ' .=+@_-', without '..' and not "
            "beginning with a dot or space"
        )
    return os.path.join(base, name)


class SharedFolder:
    """A folder that this process holds: it is not removed while this object exists.

    Attributes:
        path: Path of the folder.
        head: Content of its file `head.json`.
        is_doubtful: True if the machine was started again since the folder was made: it may have crashed, and lost bytes.
    """

    def __init__(self, path: str, holders: RangeLocks, head: dict[str, Any]) -> None:
        self.path, self.head = path, head
        self.is_doubtful = head.get("boot") != _boot()
        self._holders: RangeLocks | None = holders

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def hold_again(self) -> None:
        """Hold the folder for this process, too, after a fork; until then it is held together with the parent."""
        if self._holders is None:
            return
        mine = RangeLocks(self.file(HOLDERS), in_children=True)
        if not os.path.sameopenfile(mine.fd, self._holders.fd):
            raise ValueError(f"{self.path} was removed, and made again by another process")
        mine.lock(os.getpid(), shared=True, wait=True)
        self._holders = mine

    def holders(self) -> list[int]:
        """Return the process ids of the holders."""
        return folder_holders(self.path)

    def leave(self) -> None:
        """Stop holding the folder; remove it if no process holds it and it is not persistent."""
        holders, self._holders = self._holders, None
        if holders is not None:
            holders.close()
            remove_if_left(self.path)


def folder_holders(path: str) -> list[int]:
    """Return the process ids of the processes that hold a folder."""
    return RangeLocks(os.path.join(path, HOLDERS)).locked_by_others(0, NUM_HOLDER_BYTES)


def _boot() -> str:
    """Return a text that differs after each start of the machine."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return boot.read().strip()
    return ""


def read_head(path: str) -> dict[str, Any]:
    """Return the content of a folder's file `head.json`; raise FormatError if it is damaged."""
    where = os.path.join(path, HEAD)
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        check_owner(where, os.fstat(fd), stat.S_ISREG)
        try:
            head = json.loads(file.read())
            if isinstance(head, dict) and isinstance(head["fingerprint"]["length"], int):
                return head
        except (ValueError, KeyError, TypeError):
            pass
    raise FormatError("the description of the samples is damaged; call tc.shared_clear", kind="damaged").at(where)


def open_folder(
    base: str,
    name: str,
    fingerprint: dict[str, Any],
    persistent: bool,
    create: Callable[[str], None],
) -> SharedFolder:
    """Open the folder `name`, or create it; `create` fills a new folder with files.

    Raises:
        InvalidKeyError: The name is not one that a file may have everywhere.
        StaleCacheError: The folder was made for a dataset with another fingerprint.
        PermissionError: Another user made the folder or a file in it.
    """
    path = named_folder(base, name)
    for left in find_folders(base):
        with contextlib.suppress(OSError):  # such as foreign files
            remove_if_left(left)
    folder = None
    for _ in range(_ROUNDS):
        folder = _open(path) or _create(path, {"name": name, "fingerprint": fingerprint, "boot": _boot()}, create)
        if folder is not None:
            break
    if folder is None:
        raise FileExistsError(f"{path} can be neither opened nor replaced; remove it")
    found = folder.head.get("fingerprint")
    if found != fingerprint:
        folder.leave()
        raise StaleCacheError(
            f"{path} holds samples of another dataset, {found!r}, but this one is {fingerprint!r}; use another name, or call "
            f"tc.shared_clear({name!r})"
        )
    if persistent:
        os.close(os.open(folder.file(IS_PERSISTENT), os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    elif not os.path.exists(folder.file(IS_PERSISTENT)):
        _start_reaper("wait", path, path).close()
    return folder


def _open(path: str) -> SharedFolder | None:
    """Open an existing folder and hold it; return None if there is none."""
    try:
        check_owner(path, os.lstat(path), stat.S_ISDIR)
        holders = RangeLocks(os.path.join(path, HOLDERS), in_children=True)
        check_owner(holders.path, os.fstat(holders.fd), stat.S_ISREG)
        # the process that removes the folder holds all bytes: after waiting for it, the folder is another one, or gone
        holders.lock(os.getpid(), shared=True, wait=True)
        if os.stat(holders.path).st_ino != os.fstat(holders.fd).st_ino:
            return None
    except FileNotFoundError:
        return None
    try:
        return SharedFolder(path, holders, read_head(path))
    except FileNotFoundError:  # a process was killed while it removed the folder
        holders.close()
        remove_if_left(path)
        return None


def _create(path: str, head: dict[str, Any], create: Callable[[str], None]) -> SharedFolder | None:
    """Create a folder with all its files, and hold it; return None if another process was faster."""
    base, name = os.path.split(path)
    making = os.path.join(base, f".{name}.{secrets.token_hex(4)}.new")
    try:
        # The reaper makes the folder, and waits for this process to hold it. So it removes it whenever this process is killed.
        with _start_reaper("make", making, path):
            if not os.path.exists(making):  # there is no reaper
                os.mkdir(making, 0o700)
                os.chmod(making, 0o700)
                write_file(os.path.join(making, HOLDERS))
            holders = RangeLocks(os.path.join(making, HOLDERS), in_children=True)
            holders.lock(os.getpid(), shared=True, wait=True)
        create(making)
        write_file(os.path.join(making, HEAD), json.dumps(head).encode())
        replace(making, path)
    except OSError as exc:
        with contextlib.suppress(FileNotFoundError):
            remove_folder(making)
        if isinstance(exc, (FileExistsError, FileNotFoundError)):
            return None  # not found: another process has removed the unfinished folder as abandoned
        raise
    return SharedFolder(path, holders, head)


def write_file(path: str, content: bytes = b"", nbytes: int = 0, dir_fd: int | None = None) -> None:
    """Create a file that only this user may use, with `content`, and with memory for `nbytes` bytes if that is more."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask is
        if nbytes:
            with explained_no_space(path, f"a file of {nbytes:,} bytes"):
                os.posix_fallocate(fd, 0, nbytes)
        os.write(fd, content)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained_no_space(path: str, what: str) -> Iterator[None]:
    """Give the error of a full file system, raised inside the `with` block, a message with sizes and the remedy."""
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        status = os.statvfs(os.path.dirname(path))
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        raise OSError(
            errno.ENOSPC,
            f"no memory for {what}: the file system has {free:,} of {total:,} bytes left; pass max_nbytes= or directory=, or "
            "enlarge /dev/shm (docker run --shm-size)",
            path,
        ) from exc


def find_folders(base: str) -> Iterator[str]:
    """Yield the paths of all folders in `base`, including unfinished ones and ones that are being removed."""
    with os.scandir(base) as entries:
        yield from [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def remove_if_left(path: str, *, even_persistent: bool = False) -> bool:
    """Remove a folder if no process holds it and, unless `even_persistent`, it is not persistent.

    Returns:
        True if the folder is gone.
    """
    try:
        is_young = time.time() - os.stat(path).st_mtime < _MAKING_S
    except FileNotFoundError:
        return True
    if is_young and os.path.basename(path).startswith("."):
        return False  # it may be in the making; if not, a reaper removes it
    try:
        holders = RangeLocks(os.path.join(path, HOLDERS))
    except FileNotFoundError:
        if is_young:
            return False  # perhaps it is removed just now
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            write_file(os.path.join(path, HOLDERS))  # another program has deleted it
        try:
            holders = RangeLocks(os.path.join(path, HOLDERS))
        except FileNotFoundError:
            return False
    if not holders.lock(0, NUM_HOLDER_BYTES):
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.stat(holders.path).st_ino != os.fstat(holders.fd).st_ino:
            return True
        is_kept = os.path.exists(os.path.join(path, IS_PERSISTENT)) and os.path.exists(os.path.join(path, HEAD))
        if is_kept and not even_persistent:
            return False
        remove_folder(path)
    return True


def _start_reaper(action: str, folder: str, renamed: str) -> contextlib.ExitStack:
    """Start the process that removes a folder, or what it is renamed to, after its last holder, unless one waits already.

    With the action "make", the process makes the folder first. It begins to wait when the result is closed.
    """
    stack = contextlib.ExitStack()
    is_python = os.path.basename(sys.executable or "").startswith(("python", "pypy"))
    if not is_python:  # embedded: without a reaper, the next process that opens a folder removes abandoned ones
        return stack
    if action == "wait" and RangeLocks(os.path.join(folder, HOLDERS)).locked_by_others(REAPER_BYTE, 1):
        return stack
    gate, opened = os.pipe()
    stack.callback(os.close, opened)
    try:
        with contextlib.suppress(OSError):  # no such executable, no more processes
            subprocess.run(
                [sys.executable, "-I", "-S", reaper.__file__, action, folder, renamed],
                stdin=gate,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=False,
            )
    finally:
        os.close(gate)
    return stack
