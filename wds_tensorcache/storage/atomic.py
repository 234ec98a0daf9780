"""Files that appear whole: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator

from wds_tensorcache.storage.locks import Held, open_regular

__all__ = [
    "create_temporary",
    "find_temporary",
    "fsync_folder",
    "remove_stray",
    "temporary_path",
    "write_atomically",
]


def temporary_path(path: str) -> str:
    """Return a hidden name beside `path`, `.NAME.TOKEN.tmp`, for what is renamed to `path` when it is complete."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")


def find_temporary(folder: str, names: str) -> list[str]:
    """Return what has a temporary name in a folder, for files whose names a regular expression matches."""
    matches = re.compile(rf"\.{names}\.[0-9a-f]+\.tmp").fullmatch
    return [os.path.join(folder, name) for name in os.listdir(folder or ".") if matches(name)]


@contextlib.contextmanager
def create_temporary(path: str) -> Iterator[Held]:
    """Give a locked file of a temporary name, to be written and renamed to `path`; delete it at the end if it was not."""
    pid = os.getpid()
    while True:
        # Hazard: an interrupt may come right after any call. So the name is known before there is a file.
        temporary = temporary_path(path)
        try:
            with Held(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                # Hazard: before it is locked, another writer's `remove_stray` takes it for a killed writer's, and deletes it.
                if file.lock() is not False and os.path.exists(temporary):
                    yield file
                    return
        finally:
            if pid == os.getpid():  # a forked child has a copy of all this
                with contextlib.suppress(OSError):  # renamed; or left to the next writer, after another error
                    os.remove(temporary)


def remove_stray(path: str) -> None:
    """Delete a temporary file, unless a living process is known to write it, or it is something else than a file."""
    file = open_regular(path)
    if file is not None:
        with file:
            if file.lock() is not False:
                with contextlib.suppress(OSError):  # another user's, in a folder whose files only their owners delete
                    os.remove(path)


def write_atomically(path: str, parts: Iterable[bytes], fsync: bool = True) -> None:
    """Write a file so that, whatever happens, readers see all of the new one or all of the old one.

    Args:
        path: Of the file; its folder must be there.
        parts: The content.
        fsync: Wait for the disk. Without it, readers are safe from this process's death, not from the machine's.

    Raises:
        OSError: The disk is full, the folder is not there, … The old file is as it was and nothing else is left.
    """
    # Hazard: a rename may reach the disk before the bytes it names, and a crash then leaves an empty file under the name.
    # So the bytes go first, then the name, then the folder that holds it.
    with create_temporary(path) as file:
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                rest = rest[os.write(file.fd, rest) :]
        if fsync:
            os.fsync(file.fd)
        if os.name != "posix":  # elsewhere an open file keeps its name
            file.close()
        os.replace(file.path, path)  # before the lock is gone
    if fsync:
        fsync_folder(os.path.dirname(path))


def fsync_folder(folder: str) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
