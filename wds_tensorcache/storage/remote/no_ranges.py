"""Whole objects in temporary files, for servers without ranges."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence

from wds_tensorcache.storage.remote.http_transport import Response
from wds_tensorcache.storage.remote.object_info import ObjectInfo
from wds_tensorcache.storage.remote.retry import TICK_S, Request, TransientError, check_cancelled
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes

_MAX_COPIES = 32
_PIECE = 256 * 1024


class Copy:
    """A copy of an object in a temporary file without a name, in the folder `TMPDIR`."""

    state: ObjectInfo

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tensorcache-", buffering=0)  # noqa: SIM115, closed below

    def __del__(self) -> None:
        self._file.close()

    def fill(self, response: Response, request: Request, state: ObjectInfo | None, tag: str | None) -> None:
        """Copy the body of a response; `state` is None if the object's length is unknown."""
        piece, nbytes = memoryview(bytearray(_PIECE)), 0
        while count := response.read_into(piece):
            nbytes += count
            self._write(piece[:count], request)
            request.extend(nbytes)
        if state is not None and nbytes != state.nbytes:
            raise TransientError(f"the connection ended after {nbytes} of {state.nbytes} bytes")
        self.state = state or request.check(ObjectInfo(nbytes, tag))

    def _write(self, piece: memoryview, request: Request) -> None:
        try:
            while piece:
                piece = piece[self._file.write(piece) :]
        except OSError as exc:
            problem = f"the server has no ranges, and {tempfile.gettempdir()} cannot hold the object ({exc.strerror})"
            raise request.error(problem + "; set TMPDIR to another disk") from exc

    def read_into(self, request: Request, buffers: Sequence[memoryview], begin: int) -> None:
        """Read from offset `begin` of the object into buffers."""
        while any(map(len, buffers)):
            count = os.preadv(self._file.fileno(), buffers[:MAX_BUFFERS], begin)
            if not count:
                raise request.error("the temporary copy of the object was cut short")
            begin += count
            buffers = skip_bytes(buffers, count)

    def read(self, request: Request, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`."""
        content = bytearray(end - begin)
        self.read_into(request, [memoryview(content)], begin)
        return bytes(content)


class Copies:
    """At most 32 copies of objects; a further copy replaces the least recently used copy. Any thread may call."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def get(self, url: str, state: ObjectInfo | None) -> Copy | None:
        """Return the copy of an object; None if no copy has this state."""
        with self._lock:
            copy = self._copies.get(url)
            if copy is None or state is None or copy.state.nbytes != state.nbytes:
                return None
            if copy.state.tag != state.tag and None not in (copy.state.tag, state.tag):
                return None
            self._copies[url] = self._copies.pop(url)  # the most recently used copy is the last
            return copy

    def keep(self, response: Response, request: Request, state: ObjectInfo | None, tag: str | None) -> Copy:
        """Return a copy of the body of a response, or the copy that another thread has made of this object."""
        with self._lock:
            turn = self._turns.setdefault(request.url, threading.Lock())
        while not turn.acquire(timeout=TICK_S):
            check_cancelled()
        try:
            copy = self.get(request.url, state)
            if copy is None:
                copy = Copy()
                copy.fill(response, request, state, tag)
            with self._lock:
                self._copies[request.url] = copy
                while len(self._copies) > _MAX_COPIES:
                    del self._copies[next(iter(self._copies))]
        finally:
            turn.release()
        return copy
