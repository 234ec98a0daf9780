"""Folders in shared memory, one for each name."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import ConcatDataset, StackDataset, Subset

from wds_tensorcache.errors import FormatError, InvalidKeyError, StaleCacheError
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.sharing.reaper import (
    HEAD,
    HOLDERS,
    IN_USE,
    NUM_HOLDER_BYTES,
    PERSISTENT,
    remove_folder,
    remove_if_abandoned,
    start_reaper,
)
from wds_tensorcache.sharing.table import TABLE, create_table
from wds_tensorcache.storage.locks import CAN_LOCK_RANGES, Flock, RangeLocks, locked_folder
from wds_tensorcache.storage.owned import check_owner, open_owned, write_file
from wds_tensorcache.storage.system import boot_id

LOCKS = "locks"  # name of the file; byte i is the lock of sample i
_SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[\w-][\w .=+@-]*").fullmatch
_MAX_NAME_NBYTES = 128  # in UTF-8
# A process that is opening a folder may hold the lock for longer. Then the reaper, or that process, removes the folder.
_LEAVE_S = 0.1


def base_folder(directory: str | os.PathLike[str] | None) -> str:
    """Return the path of this user's folder in `directory`. Create it if needed. It contains a folder for each name.

    Raises:
        NotImplementedError: The system is not Linux. Only there do locks on byte ranges belong to open files.
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
    """A folder that this process holds until `leave`. No process removes a folder that is held.

    Attributes:
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
        _FOLDERS.add(self)

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def hold_again(self) -> None:
        """Hold the folder for this process alone. Until then, a forked child shares its parent's lock.

        Raises:
            FileNotFoundError: Another program has removed the folder.
            ValueError: Another process has made the folder again.
        """
        if self._holders is None or self._pid == os.getpid():
            return
        self.loads.clear()  # this process has no other thread of its parent
        holders = _hold(self.path)
        if not os.path.sameopenfile(holders.fd, self._holders.fd):
            raise ValueError(f"{self.path} was removed and made again by another process; open the SharedDataset again")
        self._holders = holders
        self._pid = os.getpid()

    def leave(self) -> None:
        """Stop holding the folder. Remove it unless a process holds it or it is persistent."""
        holders, self._holders = self._holders, None
        if holders is None:
            return
        holders.close()
        # Hazard: a finalizer may call this while this thread holds the lock, to open another folder.
        parent = os.path.dirname(self.path)
        with contextlib.suppress(FileNotFoundError), contextlib.closing(Flock(parent, wait_s=_LEAVE_S)) as lock:
            if lock.is_locked is not False:
                remove_if_abandoned(self.path)


_FOLDERS: weakref.WeakSet[SharedFolder] = weakref.WeakSet()


def _hold_in_child() -> None:
    for folder in _FOLDERS:
        with contextlib.suppress(OSError, ValueError):  # the child's first access raises it
            folder.hold_again()


# A comparison of process ids on use cannot do this: the child is a holder before its first access.
os.register_at_fork(after_in_child=_hold_in_child)


def _hold(path: str) -> RangeLocks:
    holders = RangeLocks(os.path.join(path, HOLDERS))
    check_owner(holders.path, os.fstat(holders.fd), stat.S_ISREG)
    for byte in (os.getpid(), IN_USE):
        holders.lock(byte, shared=True, wait=True)
    holders.in_children = True
    return holders


def folder_holders(path: str) -> list[int]:
    """Return the process ids of the processes that hold a folder, ascending."""
    try:
        holders = RangeLocks(os.path.join(path, HOLDERS)).locked_by_others(0, NUM_HOLDER_BYTES)
    except FileNotFoundError:
        return []
    return [pid for pid in holders if pid]  # a process that removes the folder has locked all bytes from 0 on


def read_head(path: str) -> dict[str, Any]:
    """Return the content of a folder's file `head.json`.

    Raises:
        FormatError: The file is missing or damaged.
        PermissionError: The file is not a regular file, or other users can access it.
    """
    where = os.path.join(path, HEAD)
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        fd, _ = open_owned(where, os.O_RDONLY)
        with open(fd, "rb") as file:
            head = json.loads(file.read())
        if isinstance(head, dict) and isinstance(head["fingerprint"]["length"], int) and isinstance(head["name"], str):
            return head
    raise FormatError("the description of the samples is damaged; call tc.shared_clear", kind="damaged").at(where)


def open_folder(base: str, name: str, fingerprint: dict[str, Any], persistent: bool) -> SharedFolder:
    """Open the folder for a name, or create it, and hold it. Remove abandoned folders of all names.

    `base` is a result of `base_folder`.

    Raises:
        InvalidKeyError: The name is not allowed.
        StaleCacheError: The folder was made for a dataset with another fingerprint.
        PermissionError: The folder or a file in it belongs to another user, or other users can access it.
        FormatError: The folder's `head.json` is damaged.
        FileExistsError: Another process still held the lock of `base` after 60 s.
        OSError: The file system is full.
    """
    path = named_folder(base, name)
    with locked_folder(base):
        for other in find_folders(base):
            with contextlib.suppress(OSError):  # for example, a folder that another program made, with folders in it
                remove_if_abandoned(other)
        # This process may be killed at any moment. So the reaper is there before the folder.
        with contextlib.nullcontext() if persistent else start_reaper(path):
            head = {"name": name, "fingerprint": fingerprint, "boot": boot_id()}
            folder = _open(path) if os.path.lexists(path) else _create(path, head)
    stored = folder.head.get("fingerprint")
    if stored != fingerprint:
        folder.leave()
        raise StaleCacheError(
            f"{path} holds samples of another dataset, {stored!r:.2000}, but this one is {fingerprint!r:.2000}; use another "
            f"name, or close the SharedDataset in all processes (this one is {os.getpid()}, holders: {folder_holders(path)}) "
            f"and call tc.shared_clear({name!r}, {os.path.dirname(base)!r})"
        )
    if persistent:
        os.close(os.open(folder.path_of(PERSISTENT), os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
    return folder


def _open(path: str) -> SharedFolder:
    check_owner(path, os.lstat(path), stat.S_ISDIR)
    try:
        holders = _hold(path)
    except FileNotFoundError as exc:
        problem = f"{HOLDERS} is missing; call tc.shared_clear"
        raise FormatError(problem, kind="damaged").at(path) from exc
    try:
        return SharedFolder(path, holders, read_head(path))
    except BaseException:
        holders.close()
        raise


def _create(path: str, head: dict[str, Any]) -> SharedFolder:
    os.mkdir(path, 0o700)
    try:
        os.chmod(path, 0o700)  # a umask may have removed permissions
        write_file(os.path.join(path, HOLDERS))
        holders = _hold(path)
        write_file(os.path.join(path, LOCKS))
        create_table(os.path.join(path, TABLE), head["fingerprint"]["length"])
        write_file(os.path.join(path, HEAD), json.dumps(head).encode())
    except BaseException:
        remove_folder(path)
        raise
    return SharedFolder(path, holders, head)


def find_folders(base: str) -> list[str]:
    with os.scandir(base) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def fingerprint_of(dataset: Any, text: str) -> dict[str, object]:
    """Return the fingerprint of a dataset: type, length, and the user's text.

    For torch's `Subset`, `ConcatDataset` and `StackDataset`, it contains the fingerprints of the datasets inside, and a digest
    of the indices. For a `Cache`, it contains a digest of its fingerprint and its keys in order. For any dataset, it contains
    the attribute `_fingerprint` if that is a string, as in Hugging Face's `datasets`. No sample is read, and the code of the
    dataset has no effect on the fingerprint.

    Raises:
        TypeError: The dataset has no length.
    """
    return {**_describe(dataset, ()), "length": len(dataset), "fingerprint": text}


def _describe(dataset: Any, around: tuple[int, ...]) -> dict[str, object]:
    """Describe a dataset; `around` has the ids of datasets around it."""
    kind = type(dataset)
    # in spawned processes, the module of the main script has another name
    description: dict[str, object] = {
        "type": f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__qualname__}"
    }
    with contextlib.suppress(Exception):  # an inner dataset may have no length, or not know it yet
        description["length"] = len(dataset)
    attributes = getattr(dataset, "__dict__", {})
    if isinstance(digest := attributes.get("_fingerprint"), str):
        description["digest"] = digest
    if isinstance(dataset, Cache):
        keys = xxhash.xxh3_64(json.dumps(dataset.fingerprint, sort_keys=True).encode())
        for key in iter(dataset.keys()):
            keys.update(key.encode("utf-8", "surrogateescape") + b"\0")
        description["digest"] = keys.hexdigest()
    if isinstance(dataset, (ConcatDataset, StackDataset, Subset)):
        if (indices := _digest(attributes.get("indices"))) is not None:
            description["indices"] = indices
        inner = attributes.get("datasets", [attributes.get("dataset")])
        parts = inner.values() if isinstance(inner, Mapping) else inner
        description["datasets"] = [_describe(part, (*around, id(dataset))) for part in parts if id(part) not in around]
    return description


def _digest(indices: Any) -> str | None:
    """Return the digest of ints in any container, or None."""
    with contextlib.suppress(Exception):  # anything may be in the place of indices
        numbers = np.asarray(indices)
        if numbers.dtype.kind in "iu":
            return str(xxhash.xxh3_64_hexdigest(numbers.astype(np.int64).tobytes()))
    return None
