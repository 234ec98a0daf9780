"""Read a file once from beginning to end, in pieces; the threads of a pool, if there is one, read ahead."""

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
_AHEAD_NBYTES = 1 << 22  # pieces that other threads read are larger, since passing one on costs time

# xxhash holds the GIL while it hashes at most this many bytes. If it released it, threads that check one file
# each would wait for the GIL after every hash.
_HELD_NBYTES = 1 << 16
_MEMORY = Pool(1 << 26)


class Readable(Protocol):
    """A file that `ReadAhead` reads; see `ShardFile` and `RemoteFile`."""

    @property
    def nbytes(self) -> int: ...
    def read(self, begin: int, end: int, /) -> bytes: ...
    def read_into(self, buffers: Sequence[Any], begin: int, /) -> None: ...


class Digest:
    """The running XXH3-64 of the bytes `[begin, end)` of a file.

    Attributes:
        error: Error with which a read of these bytes failed; None if none failed.
    """

    __slots__ = ("_hash", "begin", "end", "error")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end  # the bytes that are not hashed yet
        self.error: Exception | None = None
        self._hash: xxhash.xxh3_64 | None = None

    @property
    def value(self) -> int:
        """Digest of the bytes so far, 64 bits; 0 before the first byte."""
        return 0 if self._hash is None else self._hash.intdigest()

    def add(self, piece: memoryview | bytes) -> None:
        """Hash the next bytes of the file."""
        if self._hash is None:
            self._hash = xxhash.xxh3_64()
        self._hash.update(piece)
        self.begin += len(piece)


@dataclass(slots=True)
class Readers:
    """The threads that read ahead, in one or several files at a time.

    Attributes:
        pool: The threads; None reads each piece in the thread that asks for it.
        threads: Number of these threads for each file, on average. Up to two pieces of a file per thread are read ahead.
        is_stopped: Set to True to end reading: the next piece raises CancelledError.
    """

    pool: Executor | None = None
    threads: int = 1
    is_stopped: bool = False


class ReadAhead:
    """The bytes of a file, for a caller that reads them mostly in order.

    A piece is hashed only after the caller has read the headers in it: this is better for the processor's caches. If a piece
    cannot be read, `read` and `hash` read only the bytes that they need again. So only requests for unreadable bytes fail.

    Args:
        file: File to read.
        readers: Threads that read ahead.

    Attributes:
        done: Offset up to which digests are computed.

    Threads: one caller. Memory: one piece; with a pool, two pieces per thread and two more, recycled by the next file.
    """

    def __init__(self, file: Readable, readers: Readers) -> None:
        self.done = 0
        self._file = file
        self._digests: list[Digest] = []
        self._readers = readers
        self._piece_nbytes = _PIECE_NBYTES if readers.pool is None else _AHEAD_NBYTES
        self._step = _HELD_NBYTES if readers.pool is None else self._piece_nbytes
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

    def _holds(self, at: int) -> bool:
        """Advance to the piece that contains the byte at offset `at`; return whether the piece could be read."""
        while at >= self._end:
            self.hash()
            self._memory = memoryview(b"")  # recycled for the next piece
            begin, self._memory, is_here = next(self._pieces)
            self._end = min(begin + self._piece_nbytes, self._file.nbytes)
            self._begin = begin if is_here else self._end
        return at >= self._begin

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of the file; raise OSError or FormatError if they cannot be read. Memory: a copy."""
        if end > self._end and begin < self._file.nbytes:
            self._holds(begin)
        if self._begin <= begin and end <= self._end:
            return bytes(self._memory[begin - self._begin : end - self._begin])
        return self._file.read(begin, end)

    def digest(self, begin: int, end: int) -> Digest:
        """Return the digest of the bytes `[begin, end)` of the file; it is complete when `done` reaches `end`."""
        digest = Digest(begin, end)
        self._digests.append(digest)
        self.done = min(self.done, begin)
        return digest

    def finish(self) -> None:
        """Complete all digests."""
        while self._digests:
            self._holds(max(digest.end for digest in self._digests) - 1)
            self.hash()

    def hash(self) -> None:
        """Add the bytes up to the end of the current piece to all digests."""
        first, end, memory, step = self._begin, self._end, self._memory, self._step
        rest: list[Digest] = []
        for digest in self._digests:
            begin, last = digest.begin, min(digest.end, end)
            try:
                while begin < last:
                    stop = min(last, begin + step)
                    is_here = begin >= first
                    digest.add(memory[begin - first : stop - first] if is_here else self._file.read(begin, stop))
                    begin = stop
            except (OSError, FormatError) as exc:
                digest.error = exc
            else:
                if digest.end > end:
                    rest.append(digest)
        self._digests, self.done = rest, end
