"""Folders of shards, indexes and a manifest: local, or at a url."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.files import open_if_exists
from wds_tensorcache.storage.system import MAX_WHOLE_NBYTES
from wds_tensorcache.storage.urls import is_url

if TYPE_CHECKING:
    from wds_tensorcache.storage.output import Output
    from wds_tensorcache.storage.remote.object_folder import ObjectFolder

Folder: TypeAlias = "LocalFolder | ObjectFolder"


def folder_of(path: str, fsync: bool = True) -> Folder:
    """Return the folder at a path or url. The path `""` is the current folder.

    With `fsync`, the content of a file is on disk before the file gets its name. A url ignores `fsync`.
    """
    if is_url(path):
        from wds_tensorcache.storage.remote.object_folder import ObjectFolder

        return ObjectFolder(path)
    return LocalFolder(path, fsync)


class LocalFolder:
    """A local folder of shards, their indexes and a manifest. Each `name` is the name of a file directly in the folder.

    `ObjectFolder` is a folder at a url, with the same methods. The method `change` of a local folder locks the folder.

    Attributes:
        path: Path or url of the folder.
        is_remote: True if `path` is a url.

    Raises (all methods; the last two errors only in `ObjectFolder`):
        OSError: The system refused the call, or another process kept the folder locked.
        RemoteError: A request failed.
        ValueError: A method that changes files was called, but the url cannot be written.

    Threads/fork/pickle: one thread at a time. A forked child cannot change files of an object store.
    """

    is_remote = False

    def __init__(self, path: str, fsync: bool = True) -> None:
        self.path = path
        self._fsync = fsync

    def make(self) -> None:
        """Create the folder if it does not exist. For a url, only check the url and the settings, without a request."""
        os.makedirs(self.path or os.curdir, exist_ok=True)

    def locate(self, name: str) -> str:
        """Return the path or url of a file."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """Return the sorted names of files and local subfolders. A missing folder has none."""
        try:
            return sorted(os.listdir(self.path or os.curdir))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist. Above 256 MiB, raise FormatError or RemoteError."""
        file = open_if_exists(self.locate(name))
        if file is None:
            return None
        if file.nbytes > MAX_WHOLE_NBYTES:
            problem = f"has {file.nbytes:,} bytes, more than the limit for such a file, {MAX_WHOLE_NBYTES:,}"
            raise FormatError(problem, kind="index").at(file.path)
        return file.read(0, file.nbytes)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it as a whole."""
        from wds_tensorcache.storage.atomic import write_atomically

        write_atomically(self.locate(name), [content], self._fsync)

    def change(self, name: str, apply: Callable[[bytes | None], bytes]) -> None:
        """Change the content of a file. Changes by several processes at once are not lost, unless a local disk has no locks.

        `apply` takes the old content, None if the file does not exist, and returns the new content. At a url, `apply` is called
        again if another process has changed the file first.
        """
        from wds_tensorcache.storage.atomic import remove_temporary
        from wds_tensorcache.storage.locks import locked_folder

        with locked_folder(self.path or os.curdir) as is_locked:
            # with the lock, these were left by killed processes
            if is_locked:
                remove_temporary(self.path, re.escape(name))
            before = self.read(name)
            content = apply(before)
            if content != before:
                self.write(name, content)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files in the given order; ignore missing files."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.locate(name))

    def new_file(self, name: str) -> Output:
        """Return a new file to append to. `finish` gives the file its name, and never replaces another file.

        Raises:
            FileExistsError: The file exists in a local folder. `finish` raises this error if the file has appeared since.
        """
        path = self.locate(name)
        if os.path.exists(path):
            raise FileExistsError(f"{path} was created after this writer started; write to another folder")
        from wds_tensorcache.storage.output import Output

        return Output(path, self._fsync)

    def cancel(self) -> None:
        """End all requests that change files, and refuse later requests. A local folder makes none."""
