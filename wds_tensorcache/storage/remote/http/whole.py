"""Copies of whole objects in temporary files, for servers that have no ranges."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.http.transport import Response
from wds_tensorcache.storage.remote.retry import Attempts, Target, check_cancelled
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes

_MAX_COPIES = 32
_TICK_S = 0.1
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Opened: TypeAlias = "tuple[Response, Attempts]"
Fetch = Callable[[str, Callable[[memoryview, int], None], int, "ObjectInfo | None", "Opened | None"], ObjectInfo]


class _Copy:
    """A temporary file without a name; closed with the last reference."""

    def __init__(self) -> None:
        self.fd, path = tempfile.mkstemp(prefix="tensorcache-")
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.unlink(path)
        self.state: ObjectInfo | None = None

    def write(self, piece: memoryview, at: int) -> None:
        if not at:
            os.ftruncate(self.fd, 0)
        while piece:
            count = os.pwrite(self.fd, piece, at)
            piece, at = piece[count:], at + count


class WholeCopies:
    """At most 32 copies of objects; beyond that, the least recently used copy is dropped.

    All readers in this process share a copy. It is on the disk of `TMPDIR`, and freed when the process ends, however it ends.

    Args:
        fetch: Passes a whole object, given its url, to a function of bytes and their offset; returns its state. It
            begins with the body of an open response if there is one.

    Threads/fork/pickle: any thread; a forked child makes its own client and copies; not pickled.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._copies: dict[str, _Copy] = {}
        self._turns: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()

    def __contains__(self, url: str) -> bool:
        return url in self._copies

    @contextmanager
    def turn(self, url: str) -> Iterator[None]:
        """Let one thread at a time ask for an object. The same thread may enter again."""
        with self._lock:
            turn = self._turns.setdefault(url, threading.RLock())
        while not turn.acquire(timeout=_TICK_S):  # another thread fetches the object
            check_cancelled()
        try:
            yield
        finally:
            turn.release()

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo) -> ObjectInfo | None:
        """Read from offset `begin` of an object into buffers; return None if there is no copy of it in this state."""
        with self._lock:
            copy = self._copies.get(url)
            if copy is None or copy.state is None or not _is_same(copy.state, expected, url):
                return None
            self._copies[url] = self._copies.pop(url)  # the last is the latest used
        target = Target(url, begin, begin + sum(map(len, buffers)))
        while buffers:
            count = os.preadv(copy.fd, buffers[:MAX_BUFFERS], begin)
            if not count and any(map(len, buffers[:MAX_BUFFERS])):
                raise target.error("the temporary copy of the object was cut short")
            begin += count
            buffers = skip_bytes(buffers, count)
        return ObjectInfo(copy.state.nbytes, copy.state.tag or expected.tag)

    def fetch(self, url: str, expected: ObjectInfo, opened: Opened) -> None:
        """Make a copy of an object from an open response to a GET request, unless another thread has made one."""
        with self.turn(url):
            if self.read_into(url, [], 0, expected) is None:
                self._keep(url, self._fetch_copy(url, expected, opened))

    def _fetch_copy(self, url: str, expected: ObjectInfo, opened: Opened | None) -> _Copy:
        while True:
            copy = _Copy()
            try:
                copy.state = self._fetch(url, copy.write, expected.nbytes, expected, opened)
                return copy
            except OSError as exc:
                if exc.errno not in _NO_SPACE:
                    raise
                with self._lock:
                    has_others = bool(self._copies)
                    self._copies.clear()
                if not has_others:
                    problem = f"the server has no ranges, and {tempfile.gettempdir()} has no space for the whole object"
                    raise Target(url).error(problem + "; set TMPDIR to another disk") from exc
                opened = None

    def _keep(self, url: str, copy: _Copy) -> None:
        with self._lock:
            self._copies[url] = copy
            while len(self._copies) > _MAX_COPIES:
                oldest = next(iter(self._copies))
                del self._copies[oldest]


def _is_same(state: ObjectInfo, expected: ObjectInfo, url: str) -> bool:
    try:
        Target(url).check_same(state, expected)
    except FormatError:
        return False
    return True
