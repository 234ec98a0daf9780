"""Atomic file writes: first under a temporary name, then a rename."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable


def temporary_path(path: str) -> str:
    """Return a random path `.NAME.TOKEN.tmp` in the folder of `path`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")


def find_temporary(folder: str, names: str) -> list[str]:
    """Return paths of temporary files whose final names match a regular expression."""
    matches = re.compile(rf"\.(?:{names})\.[0-9a-f]+\.tmp").fullmatch
    return [os.path.join(folder, name) for name in os.listdir(folder or ".") if matches(name)]


def remove_temporary(folder: str, names: str, is_ours: Callable[[str], bool] = lambda path: True) -> None:
    """Delete the temporary files for which `is_ours` returns True. Folders and links stay.

    The caller must hold the lock of the writers, so that no writer is active. Calls of `write_atomically` with a list
    may be active: they write a deleted file again.
    """
    for path in filter(is_ours, find_temporary(folder, names)):
        with contextlib.suppress(OSError):  # another user's file, in a folder where only owners may delete
            if stat.S_ISREG(os.lstat(path).st_mode):
                os.remove(path)


def write_atomically(path: str, parts: Iterable[bytes], fsync: bool = True) -> None:
    """Write a file atomically: readers see the old or the new file.

    Args:
        path: Path of the file; its folder must exist.
        parts: Content of the file, in pieces. Pass a list if another writer may start in the folder during the call.
            That writer may delete the temporary file, and the content is then written again.
        fsync: Wait until the file is on disk. Otherwise the file survives the death of this process, but perhaps not a
            crash of the machine.

    Raises:
        OSError: The file cannot be written, for example because the disk is full or the folder does not exist. An error
            before the rename leaves the old file unchanged and deletes the temporary file.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            file.flush()
            # A rename may reach the disk before the content of the file, and a crash then leaves an empty file under
            # the new name. So flush the content to disk first, then rename, then flush the folder.
            if fsync:
                os.fsync(file.fileno())
        replace(temporary, path)
    except FileNotFoundError:
        # A writer that has just begun deletes the temporary files of killed writers, and this file with them.
        if not isinstance(parts, list) or not os.path.isdir(os.path.dirname(path) or os.curdir):
            raise
        write_atomically(path, parts, fsync)
        return
    except BaseException as exc:
        if isinstance(exc, OSError) and exc.errno and exc.filename is None:  # as for a full disk
            exc.filename = path
        with contextlib.suppress(OSError):  # the next writer deletes it
            os.remove(temporary)
        raise
    if fsync:
        fsync_folder(os.path.dirname(path))


def publish(temporary: str, path: str) -> None:
    """Give a complete file its final name. Raise FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except OSError as exc:
        if os.path.lexists(path):
            problem = f"{path} was created after this writer started; write to another folder"
            raise FileExistsError(problem) from exc
        os.rename(temporary, path)  # a file system without hard links
    else:
        os.remove(temporary)


def replace(temporary: str, path: str) -> None:
    """Rename a complete file or folder. A file may replace a file, and a folder an empty folder.

    Raises FileExistsError if a folder would replace anything else, and OSError if the system refuses the rename.
    """
    try:
        os.replace(temporary, path)
    except OSError as exc:
        if os.path.isdir(temporary) and os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise FileExistsError(f"{path} exists and is not an empty folder; choose a new folder") from exc
        raise


def fsync_folder(folder: str) -> None:
    """Wait until the directory entries of a folder are on disk."""
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
