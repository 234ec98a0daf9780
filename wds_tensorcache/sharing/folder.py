"""The folders in shared memory: their names, owners, holders and removal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from wds_tensorcache.errors import InvalidKeyError, StaleCacheError
from wds_tensorcache.sharing import reaper
from wds_tensorcache.sharing.reaper import HEAD, HOLDERS, IS_PERSISTENT, NUM_HOLDER_BYTES, REAPER_BYTE, remove_folder
from wds_tensorcache.storage.atomic import replace
from wds_tensorcache.storage.range_locks import CAN_LOCK_RANGES, RangeLocks

__all__ = [
    "HEAD",
    "SharedFolder",
    "base_folder",
    "check_owner",
    "find_folders",
    "folder_holders",
    "named_folder",
    "open_folder",
    "remove_if_left",
    "write_file",
]

_SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[\w-][\w .=+@-]{0,127}").fullmatch
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
    if not isinstance(name, str) or not _NAME(name) or ".." in name:
        raise InvalidKeyError(
            f"name {name!r:.200}: expected 1 to 128 letters, digits, or any of ' .=+@_-', without '..' and not beginning with "
            "a dot or space"
        )
    return os.path.join(base, name)


class SharedFolder:
    """A folder that this process holds: it is not removed while this object exists.

    Attributes:
        path: Path of the folder.
        head: Content of its file `head.json`.
        was_left: True if no other process held the folder when it was opened: the machine may have crashed since it was
            written.
    """

    def __init__(self, path: str, holders: RangeLocks, head: dict[str, Any], was_left: bool) -> None:
        self.path, self.head, self.was_left = path, head, was_left
        self._holders: RangeLocks | None = holders

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def hold_again(self) -> None:
        """Hold the folder for this process, too, after a fork; until then it is held together with the parent."""
        mine = RangeLocks(self.file(HOLDERS))
        mine.lock(_byte(), shared=True, wait=True)
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


def _byte() -> int:
    return os.getpid()


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
        remove_if_left(left)
    while True:
        folder = _open(path)
        if folder is None:
            folder = _create(path, {"name": name, "fingerprint": fingerprint}, create)
        if folder is not None:
            break
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
        _start_reaper(folder)
    return folder


def _open(path: str) -> SharedFolder | None:
    """Open an existing folder and hold it; return None if there is none."""
    try:
        check_owner(path, os.lstat(path), stat.S_ISDIR)
        holders = RangeLocks(os.path.join(path, HOLDERS))
        check_owner(holders.path, os.fstat(holders.fd), stat.S_ISREG)
        was_left = holders.lock(0, NUM_HOLDER_BYTES)
        if was_left:
            holders.unlock(0, NUM_HOLDER_BYTES)
        # the process that removes the folder holds all bytes: after waiting for it, the folder is another one, or gone
        holders.lock(_byte(), shared=True, wait=True)
        if os.stat(holders.path).st_ino != os.fstat(holders.fd).st_ino:
            return None
    except FileNotFoundError:
        return None
    try:
        with open(os.path.join(path, HEAD), encoding="utf-8") as head:
            check_owner(head.name, os.fstat(head.fileno()), stat.S_ISREG)
            return SharedFolder(path, holders, json.load(head), was_left)
    except FileNotFoundError:  # a process was killed while it removed the folder
        holders.close()
        remove_if_left(path)
        return None


def _create(path: str, head: dict[str, Any], create: Callable[[str], None]) -> SharedFolder | None:
    """Create a folder with all its files, and hold it; return None if another process was faster."""
    base, name = os.path.split(path)
    making = os.path.join(base, f".{name}.{secrets.token_hex(4)}.new")
    os.mkdir(making, 0o700)
    os.chmod(making, 0o700)
    try:
        write_file(os.path.join(making, HOLDERS))
        holders = RangeLocks(os.path.join(making, HOLDERS))
        holders.lock(_byte(), shared=True, wait=True)
        create(making)
        write_file(os.path.join(making, HEAD), json.dumps(head).encode())
        replace(making, path)
    except OSError as exc:
        with contextlib.suppress(FileNotFoundError):
            remove_folder(making)
        if isinstance(exc, (FileExistsError, FileNotFoundError)):
            return (
                None  # not found: another process has taken the unfinished folder for an abandoned one, and removed it
            )
        raise
    return SharedFolder(path, holders, head, False)


def write_file(path: str, content: bytes = b"", nbytes: int = 0) -> None:
    """Create a file that only this user may use, with `content`, and with memory for `nbytes` bytes if that is more."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask is
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
        os.write(fd, content)
    finally:
        os.close(fd)


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
        holders = RangeLocks(os.path.join(path, HOLDERS))
    except FileNotFoundError:
        with contextlib.suppress(OSError):  # a folder that is made or removed just now
            os.rmdir(path)
        return not os.path.exists(path)
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


def _start_reaper(folder: SharedFolder) -> None:
    """Start the process that removes the folder after its last holder is gone, unless one waits already."""
    is_python = os.path.basename(sys.executable or "").startswith(("python", "pypy"))
    if RangeLocks(folder.file(HOLDERS)).locked_by_others(REAPER_BYTE, 1) or not is_python:
        return  # an embedded interpreter has no executable: the next process that opens a folder removes abandoned ones
    script = reaper.__file__
    subprocess.run(
        [sys.executable, "-I", "-S", script, folder.path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
