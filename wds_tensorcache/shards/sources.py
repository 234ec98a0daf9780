"""Where the tensors of shards lie, for lazy tensors: in this process by shard and row, in others by file and identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.files import Files, Identity, ShardFile
from wds_tensorcache.storage.pool import Pool

if TYPE_CHECKING:
    from wds_tensorcache.shards.shard import Shard

__all__ = ["FileSource", "ShardSource"]

Array = np.ndarray[Any, Any]
LEASED_NBYTES = 1 << 16  # from here on, recycled memory is faster than new memory


class ShardSource:
    """The tensors of one sample of a shard; pickles as the file's path and identity."""

    __slots__ = ("_begin", "_row", "_shard")

    def __init__(self, shard: Shard, row: int, begin: int) -> None:
        self._shard = shard
        self._row = row
        self._begin = begin

    def _file(self) -> ShardFile:
        shard = self._shard
        if not shard.is_checked(self._row):
            shard.check_tensors(self._row)
        return shard.files.get(shard.path)

    def read(self, begin: int, end: int) -> bytearray | Array:
        return _read(self._file(), self._begin + begin, end - begin, self._shard.pool)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        _read_into(self._file(), [buffer], self._begin + begin)

    def view(self, begin: int, end: int) -> Array:
        return _view(self._file(), self._begin + begin, self._begin + end)

    hold = read

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        return FileSource(self._shard.path, self._file().identity), self._begin + begin


def _read(file: ShardFile, begin: int, nbytes: int, pool: Pool) -> bytearray | Array:
    buffer = pool.lease(nbytes) if nbytes >= LEASED_NBYTES else bytearray(nbytes)
    _read_into(file, [buffer], begin)
    return buffer


def _read_into(file: ShardFile, buffers: list[Any], begin: int) -> None:
    file.read_into(buffers, begin)
    file.check_unchanged()


def _view(file: ShardFile, begin: int, end: int) -> Array:
    file.check_unchanged()
    return file.array()[begin:end]


class FileSource:
    """A part of a file that another process has told of: it is opened when something is read, and must be the same file."""

    __slots__ = ("_identity", "_path")

    def __init__(self, path: str, identity: Identity) -> None:
        self._path = path
        self._identity = identity

    def _file(self) -> ShardFile:
        file = _FILES.get(self._path)
        if file.identity != self._identity:
            file = _FILES.reopen(self._path)  # the one in the table may have been replaced since
        if file.identity != self._identity:
            raise FormatError("the shard was changed since this lazy tensor was made").at(self._path)
        return file

    def read(self, begin: int, end: int) -> bytearray | Array:
        return _read(self._file(), begin, end - begin, _POOL)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        _read_into(self._file(), [buffer], begin)

    def view(self, begin: int, end: int) -> Array:
        return _view(self._file(), begin, end)

    hold = read

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        return self, begin

    def __reduce__(self) -> Any:
        return FileSource, (self._path, self._identity)


# for lazy tensors from other processes, which have no cache that could be closed
_FILES = Files(64, fixed=False)
_POOL = Pool(1 << 28)
