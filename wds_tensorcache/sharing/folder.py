"""Folders in shared memory, one for each name: their paths, permissions, holders and removal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from wds_tensorcache.errors import FormatError, InvalidKeyError, StaleCacheError
from wds_tensorcache.sharing.owned_files import check_owner, write_file
from wds_tensorcache.sharing.reaper import HEAD, HOLDERS, IS_PERSISTENT, NUM_HOLDER_BYTES, remove_folder
from wds_tensorcache.sharing.start_reaper import reaper_started
from wds_tensorcache.storage.atomic import replace
from wds_tensorcache.storage.range_locks import CAN_LOCK_RANGES, RangeLocks
from wds_tensorcache.storage.system import boot_id

_SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[\w-][\w .=+@-]*").fullmatch
_MAX_NAME_NBYTES = 128  # in UTF-8
_MAX_ATTEMPTS = 100
_MAKING_S = 60  # the longest time that making a folder takes


def base_folder(directory: str | os.PathLike[str] | None) -> str:
    """Return the path of this user's folder in `directory`, which contains a folder for each name; create it if needed.

    Args:
        directory: Path of a folder; None for shared memory, `/dev/shm`.

    Raises:
        NotImplementedError: The system is not Linux, whose locks on byte ranges belong to open files, not to processes.
        FileNotFoundError: The directory does not exist.
        PermissionError: The folder belongs to another user, or other users may use it.
    """
    if not CAN_LOCK_RANGES:
        raise NotImplementedError("SharedDataset needs Linux: other systems lack its locks on byte ranges of a file")
    parent = os.path.abspath(_SHARED_MEMORY if directory is None else os.fspath(directory))
    base = os.path.join(parent, f"wds_tensorcache-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
        os.chmod(base, 0o700)  # a umask may have removed permissions
    check_owner(base, os.lstat(base), stat.S_ISDIR)
    return base


def named_folder(base: str, name: str) -> str:
    """Return the path of the folder for a name.

    Raises:
        InvalidKeyError: The name is empty or too long, or contains characters that are not allowed.
    """
    if not isinstance(name, str) or not _NAME(name) or ".." in name or len(name.encode()) > _MAX_NAME_NBYTES:
        raise InvalidKeyError(
            f"name {name!r:.200}: expected 1 to {_MAX_NAME_NBYTES} bytes of letters, digits, and any of ' .=+@_-', beginning "
            "with a letter, a digit, '_' or '-', and without '..'"
        )
    return os.path.join(base, name)


class SharedFolder:
    """A folder that this process holds, so that no process removes it until `leave`.

    Attributes:
        path: Path of the folder.
        head: Content of its file `head.json`.
        loads: Indices of the samples that threads of this process are loading or waiting for.
        is_doubtful: True if the machine was restarted since the folder was made: a crash may have lost bytes of its files.

    Threads/fork: any thread. A forked child holds the folder, too.
    """

    def __init__(self, path: str, holders: RangeLocks, head: dict[str, Any]) -> None:
        self.path, self.head = path, head
        self.is_doubtful = head.get("boot") != boot_id()
        self._holders: RangeLocks | None = holders
        self.loads: list[int] = []
        self._pid = os.getpid()
        holders.in_children = True
        _FOLDERS.add(self)

    def path_of(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def hold_again(self) -> None:
        """After a fork, hold the folder for this process alone; until then, it shares the parent's lock.

        Raises:
            FileNotFoundError, ValueError: The folder was removed, or removed and made again.
        """
        if self._holders is None or self._pid == os.getpid():
            return
        self.loads.clear()  # this process has no other thread of its parent
        mine = RangeLocks(self.path_of(HOLDERS))
        if not os.path.sameopenfile(mine.fd, self._holders.fd):
            raise ValueError(f"{self.path} was removed and made again by another process; open the SharedDataset again")
        mine.lock(os.getpid(), shared=True, wait=True)
        mine.in_children = True
        self._holders = mine
        self._pid = os.getpid()

    def holders(self) -> list[int]:
        """Return the process ids of the holders, ascending."""
        return folder_holders(self.path)

    def leave_if_idle(self) -> None:
        """Stop holding the folder, unless a load is running.

        Hazard: a running load may add a file while the folder is being removed, so that the folder would remain.
        """
        if not self.loads:
            self.leave()

    def leave(self) -> None:
        """Stop holding the folder; remove it if no process holds it and it is not persistent."""
        holders, self._holders = self._holders, None
        if holders is None:
            return
        holders.close()
        remove_if_abandoned(self.path)


_FOLDERS: weakref.WeakSet[SharedFolder] = weakref.WeakSet()


def _hold_in_child() -> None:
    for folder in _FOLDERS:
        with contextlib.suppress(OSError, ValueError):  # the child's first access raises it
            folder.hold_again()


# A comparison of process ids on use cannot do this: the child is a holder before its first access.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hold_in_child)


def folder_holders(path: str) -> list[int]:
    """Return the process ids of the processes that hold a folder, ascending."""
    try:
        found = RangeLocks(os.path.join(path, HOLDERS)).locked_by_others(0, NUM_HOLDER_BYTES)
    except FileNotFoundError:
        return []
    return [pid for pid in found if pid]  # a process that removes the folder has locked all bytes from 0 on


def read_head(path: str) -> dict[str, Any]:
    """Return the content of a folder's file `head.json`.

    Raises:
        FormatError: The file is damaged.
        FileNotFoundError: The folder has no such file: it is being removed, or was only partly removed.
        PermissionError: The file is not a regular file of this user alone.
    """
    where = os.path.join(path, HEAD)
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        check_owner(where, os.fstat(fd), stat.S_ISREG)
        try:
            head = json.loads(file.read())
            if (
                isinstance(head, dict)
                and isinstance(head["fingerprint"]["length"], int)
                and isinstance(head["name"], str)
            ):
                return head
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    raise FormatError("the description of the samples is damaged; call tc.shared_clear", kind="damaged").at(where)


def open_folder(
    base: str,
    name: str,
    fingerprint: dict[str, Any],
    persistent: bool,
    create: Callable[[str], None],
) -> SharedFolder:
    """Open the folder for a name, or create it, and hold it. Remove abandoned folders of all names.

    Args:
        base: Result of `base_folder`.
        name: Name of the shared memory.
        fingerprint: Description of the dataset, which the folder stores.
        persistent: Mark the folder, so that it is kept without holders.
        create: Called with the path of a new folder to write files into it.

    Raises:
        InvalidKeyError: The name is not allowed.
        StaleCacheError: The folder was made for a dataset with another fingerprint.
        PermissionError: The folder or a file in it does not belong to this user alone.
        FormatError: The folder's `head.json` is damaged.
        OSError: The file system is full; or the folder can be neither opened nor replaced.
    """
    path = named_folder(base, name)
    for other in find_folders(base):
        with contextlib.suppress(OSError):  # for example, a folder that another program made, with folders in it
            remove_if_abandoned(other)
    folder = None
    for _ in range(_MAX_ATTEMPTS):
        folder = _open(path) or _create(path, {"name": name, "fingerprint": fingerprint, "boot": boot_id()}, create)
        if folder is not None:
            break
    if folder is None:
        raise FileExistsError(f"{path} can be neither opened nor replaced; delete it, or use another name")
    found = folder.head.get("fingerprint")
    if found != fingerprint:
        folder.leave()
        holders = folder_holders(path)
        raise StaleCacheError(
            f"{path} holds samples of another dataset, {found!r:.2000}, but this one is {fingerprint!r:.2000}; use another "
            f"name, or close the SharedDataset in all processes (this one is {os.getpid()}, holders: {holders}) and call "
            f"tc.shared_clear({name!r}, {os.path.dirname(base)!r})"
        )
    if persistent:
        os.close(
            os.open(folder.path_of(IS_PERSISTENT), os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        )
    elif not os.path.exists(folder.path_of(IS_PERSISTENT)):
        with reaper_started("wait", path, path):
            return folder
    return folder


def _open(path: str) -> SharedFolder | None:
    """Open an existing folder and hold it; return None if there is none, or it was being removed."""
    try:
        check_owner(path, os.lstat(path), stat.S_ISDIR)
        holders = RangeLocks(os.path.join(path, HOLDERS))
        check_owner(holders.path, os.fstat(holders.fd), stat.S_ISREG)
        # A process that removes the folder has locked all bytes. After waiting for it, the folder is gone, or is a new one.
        holders.lock(os.getpid(), shared=True, wait=True)
        if os.stat(holders.path).st_ino != os.fstat(holders.fd).st_ino:
            return None
    except FileNotFoundError:
        return None
    try:
        return SharedFolder(path, holders, read_head(path))
    except BaseException as exc:
        holders.close()
        if not isinstance(exc, FileNotFoundError):
            raise
        remove_if_abandoned(path)  # a process was killed while it removed the folder
        return None


def _create(path: str, head: dict[str, Any], create: Callable[[str], None]) -> SharedFolder | None:
    """Create a folder under a temporary name, with all its files, hold it, and rename it to `path`.

    Returns:
        None if another process was faster.
    """
    base, name = os.path.split(path)
    making = os.path.join(base, f".{name}.{secrets.token_hex(4)}.new")
    try:
        # This process may be killed at any moment. So the reaper makes the folder, waits until this process holds it or
        # is gone, and removes it after its last holder.
        with reaper_started("make", making, path):
            if not os.path.exists(making):  # the reaper could not be started
                os.mkdir(making, 0o700)
                os.chmod(making, 0o700)
                write_file(os.path.join(making, HOLDERS))
            holders = RangeLocks(os.path.join(making, HOLDERS))
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


def find_folders(base: str) -> Iterator[str]:
    """Yield the paths of all folders in `base`, including folders that are being made or removed."""
    with os.scandir(base) as entries:
        yield from [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def remove_if_abandoned(path: str, *, even_persistent: bool = False) -> bool:
    """Remove a folder if no process holds it and, unless `even_persistent`, it is not persistent.

    Returns:
        True if the folder is gone.
    """
    try:
        is_young = time.time() - os.stat(path).st_mtime < _MAKING_S
    except FileNotFoundError:
        return True
    if is_young and os.path.basename(path).startswith("."):
        return False  # a process may be making it; if it was killed, the reaper removes the folder
    try:
        holders = RangeLocks(os.path.join(path, HOLDERS))
    except FileNotFoundError:
        if is_young:
            return False  # a process may be removing it
        # Another program has deleted the file, or the folder is empty: with a new file, its lock can be taken.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            write_file(os.path.join(path, HOLDERS))
        try:
            holders = RangeLocks(os.path.join(path, HOLDERS))
        except FileNotFoundError:
            return False
    with contextlib.closing(holders), contextlib.suppress(FileNotFoundError):
        if not holders.lock(0, NUM_HOLDER_BYTES):
            return False
        if os.stat(holders.path).st_ino != os.fstat(holders.fd).st_ino:
            return True
        is_kept = os.path.exists(os.path.join(path, IS_PERSISTENT)) and os.path.exists(os.path.join(path, HEAD))
        if is_kept and not even_persistent:
            return False
        remove_folder(path)
    return True
