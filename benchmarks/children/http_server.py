"""A web server with latency and a limited rate, in its own process: the remote side of the scenario `remote`.

It serves the files of a folder to GET and HEAD, with ranges and strong ETags. That is also what clients of S3 need for reading
(`/BUCKET/KEY`; signatures are ignored). Its answers share one rate, as on a network card. Each answer begins after the latency.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import unquote

LATENCY_S = 0.02
RATE = 100e6  # bytes per second of all answers together
_ROOT = Path(__file__).parent.parent.parent
_PIECE_NBYTES = 128 << 10
_SMALL_NBYTES = 64 << 10  # sent with their head
_LATE_S = 0.01  # what a sleep may be too long without loss of rate
_SENT = "/sent"  # a request for it returns the number of bytes sent since the last one


class Server:
    """The server in its own process, until the block ends.

    Attributes:
        url: For example `http://127.0.0.1:40000`.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.children.http_server", str(folder)],
            stdin=subprocess.PIPE,  # the child ends when it is closed, also if this process is killed
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )
        assert self._process.stdout
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def sent(self) -> int:
        """Return the number of bytes of bodies sent since the last call."""
        with self._opener.open(self.url + _SENT, timeout=60) as response:
            return int(response.read())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Serving:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.free_at = 0.0  # when the next byte may be sent
        self.sent = 0
        self.files: dict[str, tuple[BinaryIO, int, str]] = {}

    async def connection(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        received = b""
        with sock:
            try:
                while True:
                    head, end, rest = received.partition(b"\r\n\r\n")
                    if end:
                        received = rest
                        await self._answer(sock, head.decode("latin-1"))
                    elif more := await loop.sock_recv(sock, 1 << 16):
                        received += more
                    else:
                        return
            except (ConnectionError, TimeoutError):
                return

    async def _answer(self, sock: socket.socket, head: str) -> None:
        loop = asyncio.get_running_loop()
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if target == _SENT:
            body, self.sent = b"%d" % self.sent, 0
            await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            return
        await asyncio.sleep(LATENCY_S)
        served = self.files.get(target) or self._open(target)
        if served is None:
            await loop.sock_sendall(sock, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        file, size, common = served
        begin, end, code, place = 0, size, "200 OK", ""
        asked = headers.get("range", "").removeprefix("bytes=")
        if asked:
            left, _, right = asked.partition("-")
            begin = int(left) if left else max(0, size - int(right))
            end = min(int(right) + 1, size) if left and right else size
            code, place = "206 Partial Content", f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        head = f"HTTP/1.1 {code}\r\nContent-Length: {end - begin}\r\n{place}{common}\r\n".encode("latin-1")
        if method == "GET" and end - begin <= _SMALL_NBYTES:
            await self._wait(end - begin)
            await loop.sock_sendall(sock, head + os.pread(file.fileno(), end - begin, begin))
            return
        await loop.sock_sendall(sock, head)
        while method == "GET" and begin < end:
            nbytes = min(_PIECE_NBYTES, end - begin)
            await self._wait(nbytes)
            # from the page cache to the socket, without a copy in this process
            await loop.sock_sendfile(sock, file, begin, nbytes)
            begin += nbytes

    def _open(self, target: str) -> tuple[BinaryIO, int, str] | None:
        """Return a file, its length, and the headers that all its answers have; None if it does not exist."""
        path = (self.folder / unquote(target.partition("?")[0]).lstrip("/")).resolve()
        if not path.is_file() or self.folder not in path.parents:
            return None
        status = path.stat()
        sent = {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
            "Last-Modified": formatdate(status.st_mtime, usegmt=True),
        }
        found = (
            path.open("rb", buffering=0),
            status.st_size,
            "".join(f"{name}: {text}\r\n" for name, text in sent.items()),
        )
        self.files[target] = found
        return found

    async def _wait(self, nbytes: int) -> None:
        """Wait until so many more bytes keep to the rate."""
        now = time.monotonic()
        self.free_at = max(self.free_at, now - _LATE_S) + nbytes / RATE
        self.sent += nbytes
        if self.free_at > now:
            await asyncio.sleep(self.free_at - now)


async def _serve(folder: Path) -> None:
    serving, loop = _Serving(folder), asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(0))
    tasks = set()
    while True:
        sock, _ = await loop.sock_accept(listener)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(serving.connection(sock))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
