"""Where the bytes of lazy tensors are: in a file that this process or another one has opened."""

from __future__ import annotations

from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.files import Files, Identity, ShardFile
from wds_tensorcache.storage.pool import Pool

__all__ = ["FileSource", "StoredBytes"]

Array = np.ndarray[Any, Any]
LEASED_NBYTES = 1 << 16  # from here on, recycled memory is faster than new memory


class StoredBytes:
    """Bytes of a file, as a `codec.reference.Source`."""

    __slots__ = ()

    def _open(self) -> tuple[ShardFile, int, Pool]:
        """Return the file, at which byte of it the source begins, and where memory comes from."""
        raise NotImplementedError

    def read(self, begin: int, end: int) -> bytearray | Array:
        file, first, pool = self._open()
        nbytes = end - begin
        buffer = pool.lease(nbytes) if nbytes >= LEASED_NBYTES else bytearray(nbytes)
        file.read_into([buffer], first + begin)
        file.check_unchanged()
        return buffer

    hold = read

    def read_into(self, buffer: memoryview, begin: int) -> None:
        file, first, _ = self._open()
        file.read_into([buffer], first + begin)
        file.check_unchanged()

    def view(self, begin: int, end: int) -> Array:
        file, first, _ = self._open()
        file.check_unchanged()
        return file.array()[first + begin : first + end]


class FileSource(StoredBytes):
    """A part of a file that another process has told of: it is opened when something is read, and must be the same file."""

    __slots__ = ("_identity", "_path")

    def __init__(self, path: str, identity: Identity) -> None:
        self._path = path
        self._identity = identity

    def _open(self) -> tuple[ShardFile, int, Pool]:
        file = _FILES.get(self._path)
        if file.identity != self._identity:
            file = _FILES.reopen(self._path)  # the one in the table may have been replaced since
        if file.identity != self._identity:
            raise FormatError("the shard was changed since this lazy tensor was made").at(self._path)
        return file, 0, _POOL

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        return self, begin

    def __reduce__(self) -> Any:
        return FileSource, (self._path, self._identity)


# for lazy tensors from other processes, which have no cache that could be closed
_FILES = Files(64, fixed=False)
_POOL = Pool(1 << 28)
