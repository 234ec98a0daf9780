"""The files of a folder to import: listed without following links out of it, and read without running anything."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import SHORTAGES, memory_nbytes

POOL = Pool(1 << 28)  # new memory for each file would take longer than reading it
_RECYCLED = 1 << 16  # smaller contents get ordinary memory
_HEAD_NBYTES = 512
_LARGE = 1 << 30  # only longer contents are compared with the memory of the machine
ALIGNMENT = 64  # of memory in bytes, enough for every dtype
_APPLE_DOUBLE = "._"  # macOS writes such a file next to each file, with the same suffix


@dataclass(frozen=True)
class SourceFolder:
    """The ordinary files in a folder and its subfolders.

    A symbolic link to a file inside the folder is followed. A link to a folder inside it is not, because the files of that
    folder are listed there. Other links are listed in `faults`.

    Args:
        path: The folder.
        trust: The user trusts the files: pickles and files of `torch.save` may name any class, and then run code.
        files: Relative paths of the only files to import; None for all.

    Raises:
        NotADirectoryError: `path` is not a folder.

    All methods that read raise FormatError of the kind "unreadable" if the system cannot open or read a file. If the reason is
    that descriptors or memory are short, `check_shortage` raises the error, too.

    Threads/fork/pickle: safe everywhere.
    """

    path: str
    trust: bool = False
    files: Sequence[str] | None = None
    _found: _Listing = field(init=False, repr=False, compare=False)

    _shortages: list[OSError] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not os.path.isdir(self.path):
            raise NotADirectoryError(f"{self.path}: expected a folder with files to import")
        files = self.files
        found = _list(self.path) if files is None else _Listing(os.path.realpath(self.path), sorted(files))
        object.__setattr__(self, "_found", found)

    @property
    def names(self) -> list[str]:
        """The paths of all files, relative to the folder, with `/` as separator, sorted."""
        return self._found.names

    @property
    def faults(self) -> dict[str, str]:
        """Faults by relative path: links that lead out of the folder or nowhere, and folders that cannot be read."""
        return self._found.faults

    @property
    def ignored(self) -> list[str]:
        """The relative paths of files that are never read: pipes, sockets, devices, and what macOS writes next to files."""
        return self._found.ignored

    @cached_property
    def by_suffix(self) -> dict[str, list[str]]:
        """The names by their last suffix, in lower case and with its dot; sorted."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            found.setdefault(os.path.splitext(name)[1].lower(), []).append(name)
        return found

    @cached_property
    def _known(self) -> Collection[str]:
        return frozenset(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def locate(self, name: str) -> str:
        """Return the path of a listed file."""
        return os.path.join(self.path, *name.split("/"))

    def read(self, name: str, max_nbytes: int | None = None) -> bytes:
        """Return the content of a listed file.

        Raises:
            FormatError: The file has more than `max_nbytes`.
        """
        with self.open(name) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if max_nbytes is not None and nbytes > max_nbytes:
                raise FormatError(f"the file has {nbytes:,} bytes, expected at most {max_nbytes:,}").at(name)
            check_fits(nbytes, name)
            return file.readall()

    def view(
        self, name: str, begin: int = 0, end: int | None = None, find_data: Callable[[bytes], int] | None = None
    ) -> memoryview:
        """Return the bytes `[begin, end)` of a listed file, by default the whole content, as writable memory.

        `find_data` gets the first 512 bytes of the file, and returns the offset of the byte to align to `ALIGNMENT` in memory.

        Memory: recycled when the last reference to the view is gone.

        Raises:
            FormatError: The file ends before byte `end`, or was changed while it was read.
        """
        with self.open(name) as file:
            return self.view_open(file, name, begin, end, find_data)

    def view_open(
        self,
        file: io.FileIO,
        name: str,
        begin: int = 0,
        end: int | None = None,
        find_data: Callable[[bytes], int] | None = None,
    ) -> memoryview:
        """Return the bytes of a file that `open` has opened, as `view` does; `name` is its name for errors."""
        fd = file.fileno()
        file_nbytes = os.fstat(fd).st_size
        if begin < 0 or (end is not None and end > file_nbytes):
            raise FormatError(f"the file has {file_nbytes:,} bytes, but [{begin:,}, {end:,}) is needed").at(name)
        nbytes = (file_nbytes if end is None else end) - begin
        check_fits(nbytes, name)
        if nbytes < _RECYCLED:
            memory = np.empty(nbytes, np.uint8).data
        else:
            shift = 0 if find_data is None else -find_data(os.pread(file.fileno(), _HEAD_NBYTES, 0)) % ALIGNMENT
            # Some processors copy eight times as slowly if memory begins 1 to 15 bytes after a page of the file does.
            shift += ALIGNMENT if shift else 0
            memory = POOL.lease(shift + nbytes)[shift:].data
        position = 0
        while position < nbytes and (count := os.preadv(file.fileno(), [memory[position:]], begin + position)):
            position += count
        if position < nbytes:
            raise FormatError("the file was cut short while it was read").at(name)
        return memory

    @contextmanager
    def open(self, name: str) -> Iterator[io.FileIO]:
        """Open a listed file; an error of the system inside the `with` block becomes a FormatError of the kind "unreadable".

        Raises:
            FormatError: The file cannot be opened or read, or is not an ordinary file any more.
        """
        try:
            with io.FileIO(self.locate(name), opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise FormatError("is not an ordinary file").at(name)
                # The file, or a folder above it, may have become a link since it was listed.
                if not _is_inside(_path_of(file.fileno(), file.name), self._found.root):
                    raise FormatError("is now a link out of the folder").at(name)
                yield file
        except OSError as exc:
            if exc.errno in SHORTAGES:
                self._shortages.append(OSError(exc.errno, f"{name}: cannot be read: {exc.strerror}"))
            raise FormatError(f"cannot be read: {exc.strerror or exc}", kind="unreadable").at(name) from exc

    def check_shortage(self) -> None:
        """Raise OSError if a file could not be read because descriptors or memory were short: the file may be good.

        Importers may take a file that cannot be read for a bad one, or for one of another format.
        """
        for error in self._shortages:
            raise error

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of a listed file.

        Raises:
            FormatError: The file ends before byte `end`.
        """
        return bytes(self.view(name, begin, end))

    def read_text(self, name: str, max_nbytes: int = 1 << 20) -> str:
        """Return the text in a listed file: UTF-8, without a byte order mark and without white space around it.

        Raises:
            FormatError: The file is not UTF-8, or has more than `max_nbytes`.
        """
        try:
            return self.read(name, max_nbytes).decode("utf-8-sig").strip()
        except UnicodeDecodeError as exc:
            raise FormatError(f"is not UTF-8: {exc}").at(name) from exc


def check_fits(nbytes: int, name: str) -> None:
    """Raise FormatError if this machine cannot have so many bytes of a file in memory, for example of a sparse one."""
    if nbytes > _LARGE and nbytes > (available := memory_nbytes() or nbytes):
        raise FormatError(f"{nbytes:,} bytes are needed, but this machine has {available:,}").at(name)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. Hazard: it may have become a FIFO, and opening it would wait for a process that writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _path_of(fd: int, path: str) -> str:
    """Return the path of an open file; on systems that do not tell it, the path to which `path` leads now."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)


@dataclass
class _Listing:
    root: str  # path of the folder, without links
    names: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def _list(path: str) -> _Listing:
    root = os.path.realpath(path)
    found = _Listing(root)
    todo = [""]
    while todo:
        prefix = todo.pop()
        try:
            with os.scandir(os.path.join(path, *prefix.split("/")) if prefix else path) as entries:
                for entry in entries:
                    _add(found, todo, root, entry, prefix + entry.name)
        except OSError as exc:
            if not prefix:
                raise
            found.faults[prefix[:-1]] = f"is a folder that cannot be read: {exc.strerror or exc}"
    return _Listing(root, sorted(found.names), dict(sorted(found.faults.items())), sorted(found.ignored))


def _add(found: _Listing, todo: list[str], root: str, entry: os.DirEntry[str], name: str) -> None:
    """Add an entry of a folder to what was found, or to the folders to list."""
    try:
        is_link, is_file, is_folder = entry.is_symlink(), entry.is_file(), entry.is_dir()
    except OSError as exc:  # a link to itself, for example
        found.faults[name] = f"cannot be read: {exc.strerror or exc}"
        return
    if is_link and not (is_file or is_folder) and not os.path.exists(entry.path):
        found.faults[name] = "is a link to no file"
    elif is_link and not _is_inside(os.path.realpath(entry.path), root):
        found.faults[name] = "is a link out of the folder"
    elif is_folder:
        # The target of a link is listed by its own name. Hazard: many links to folders with links make very many paths.
        if not is_link:
            todo.append(name + "/")
    elif is_file and not entry.name.startswith(_APPLE_DOUBLE):
        found.names.append(name)
    else:
        found.ignored.append(name)


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(os.path.join(root, ""))
