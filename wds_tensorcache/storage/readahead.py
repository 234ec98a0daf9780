"""One pass over a file, in pieces that threads may read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.threads import run_in_order

_PIECE_NBYTES = 1 << 21
_AHEAD_NBYTES = 1 << 22  # pieces that other threads read are larger, since passing on a piece costs time
_REREAD_NBYTES = 1 << 16
_MEMORY = Pool(1 << 26)


class Readable(Protocol):
    """A file that `ReadAhead` reads; see `ShardFile` and `RemoteFile`."""

    @property
    def nbytes(self) -> int: ...
    def read(self, begin: int, end: int, /) -> bytes: ...
    def read_into(self, buffers: Sequence[Any], begin: int, /) -> None: ...


@dataclass(slots=True)
class Readers:
    """The threads that read ahead, in one or several files."""

    pool: Executor | None = None  # None reads each piece in the thread that asks for it
    threads: int = 1  # for each file, on average; up to two pieces of a file per thread are read ahead
    is_stopped: bool = False  # set to True to end reading: `ReadAhead` then raises CancelledError for the next piece


class ReadAhead:
    """The bytes of a file, read mostly in order.

    If a piece cannot be read, `read` and `digest` try again with only the bytes that they need. So only requests for unreadable
    bytes fail.

    Threads: one caller. Memory: one piece; with a pool, two pieces per thread and two more. The next file recycles them.
    """

    def __init__(self, file: Readable, readers: Readers) -> None:
        self._file = file
        self._readers = readers
        self._piece_nbytes = _PIECE_NBYTES if readers.pool is None else _AHEAD_NBYTES
        self._memory = memoryview(b"")
        self._begin = self._end = 0
        self._pieces = run_in_order(
            range(0, file.nbytes, self._piece_nbytes), self._load, readers.pool, readers.threads
        )

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.close()
        self._memory = memoryview(b"")

    def _load(self, begin: int) -> tuple[int, memoryview, bool]:
        if self._readers.is_stopped:
            raise CancelledError("the rest of the file is no longer needed")
        nbytes = min(self._piece_nbytes, self._file.nbytes - begin)
        memory = _MEMORY.lease(nbytes).data
        try:
            self._file.read_into([memory], begin)
        except (OSError, FormatError):
            return begin, memory, False
        return begin, memory, True

    def _advance(self, at: int) -> None:
        while at >= self._end:
            self._memory = memoryview(b"")  # recycled for the next piece
            begin, self._memory, is_here = next(self._pieces)
            self._end = min(begin + self._piece_nbytes, self._file.nbytes)
            self._begin = begin if is_here else self._end

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`. Raise OSError or FormatError if they cannot be read. Memory: a copy."""
        if end > self._end and begin < self._file.nbytes:
            self._advance(begin)
        if self._begin <= begin and end <= self._end:
            return bytes(self._memory[begin - self._begin : end - self._begin])
        return self._file.read(begin, end)

    def digest(self, begin: int, end: int) -> int:
        """Return the XXH3-64 of the bytes `[begin, end)`. Raise errors as `read` does."""
        state = xxhash.xxh3_64()
        while begin < end:
            self._advance(begin)
            if begin >= self._begin:
                stop = min(end, self._end)
                state.update(self._memory[begin - self._begin : stop - self._begin])
            else:
                stop = min(end, begin + _REREAD_NBYTES)
                state.update(self._file.read(begin, stop))
            begin = stop
        return state.intdigest()
