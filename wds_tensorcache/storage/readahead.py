"""Go through a file once from its begin to its end, in pieces that other threads read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.threads import Cancelled, Job, ThreadPool

__all__ = ["Digest", "ReadAhead", "Readers", "in_order"]

_PIECE_NBYTES = 1 << 21
_AHEAD_NBYTES = 1 << 22  # of a piece that another thread reads: handing it over costs little beside that

# So few bytes are hashed without giving up the interpreter. Where threads go through files of their own, one that gave it up
# would wait each time until another does; where one goes through a file that others read, those do little else.
_HELD_NBYTES = 1 << 16

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Digest:
    """The XXH3-64 of bytes of a file.

    Attributes:
        value: 64 bits, of the bytes that are done; 0 if there are none.
        error: Why they could not be read.
    """

    __slots__ = ("_hash", "begin", "end", "error", "value")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end  # what is left
        self.value = 0
        self.error: Exception | None = None
        self._hash: xxhash.xxh3_64 | None = None

    def add(self, piece: memoryview) -> None:
        """Take the next bytes."""
        if self._hash is None and len(piece) == self.end - self.begin:
            self.value = xxhash.xxh3_64_intdigest(piece)
        else:
            self._hash = self._hash or xxhash.xxh3_64()
            self._hash.update(piece)
            self.value = self._hash.intdigest()
        self.begin += len(piece)


@dataclass(slots=True)
class Readers:
    """Who reads ahead in files, of which there may be several at a time, and the memory that they all use again.

    Attributes:
        pool: Its threads; None reads each piece when it is asked for.
        threads: How many read in one file at a time.
        is_stopped: Whether reading is to stop: then the next piece that is asked for raises Cancelled.
    """

    pool: ThreadPool | None = None
    threads: int = 1
    is_stopped: bool = False
    spare: deque[memoryview] = field(default_factory=deque)


class ReadAhead:
    """The bytes of a file for whoever asks for them in their order; others are read when they are asked for.

    What is done with a piece is done piece by piece: headers are looked at, then all of it is hashed, so that neither's code
    and data push the other's out of the processor's caches. A piece that cannot be read is left out: who asks for bytes of it
    reads just those, and so is told which they are.

    Args:
        file: What is read.
        readers: Who read it.

    Attributes:
        done: Offset of the byte up to which digests are known.

    Threads: one at a time asks. Memory: a piece, and with a pool at most two more for each thread and one; the end of the
    `with` block gives it back.
    """

    def __init__(self, file: ShardFile, readers: Readers) -> None:
        self.done = 0
        self._file = file
        self._digests: list[Digest] = []
        self._readers, self._spare = readers, readers.spare
        self._piece_nbytes = _PIECE_NBYTES if readers.pool is None else _AHEAD_NBYTES
        self._step = _HELD_NBYTES if readers.pool is None else self._piece_nbytes
        self._memory = memoryview(b"")
        self._begin = self._end = 0
        self._pieces = in_order(range(0, file.nbytes, self._piece_nbytes), self._load, readers.pool, readers.threads)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.close()
        self._keep()

    def _keep(self) -> None:
        if len(self._memory):
            self._spare.append(self._memory)
            self._memory = memoryview(b"")

    def _load(self, begin: int) -> tuple[int, memoryview, bool]:
        if self._readers.is_stopped:
            raise Cancelled("the rest of the file is not needed any more")
        nbytes = min(self._piece_nbytes, self._file.nbytes - begin)
        memory = self._spare.pop() if self._spare else memoryview(b"")
        if len(memory) < nbytes:
            memory = memoryview(bytearray(min(self._piece_nbytes, self._file.nbytes)))
        try:
            self._file.read_into([memory[:nbytes]], begin)
        except (OSError, FormatError):
            return begin, memory, False
        return begin, memory, True

    def _holds(self, at: int) -> bool:
        """Move on to the piece of the byte at `at`; return whether it is here."""
        while at >= self._end:
            self.hash()
            self._keep()
            begin, self._memory, is_here = next(self._pieces)
            self._end = min(begin + self._piece_nbytes, self._file.nbytes)
            self._begin = begin if is_here else self._end
        return at >= self._begin

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`, of which there are as many.

        Raises:
            OSError: They cannot be read.
            FormatError: The file has fewer than it had.

        Memory: a copy.
        """
        if end > self._end and begin < self._file.nbytes:
            self._holds(begin)
        if self._begin <= begin and end <= self._end:
            return bytes(self._memory[begin - self._begin : end - self._begin])
        return self._file.read(begin, end)

    def digest(self, begin: int, end: int) -> Digest:
        """Return the digest of the bytes `[begin, end)`, of which there are as many; it is known when all of them are done."""
        digest = Digest(begin, end)
        self._digests.append(digest)
        self.done = min(self.done, begin)
        return digest

    def finish(self) -> None:
        """Do what is left to do, for all digests."""
        while self._digests:
            self._holds(max(digest.end for digest in self._digests) - 1)
            self.hash()

    def hash(self) -> None:
        """Do what is left to do for digests, with the bytes up to the end of the piece that is here."""
        first, end, memory, step = self._begin, self._end, self._memory, self._step
        rest: list[Digest] = []
        for digest in self._digests:
            begin, last = digest.begin, min(digest.end, end)
            try:
                while begin < last:
                    stop = min(last, begin + step)
                    if begin >= first:
                        digest.add(memory[begin - first : stop - first])
                    else:
                        digest.add(memoryview(self._file.read(begin, stop)))
                    begin = stop
            except (OSError, FormatError) as exc:
                digest.error = exc
            else:
                if digest.end > end:
                    rest.append(digest)
        self._digests, self.done = rest, end


def in_order(
    jobs: Iterable[_Job], run: Callable[[_Job], _Result], pool: ThreadPool | None, threads: int
) -> Generator[_Result, None, None]:
    """Yield what `run` returns of each job, in their order; at most twice as many as threads are ahead of the caller."""
    waiting: deque[Job[_Result]] = deque()
    try:
        for job in jobs:
            if pool is None:
                yield run(job)
                continue
            waiting.append(pool.submit(run, job))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()
