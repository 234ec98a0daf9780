"""A new folder that one rename makes visible with all its files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.atomic import find_temporary, fsync_folder, replace, temporary_path
from wds_tensorcache.storage.locks import Flock
from wds_tensorcache.storage.urls import check_not_url, is_url, shown

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def check_local(path: str | os.PathLike[str], role: str) -> None:
    """Raise ValueError if a path is a url. The message says that `role` must be local."""
    text = os.fsdecode(path)
    if is_url(text):
        remedy = "use a local folder, and copy it: shards first, then manifest.json, as in docs/remote_writing.md"
        raise ValueError(f"{shown(text)} is a url, but {role} must be on a local disk; {remedy}")
    check_not_url(text, ())


def check_new(out: str | os.PathLike[str], hint: str = "choose a new folder for the version") -> str:
    """Return the absolute path of a folder to make or replace.

    Raises:
        FileExistsError: The path is a file, or a folder that cannot be replaced. If the folder is not empty, the message ends
            with `hint`.
        ValueError: The path is empty or a url.
    """
    check_local(out, "a folder that appears by one rename")
    path = os.fsdecode(out)
    if not path:
        raise ValueError("out='', expected a folder")
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise FileExistsError(f"{path} is a file, expected a folder")
    is_current = os.path.isdir(path) and os.path.samefile(path, os.curdir)
    if is_current or os.path.ismount(path):
        fault = "the current folder" if is_current else "a mount point"
        raise FileExistsError(f"{path} is {fault}, and cannot be replaced; choose a folder in it")
    if has_entries(path):
        raise FileExistsError(f"{path} is not empty; {hint}")
    return path


def has_entries(folder: str | os.PathLike[str]) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


@contextlib.contextmanager
def new_folder(out: str, fsync: bool = True, token: str | None = None) -> Iterator[str]:
    """Make a hidden folder. At the end of the `with` block, rename it to `out`; if the block raises, delete it.

    If the file system has locks, abandoned folders of killed processes are deleted first.

    Args:
        out: A path that `check_new` returned.
        fsync: Wait for the disk.
        token: Hexadecimal digits that identify the content. With a token, the hidden folder stays after an interruption or an
            error of the system. A later call with the same token yields this folder with its files.

    Raises:
        FileExistsError: `out` is no longer empty, or another process writes the folder of this token.
    """
    parent, name = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    folder = temporary_path(out) if token is None else os.path.join(parent, f".{name}.{token}.tmp")
    for stray in find_temporary(parent, re.escape(name)):
        # an OSError means that the path is not a folder, belongs to another user, or is just being deleted
        with contextlib.suppress(OSError), contextlib.closing(Flock(stray, _FLAGS)) as lock:
            if lock.is_locked and stray != folder:
                shutil.rmtree(stray, ignore_errors=True)
    os.makedirs(folder, exist_ok=token is not None)
    with contextlib.closing(Flock(folder, _FLAGS)) as lock:
        if lock.is_locked is False:
            raise FileExistsError(f"another process is writing {out}; wait until it ends, or choose another folder")
        try:
            yield folder
            if os.path.isdir(out):
                shutil.copymode(out, folder)
            # A new name may reach the disk before the files, so the block must have synced them.
            replace(folder, out)
        except BaseException as exc:
            is_resumable = token is not None and isinstance(exc, (KeyboardInterrupt, OSError))
            if not is_resumable or isinstance(exc, (FileExistsError, FormatError)):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    if fsync:
        fsync_folder(parent)
