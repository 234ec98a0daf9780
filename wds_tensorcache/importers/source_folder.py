"""The files of a folder to import. Links out of the folder are not followed, except to blobs of the same Hub repository."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import SHORTAGES
from wds_tensorcache.storage.threads import computed_once

POOL = Pool(1 << 28)  # new memory for each file would take longer than reading it
RECYCLED = 1 << 16  # smaller contents and arrays get ordinary memory
_LINK_OUT, _BROKEN_LINK = "is a link out of the folder", "is a link to no file"
_REMEDIES = {
    _LINK_OUT: (
        "; the import follows only links within the folder, and to blobs of the same Hub repository: import a copy made by "
        "`cp -rL`"
    ),
    _BROKEN_LINK: "; restore the file, or delete the link",
}
_APPLE_DOUBLE = "._"  # macOS writes such a file next to each file, with the same suffix


def is_fault(error: Exception) -> bool:
    """Return whether a file may be the cause of an error."""
    return not isinstance(error, (ImportError, MemoryError)) and getattr(error, "errno", None) not in SHORTAGES


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add a file's name to errors; turn errors with `is_fault` into FormatError."""
    try:
        yield
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except Exception as exc:
        if not is_fault(exc):
            raise
        if isinstance(exc, OSError):
            raise FormatError(f"cannot be read: {exc.strerror or exc}", kind="unreadable").at(name) from exc
        is_deep = isinstance(exc, RecursionError)
        problem = "the values are nested too deeply" if is_deep else f"cannot be decoded: {exc!r:.300}"
        raise FormatError(problem).at(name) from exc


@dataclass(frozen=True)
class SourceFolder:
    """The ordinary files in a folder and its subfolders.

    Symbolic links to files inside the folder are followed. In the cache of the Hugging Face Hub, links to blobs of the same
    repository are followed, too. Links to folders are not followed.

    Args:
        path: The folder.
        trust: True if pickles and files of `torch.save` may name any class, and run code.
        files: Relative paths of the files to import; None for all files in the folder.

    Attributes:
        names: Sorted paths of the files to import, relative to the folder, with `/` as separator.
        faults: Faults by relative path: links that lead out of the folder or nowhere, and folders that cannot be read.
        ignored: Files that are never read: pipes, sockets, devices, and the `._` files of macOS.

    Raises:
        FormatError: A file cannot be read. All methods that read raise it.
        OSError: The folder cannot be listed; or descriptors or memory ran out, which all methods that read raise, too.
    """

    path: str
    trust: bool = False
    files: Sequence[str] | None = None
    names: list[str] = field(init=False, default_factory=list)
    faults: dict[str, str] = field(init=False, default_factory=dict)
    ignored: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.files is not None:
            self.names.extend(sorted(self.files))
            return
        root = os.path.realpath(self.path)
        repository, mark, _ = f"{root}/".rpartition("/snapshots/")
        roots = (os.path.join(root, ""), *([f"{repository}/blobs/"] if mark else []))
        folders = [""]
        while folders:
            prefix = folders.pop()
            try:
                with os.scandir(self.locate(prefix)) as entries:
                    for entry in entries:
                        name = prefix + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{name}/")
                        elif entry.is_symlink() and not os.path.exists(entry.path):
                            self.faults[name] = _BROKEN_LINK
                        elif entry.is_symlink() and not f"{os.path.realpath(entry.path)}/".startswith(roots):
                            self.faults[name] = _LINK_OUT
                        elif entry.is_file() and not entry.name.startswith(_APPLE_DOUBLE):
                            self.names.append(name)
                        elif not entry.is_dir():
                            self.ignored.append(name)
            except OSError as exc:
                if not prefix:
                    raise
                self.faults[prefix[:-1]] = f"is a folder that cannot be read: {exc.strerror or exc}"
        self.names.sort()
        self.ignored.sort()

    def first_fault(self) -> FormatError | None:
        """Return an error for the first of `faults`, or None. It counts further equal faults."""
        if not self.faults:
            return None
        name = min(self.faults)
        fault = self.faults[name]
        num_more = sum(other == fault for other in self.faults.values()) - 1
        more = f", as {'is' if num_more == 1 else 'are'} {num_more:,} more" if num_more else ""
        return FormatError(f"{fault}{more}{_REMEDIES.get(fault, '')}").at(name)

    @computed_once
    def by_suffix(self) -> dict[str, list[str]]:
        """Sorted names by last suffix. Suffixes are in lower case and begin with a dot; "" stands for no suffix."""
        names: dict[str, list[str]] = {}
        for name in self.names:
            names.setdefault(os.path.splitext(name)[1].lower(), []).append(name)
        return names

    @computed_once
    def _all(self) -> frozenset[str]:
        return frozenset(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def locate(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextmanager
    def open(self, name: str) -> Iterator[io.FileIO]:
        """Open a listed file within `naming`."""
        with naming(name), io.FileIO(self.locate(name)) as file:
            yield file

    def read(self, name: str) -> bytes:
        """Return the content of a listed file."""
        with self.open(name) as file:
            return file.readall()

    def read_text(self, name: str) -> str:
        """Return the stripped text of a file. Raise FormatError if it is not UTF-8."""
        try:
            return self.read(name).decode("utf-8-sig").strip()
        except UnicodeDecodeError as exc:
            raise FormatError(f"is not UTF-8: {exc}").at(name) from exc

    def read_json(self, name: str, names_nan: bool = False) -> Any:
        """Return the JSON in a listed file, or raise ValueError. With `names_nan`, NaN and infinities become texts."""
        return json.loads(self.read_text(name), parse_constant=str if names_nan else None)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of a listed file. Raise FormatError if the file is shorter."""
        return bytes(self.view(name, begin, end))

    def view(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Open a listed file, and return its bytes `[begin, end)`; see `view_open`."""
        with self.open(name) as file:
            return view_open(file, begin, end)


def view_open(file: io.FileIO, begin: int = 0, end: int | None = None, shift: int = 0) -> memoryview:
    """Return the bytes `[begin, end)` of an open file as writable memory.

    The default is the whole content. Large contents begin `shift` bytes after the beginning of a page.

    Raises:
        FormatError: The file ends before byte `end`, or was truncated during the read.

    Memory: a copy. Memory of 64 KiB or more is recycled when the last reference to the view is gone.
    """
    fd = file.fileno()
    file_nbytes = os.fstat(fd).st_size
    if begin < 0 or (end is not None and end > file_nbytes):
        raise FormatError(f"the file has {file_nbytes:,} bytes, but [{begin:,}, {end:,}) is needed")
    nbytes = (file_nbytes if end is None else end) - begin
    memory = np.empty(nbytes, np.uint8).data if nbytes < RECYCLED else POOL.lease(shift + nbytes)[shift:].data
    position = 0
    while position < nbytes and (count := os.preadv(fd, [memory[position:]], begin + position)):
        position += count
    if position < nbytes:
        raise FormatError("the file was cut short while it was read")
    return memory
