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
    "replace",
    "temporary_path",
    "write_atomically",
]


def temporary_path(path: str) -> str:
    """Return a hidden name in the folder of `path`, `.NAME.TOKEN.tmp`, for a file that will be renamed to `path`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")


def find_temporary(folder: str, names: str) -> list[str]:
    """Return the temporary files in a folder, for files whose names match a regular expression."""
    matches = re.compile(rf"\.{names}\.[0-9a-f]+\.tmp").fullmatch
    return [os.path.join(folder, name) for name in os.listdir(folder or ".") if matches(name)]


@contextlib.contextmanager
def create_temporary(path: str) -> Iterator[Held]:
    """Yield a locked temporary file, to be written and renamed to `path`; delete it at the end unless it was renamed."""
    pid = os.getpid()
    while True:
        # Hazard: an interrupt may arrive right after any call. So the name is known before the file exists.
        temporary = temporary_path(path)
        try:
            with Held(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                # Hazard: before it is locked, another writer's `remove_stray` may delete it as a killed writer's.
                if file.lock() is not False and os.path.exists(temporary):
                    yield file
                    return
        finally:
            if pid == os.getpid():  # a forked child runs this block, too
                with contextlib.suppress(
                    OSError
                ):  # already renamed; after any other error, the next writer deletes the file
                    os.remove(temporary)


def remove_stray(path: str) -> None:
    """Delete a temporary file, unless a living process writes it, or it is not an ordinary file."""
    file = open_regular(path)
    if file is not None:
        with file:
            if file.lock() is not False:
                with contextlib.suppress(OSError):  # another user's file, in a folder in which only owners may delete
                    os.remove(path)


def write_atomically(path: str, parts: Iterable[bytes], fsync: bool = True) -> None:
    """Write a file so that, whatever happens, readers see either the complete new file or the complete old one.

    Args:
        path: Path of the file; its folder must exist.
        parts: The content.
        fsync: Wait for the disk. Without it, the file survives the death of this process, but perhaps not a crash of the
            machine.

    Raises:
        OSError: The disk is full, the folder does not exist, … The old file is unchanged, and no other file remains.
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
        if os.name != "posix":  # other systems do not rename an open file
            file.close()
        replace(file.path, path)  # before the lock is released
    if fsync:
        fsync_folder(os.path.dirname(path))


def replace(temporary: str, path: str) -> None:
    """Rename a complete file, or a folder that replaces an empty one, to its final name.

    Raises:
        FileExistsError: Another folder that is not empty has the name.
    """
    try:
        os.replace(temporary, path)
    except OSError as exc:
        if os.path.isdir(temporary) and os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise FileExistsError(f"{path} is not empty any more; choose a new folder") from exc
        raise


def fsync_folder(folder: str) -> None:
    """Wait until the directory entries of a folder are on disk."""
    if os.name != "posix":  # other systems cannot open folders
        return
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
