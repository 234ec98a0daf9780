"""A folder that appears whole by one rename, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator

from wds_tensorcache.storage.atomic import find_temporary, fsync_folder, temporary_path
from wds_tensorcache.storage.locks import Held

__all__ = ["check_new", "new_folder"]

_WRITTEN = re.compile(r".*\.(tar|idx|index|tmp)|manifest\.json", re.DOTALL).fullmatch  # names of files in a cache


def check_new(out: str | os.PathLike[str], hint: str = "a version is a new folder") -> str:
    """Return the absolute path of a folder that is to appear; `hint` is what to do if it is not empty.

    Raises:
        FileExistsError: It is not empty, the current folder, or a mount point.
        ValueError: The path is empty.
    """
    path = os.fsdecode(out)
    if not path:
        raise ValueError("out='', expected a folder")
    path = os.path.realpath(path)
    if os.path.isdir(path) and os.path.samefile(path, os.curdir):
        raise FileExistsError(f"{path} is the current folder, and cannot be replaced; choose a folder in it")
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise FileExistsError(f"{path} is not empty; {hint}")
    if os.path.ismount(path):
        raise FileExistsError(f"{path} is where a disk is mounted, and cannot be replaced; choose a folder in it")
    return path


@contextlib.contextmanager
def new_folder(out: str, fsync: bool = True) -> Iterator[str]:
    """Give a hidden folder that becomes `out` at the end of the `with` block, and is deleted if the block fails.

    What killed processes left is deleted first, where the file system has locks.

    Args:
        out: Result of `check_new`.
        fsync: Wait until the rename is on disk. The caller writes the content to disk.

    Raises:
        FileExistsError: `out` is not empty any more.
    """
    parent, name = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    for stray in find_temporary(parent, re.escape(name)):
        # OSError: another user's, no folder, or one that is deleted at this moment
        with contextlib.suppress(OSError), _locked(stray) as is_ours:
            if is_ours and _is_of_caches(stray):
                shutil.rmtree(stray, ignore_errors=True)
    folder = temporary_path(out)
    try:
        os.mkdir(folder)
        with _locked(folder):
            yield folder
            if os.path.isdir(out):
                shutil.copymode(out, folder)
                if os.name != "posix":
                    os.rmdir(out)  # elsewhere a folder cannot take an empty one's place
            # Hazard: a name may reach the disk before what it names; but all of it is there by now.
            _rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if fsync:
        fsync_folder(parent)


def _rename(folder: str, out: str) -> None:
    try:
        os.rename(folder, out)
    except OSError as exc:
        if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
            raise FileExistsError(f"{out} is not empty any more; choose a new folder") from exc
        raise


def _is_of_caches(folder: str) -> bool:
    """Return whether a folder has files of caches alone; a folder in it that is empty may be anything."""
    for path, folders, files in os.walk(folder):
        if not all(map(_WRITTEN, files)) or (path != folder and not folders and not files):
            return False
    return True


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[bool]:
    """Say that a living process writes a folder; give whether it is known that no other does.

    Raises:
        OSError: It is no folder, or another user's.
    """
    if os.name != "posix":
        yield False
        return
    with Held(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK) as held:
        yield held.lock() is True
