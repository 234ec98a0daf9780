"""Reads of object stores in a forked process, through another process that runs obstore."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import Target, check_cancelled
from wds_tensorcache.storage.threads import per_process

_TICK_S = 0.25
_END_S = 5.0


class _Ended(Exception):
    """The process that runs obstore has ended."""


class _Process:
    """The process that runs obstore, and the idle connections to it."""

    def __init__(self) -> None:
        self._control, child_end = socket.socketpair()
        self._idle: list[socket.socket] = []
        command = [sys.executable, "-m", "wds_tensorcache.storage.remote.forked.process", str(child_end.fileno())]
        self.pid = os.getpid()  # of the process that started it
        with child_end:
            self._popen = subprocess.Popen(
                command,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
        atexit.register(self._end)

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Return a connection, which is used again unless an error ends the block."""
        try:
            own_end = self._idle.pop()
        except IndexError:
            own_end, child_end = socket.socketpair()
            with child_end:
                try:
                    socket.send_fds(self._control, [b"."], [child_end.fileno()])
                except OSError:
                    own_end.close()
                    raise _Ended from None
            own_end.settimeout(_TICK_S)
        try:
            yield own_end
        except BaseException:
            own_end.close()
            raise
        self._idle.append(own_end)

    def close(self) -> None:
        """Close this process's ends of the connections, after which the other process ends."""
        self._control.close()
        for connection in self._idle:
            connection.close()

    def _end(self) -> None:
        if self.pid != os.getpid():
            return
        self.close()
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


_process: _Process | None = None
_lock = per_process(threading.Lock)


def _running(target: Target) -> _Process:
    global _process
    if not os.path.basename(sys.executable or "").startswith(("python", "pypy")):
        problem = "obstore does not work in a process that was forked after its first use, and Python is embedded here"
        raise target.error(f"{problem}; start worker processes by 'forkserver' or 'spawn'")
    with _lock():
        if _process is not None and _process.pid != os.getpid():
            _process.close()  # the parent's
            _process = None
        if _process is None:
            _process = _Process()
        return _process


def _forget(process: _Process) -> None:
    global _process
    with _lock():
        if _process is process:
            _process = None


class ForkedClient:
    """Reads objects of one bucket or container; see `Client`. It starts the other process when it is first needed.

    Threads/fork/pickle: as `Client`.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.pace = Pace()

    def __repr__(self) -> str:
        return f"ForkedClient({self.origin!r})"

    def stat(self, url: str, /) -> ObjectInfo:
        return self._call("stat", url)[0]

    def read_tail(self, url: str, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        return self._call("tail", url, end=nbytes)

    def read_whole(self, url: str, max_nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        return self._call("whole", url, end=max_nbytes)

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, /) -> ObjectInfo:
        end = begin + sum(map(len, buffers))
        return self._call("read", url, begin, end, expected, buffers)[0]

    def list_objects(self, folder: str, /) -> Iterator[tuple[str, ObjectInfo]]:
        for name, nbytes, tag in self._ask("list", folder, 0, 0, ObjectInfo(0, None), None)[0]["objects"]:
            yield name, ObjectInfo(nbytes, tag)

    def _call(
        self,
        act: str,
        url: str,
        begin: int = 0,
        end: int = 0,
        expected: ObjectInfo = ObjectInfo(0, None),  # noqa: B008, it is frozen
        buffers: Sequence[memoryview] | None = None,
    ) -> tuple[ObjectInfo, bytes]:
        head, content = self._ask(act, url, begin, end, expected, buffers)
        return ObjectInfo(*head["state"]), content

    def _ask(
        self, act: str, url: str, begin: int, end: int, expected: ObjectInfo, buffers: Sequence[memoryview] | None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the head of the response to a request, and the bytes unless they went into buffers."""
        target = Target(url, begin, end) if act == "read" else Target(url)
        state = expected.nbytes, expected.tag
        line = json.dumps({"act": act, "url": url, "begin": begin, "end": end, "expected": state}).encode() + b"\n"
        for _ in range(2):  # the other process may have been killed
            process = _running(target)
            begun = time.monotonic()
            try:
                with process.connection() as connection:
                    try:
                        connection.sendall(line)
                    except OSError:
                        raise _Ended from None
                    head = json.loads(_read_line(connection))
                    clock = self.pace.begin(time.monotonic() - begun)
                    memory = b""
                    if buffers is None or "error" in head:
                        content = bytearray(head["nbytes"])
                        _fill(connection, memoryview(content))
                        memory = bytes(content)
                    else:
                        for buffer in buffers:
                            _fill(connection, buffer)
                    clock.end(head["nbytes"])
            except _Ended:
                _forget(process)
                continue
            if "error" in head:
                raise _error(head, target)
            return head, memory
        raise target.error("the process that runs obstore for this forked one has ended twice")


def _error(head: dict[str, Any], target: Target) -> Exception:
    if head["error"] == "missing":
        return target.missing()
    if head["error"] == "format":
        error = FormatError(head["text"])
        return error if head["where"] is None else error.at(head["where"])
    remote = target.error(head["text"], head.get("status"))
    if head["error"] == "remote":
        remote.args = (head["text"],)  # which already says url and range
        remote.url, remote.begin, remote.end = head["url"], head["begin"], head["end"]
    return remote


def _some(connection: socket.socket, buffer: memoryview) -> int:
    """Read the bytes that have arrived into a buffer; return their number."""
    while True:
        check_cancelled()
        try:
            count = connection.recv_into(buffer)
        except TimeoutError:
            continue
        except OSError:
            count = 0
        if not count:
            raise _Ended
        return count


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        buffer = buffer[_some(connection, buffer) :]


def _read_line(connection: socket.socket) -> bytes:
    """Return the head of a response: all up to the first line end, and no byte more."""
    line = bytearray()
    piece = memoryview(bytearray(4096))
    while True:
        # Look before reading, since the bytes after the line belong into the caller's buffers.
        check_cancelled()
        try:
            seen = connection.recv(len(piece), socket.MSG_PEEK)
        except TimeoutError:
            continue
        except OSError:
            seen = b""
        if not seen:
            raise _Ended
        end = seen.find(b"\n") + 1
        _fill(connection, piece[: end or len(seen)])
        line += seen[: end or len(seen)]
        if end:
            return bytes(line)
