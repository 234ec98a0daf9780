"""A remote object read in order, with several requests in flight."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.remote.fetch import start_read, stat, wait_for
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.remote.retry import Cancel
from wds_tensorcache.storage.urls import conceal

_MIN_NBYTES, _MAX_NBYTES = 1 << 18, 1 << 22  # of a request; each request is twice as long as the last
_NUM_REQUESTS = 4
_MEMORY = Pool(1 << 25)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes `[begin, end)`, and the future of the read into `memory`."""

    begin: int
    end: int
    memory: memoryview
    future: Future[None]
    cancel: Cancel

    def drop(self) -> None:
        if not self.future.cancel() and not self.future.done():
            self.cancel.set()


class RemoteStream:
    """The bytes of a remote object, read in order by one caller. Requests for the next bytes are in flight.

    Every response must report the state that the object had when the stream was opened. A failed read fails again
    if it is repeated.

    Args:
        url: Url of the object. Opening the stream takes one request.

    Attributes:
        url: The url, concealed.
        info: State of the object when the stream was opened.

    Raises:
        FileNotFoundError: The object does not exist.
        RemoteError: A request failed.

    Memory: up to 20 MiB, for four requests of at most 4 MiB and the current piece. The next stream recycles this memory.
    Threads/fork/pickle: one reader, in the process that opened the stream. Call `close`.
    """

    def __init__(self, url: str) -> None:
        self.url = conceal(url)
        self.info = stat(self.url)
        self._file = RemoteFile(self.url)
        self._file.fix(self.info)
        self._at = 0  # the reader's offset
        self._requested = 0  # the end of the last request
        self._next_nbytes = _MIN_NBYTES
        self._pieces: deque[_Piece] = deque()  # in the order of their bytes, without gaps

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next `nbytes` bytes, or all remaining bytes if negative. Memory: a copy.

        Only at the end of the object are there fewer bytes.

        Raises:
            FormatError: The object has changed since the stream was opened.
            RemoteError: A request failed.
        """
        remaining = self.info.nbytes - self._at
        end = self._at + (remaining if nbytes < 0 else min(nbytes, remaining))
        parts: list[bytes] = []
        while self._at < end:
            piece = self._piece()
            last = min(end, piece.end)
            parts.append(bytes(piece.memory[self._at - piece.begin : last - piece.begin]))
            self._at = last
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, nbytes: int) -> int:
        """Skip up to `nbytes` bytes, and return their number. Skipped bytes are not requested later."""
        nbytes = min(nbytes, self.info.nbytes - self._at)
        self._at += nbytes
        self._drop_passed()
        if not self._pieces:
            self._requested = self._at
        return nbytes

    def close(self) -> None:
        """End the requests in flight."""
        for piece in self._pieces:
            piece.drop()

    def _piece(self) -> _Piece:
        self._drop_passed()
        while len(self._pieces) <= _NUM_REQUESTS and self._requested < self.info.nbytes:
            begin = self._requested
            self._requested = end = min(begin + self._next_nbytes, self.info.nbytes)
            self._next_nbytes = min(2 * self._next_nbytes, _MAX_NBYTES)
            memory = _MEMORY.lease(end - begin).data
            self._pieces.append(_Piece(begin, end, memory, *start_read(self._file, begin, memory)))
        wait_for([self._pieces[0].future])
        self._pieces[0].future.result()
        return self._pieces[0]

    def _drop_passed(self) -> None:
        while self._pieces and self._pieces[0].end <= self._at:
            self._pieces.popleft().drop()
