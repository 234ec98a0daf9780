"""Copies of whole objects in temporary files, for servers that have no ranges."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.retry import Target, check_cancelled
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes
from wds_tensorcache.storage.threads import NO_FORK, call_when_gone

__all__ = ["WholeCopies"]

_MAX_COPIES = 32
_TICK_S = 0.1
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Fetch = Callable[[str, Callable[[memoryview, int], None], int, "ObjectInfo | None"], ObjectInfo]


class _Copy:
    """A temporary file without a name; closed with the last reference."""

    def __init__(self) -> None:
        with NO_FORK:
            self.fd, path = tempfile.mkstemp(prefix="tensorcache-")
            self._net: Any = call_when_gone(self, partial(os.close, self.fd))
        os.unlink(path)
        self.state: ObjectInfo | None = None

    def write(self, piece: memoryview, at: int) -> None:
        if not at:
            os.ftruncate(self.fd, 0)
        while piece:
            count = os.pwrite(self.fd, piece, at)
            piece, at = piece[count:], at + count


class WholeCopies:
    """At most 32 copies of objects; the one that was used longest ago is dropped for another.

    All readers in this process share a copy. It is on the disk of `TMPDIR`, and freed when the process ends, however it ends.

    Args:
        fetch: Passes a whole object, given its url, to a function of bytes and their offset; returns its state.

    Threads/fork/pickle: any thread; a forked child makes its own client and copies; not pickled.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._copies: dict[str, _Copy] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo) -> ObjectInfo:
        """Read from offset `begin` of an object into buffers; fetch the object first if there is no copy of it."""
        copy, state = self._get(url, expected)
        target = Target(url, begin, begin + sum(map(len, buffers)))
        while buffers:
            count = os.preadv(copy.fd, buffers[:MAX_BUFFERS], begin)
            if not count and any(map(len, buffers[:MAX_BUFFERS])):
                raise target.error("the temporary copy of the object was cut short")
            begin += count
            buffers = skip_bytes(buffers, count)
        return ObjectInfo(state.nbytes, state.tag or expected.tag)

    def _get(self, url: str, expected: ObjectInfo) -> tuple[_Copy, ObjectInfo]:
        with self._lock:
            lock = self._locks.setdefault(url, threading.Lock())
        while not lock.acquire(timeout=_TICK_S):  # another thread fetches the object
            check_cancelled()
        try:
            with self._lock:
                copy = self._copies.pop(url, None)
            if copy is not None and (state := copy.state) is not None and _is_same(state, expected, url):
                self._keep(url, copy)
                return copy, state
            copy = self._fetched(url, expected)
            self._keep(url, copy)
            assert copy.state is not None
            return copy, copy.state
        finally:
            lock.release()

    def _fetched(self, url: str, expected: ObjectInfo) -> _Copy:
        while True:
            copy = _Copy()
            try:
                copy.state = self._fetch(url, copy.write, expected.nbytes, expected)
                return copy
            except OSError as exc:
                if exc.errno not in _NO_SPACE:
                    raise
                with self._lock:
                    has_others = bool(self._copies)
                    self._copies.clear()
                if not has_others:
                    what = f"the server has no ranges, and {tempfile.gettempdir()} has no space for the whole object"
                    raise Target(url).error(what + "; set TMPDIR to another disk") from exc

    def _keep(self, url: str, copy: _Copy) -> None:
        with self._lock:
            self._copies[url] = copy  # the last is the latest used
            while len(self._copies) > _MAX_COPIES:
                oldest = next(iter(self._copies))
                del self._copies[oldest]


def _is_same(found: ObjectInfo, expected: ObjectInfo, url: str) -> bool:
    try:
        Target(url).check_same(found, expected)
    except FormatError:
        return False
    return True
