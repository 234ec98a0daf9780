"""Write files under a temporary name and then rename them, so that each appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator

from wds_tensorcache.storage.locks import Held, open_regular

__all__ = [
    "create_temporary",
    "create_unnamed",
    "find_temporary",
    "fsync_folder",
    "remove_stray",
    "replace",
    "temporary_path",
    "write_atomically",
]


def temporary_path(path: str) -> str:
    """Return a path `.NAME.TOKEN.tmp` in the folder of `path`, for a file that will later be renamed to `path`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")


def find_temporary(folder: str, names: str) -> list[str]:
    """Return the paths of the temporary files in `folder` whose final names match the regular expression `names`."""
    matches = re.compile(rf"\.{names}\.[0-9a-f]+\.tmp").fullmatch
    return [os.path.join(folder, name) for name in os.listdir(folder or ".") if matches(name)]


@contextlib.contextmanager
def create_temporary(path: str, access: int = os.O_WRONLY) -> Iterator[Held]:
    """Yield a locked temporary file, which the caller writes and renames to `path`; at the end, delete it if it remains."""
    pid = os.getpid()
    while True:
        # Hazard: an interrupt may arrive right after any call. So `finally` knows the name before the file exists.
        temporary = temporary_path(path)
        try:
            with Held(temporary, access | os.O_CREAT | os.O_EXCL) as file:
                # Hazard: before this lock, another writer's `remove_stray` may delete the file, as if its writer were dead.
                if file.lock() is not False and os.path.exists(temporary):
                    yield file
                    return
        finally:
            if pid == os.getpid():  # a forked child also runs this block
                with contextlib.suppress(OSError):  # renamed; after any other error, the next writer deletes the file
                    os.remove(temporary)


@contextlib.contextmanager
def create_unnamed(folder: str, name: str) -> Iterator[Held]:
    """Yield a new file in a folder of a POSIX system, for reading and writing. The system frees it when no process has it open.

    Without `O_TMPFILE`, the file has a temporary name of `name` for an instant. Such files of processes that were killed in
    that instant are deleted.
    """
    file = _open_unnamed(folder)
    if file is None:
        for stray in find_temporary(folder, re.escape(name)):
            remove_stray(stray)
        temporary = temporary_path(os.path.join(folder, name))
        file = Held(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(FileNotFoundError):  # another process has already deleted it as a stray
            os.unlink(temporary)
    with file:
        yield file


def _open_unnamed(folder: str) -> Held | None:
    """Open a file without a name; return None if the system or the file system of the folder has none."""
    with contextlib.suppress(AttributeError, OSError):  # `create_unnamed` reports a folder that cannot be written
        return Held(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL)
    return None


def remove_stray(path: str) -> None:
    """Delete an abandoned temporary file. Keep it if a living process has locked it, or if it is not an ordinary file."""
    file = open_regular(path)
    if file is not None:
        with file:
            if file.lock() is not False:
                with contextlib.suppress(OSError):  # another user's file, in a folder where only owners may delete
                    os.remove(path)


def write_atomically(path: str, parts: Iterable[bytes], fsync: bool = True) -> None:
    """Write a file so that, whatever happens, readers see either the complete new file or the complete old one.

    Args:
        path: Path of the file; its folder must exist.
        parts: Content of the file, in pieces.
        fsync: Wait until the file is on disk. Otherwise the file survives the death of this process, but perhaps not a
            crash of the machine.

    Raises:
        OSError: For example, the disk is full, or the folder does not exist. An error before the rename leaves the old file
            unchanged and deletes the temporary file.
    """
    # Hazard: a rename may reach the disk before the content of the file, and a crash then leaves an empty file under the
    # new name. So flush the content to disk first, then rename, then flush the folder.
    with create_temporary(path) as file:
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                rest = rest[os.write(file.fd, rest) :]
        if fsync:
            os.fsync(file.fd)
        if os.name != "posix":  # other systems cannot rename an open file
            file.close()
        replace(file.path, path)  # while locked: `remove_stray` would delete it
    if fsync:
        fsync_folder(os.path.dirname(path))


def replace(temporary: str, path: str) -> None:
    """Rename a complete file or folder to its final name. A file replaces a file; a folder replaces only an empty folder.

    Raises:
        FileExistsError: `temporary` is a folder, and `path` exists and is not an empty folder.
    """
    try:
        os.replace(temporary, path)
    except OSError as exc:
        if os.path.isdir(temporary) and os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise FileExistsError(f"{path} exists and is not an empty folder; choose a new folder") from exc
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
