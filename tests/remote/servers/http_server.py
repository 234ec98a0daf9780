"""A web server in its own process, with options and faults that a test scripts, and a log of its requests.

    with HttpServer(latency_s=0.02, rate=100e6) as server:
        server.put("cache/a.tar", content)
        server.script("cache/a.tar", {"status": 503, "retry_after": "1"}, {"drop_after": 40})
        tc.open(server.url + "/cache/a.tar")
        server.log()

Faults, in the order of requests to a path; each applies to one request, or to `times` of them (-1: to all):
    status, retry_after   an answer without the object
    drop_after            close the connection after so many bytes of the answer, head and body; `reset` sends a TCP reset
    drop_body_after       the same, counted from the first byte of the body
    content_range, etag, headers   replace headers of the answer; None removes them
    replace               another content of the object, from this request on
    redirect              address to which the answer redirects, with `status` (302)
    ignores_range         the whole object, with status 200, whatever the request asks for
    drip_s                one byte of the body each so many seconds
    stall_s               wait before the answer; if the client does not, the log has an entry with status -1
    raw                   the whole answer, after which the connection is closed
    range                 only requests with this `Range` header
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import mmap
import os
import socket
import ssl
import struct
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.remote.servers.process import ServerProcess

_PIECE = 64 * 1024
_addresses = (f"127.{1 + n // 200}.{n % 200}.1" for n in itertools.count())  # of this machine
OPTIONS: dict[str, Any] = {
    "ranges": True,  # obey `Range`
    # for the end of an object; or the status that refuses it; or "first": `bytes=-5` gets the first 6 bytes, as of s3rver
    "suffix_ranges": True,
    "etag": "strong",  # or "weak", "length" (a strong one that depends on the length alone), or None
    "last_modified": True,  # send a `Last-Modified` header; a number is the time in it, for all objects
    "latency_s": 0.0,  # time from a request to its answer
    "rate": None,  # bytes per second of all answers together
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a server has received; `nbytes` is how much of the body it sent, `status` the answer's."""

    method: str
    path: str
    headers: dict[str, str]
    status: int
    nbytes: int

    @property
    def range(self) -> str | None:
        """The `Range` header."""
        return self.headers.get("range")


class HttpServer(ServerProcess):
    """A web server on 127.0.0.1 in its own process; see the module's docstring.

    Args:
        folder: Serve its files, too.
        certificate: Speak TLS with the certificate and key in this PEM file. The other methods of this class trust it.
        options: Other values of `OPTIONS`.

    Attributes:
        url: For example `http://127.0.0.1:40000`.
        port: The port, which other names of this machine reach, too, for example `localhost` or `127.0.0.2`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        options |= {"folder": folder, "certificate": certificate}
        super().__init__(["-m", "tests.remote.servers.http_server", json.dumps(options, default=os.fspath)])
        self._first_url = self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        tls = ssl.create_default_context(cafile=certificate) if certificate else None
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )

    @property
    def host(self) -> str:
        """The address in `url`."""
        return self.url.rpartition("/")[2].partition(":")[0]

    def new_address(self) -> str:
        """Return the url by another address of this machine, whose clients know nothing of this server."""
        return self._first_url.replace("127.0.0.1", next(_addresses))

    def reset(self) -> None:
        """Begin anew: without objects, faults and requests, with the options of the constructor, at a new address.

        Requests of earlier clients, to an earlier address of `reset`, are dropped.
        """
        self._call("reset")
        self.url = self.new_address()

    def put(self, name: str, content: bytes) -> str:
        """Make or replace an object; return its url. An object `name?query` is the answer to this query of `name`."""
        self._call("put", content, name=name)
        return f"{self.url}/{quote(name)}"

    def delete(self, name: str) -> None:
        """Remove an object that was put."""
        self._call("delete", name=name)

    def script(self, name: str, *faults: dict[str, Any]) -> None:
        """Replace the faults of the next requests to an object, or to `name?query`."""
        self.script_all({name: faults})

    def script_all(self, faults: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Replace the faults of the next requests to many objects."""
        self._call("script", json.dumps(faults).encode())

    def set(self, **options: Any) -> None:
        """Change options of the constructor."""
        self._call("set", json.dumps(options, default=os.fspath).encode())

    def log(self) -> list[Request]:
        """Return the requests since the last call, in the order of their arrival."""
        return [Request(**one) for one in json.loads(self._call("log"))]

    def _call(self, act: str, body: bytes = b"", name: str = "") -> bytes:
        request = urllib.request.Request(f"{self.url}/{act}?{quote(name)}", body, {"X-Control": "1"}, method="POST")
        with self._opener.open(request, timeout=60) as response:
            return bytes(response.read())


class _Dropped(Exception):
    pass


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


class _Server:
    def __init__(self, options: dict[str, Any]) -> None:
        self._first_options = options
        self._left: set[str] = set()  # addresses
        self.free_at = 0.0  # when the next byte may be sent
        self._reset()

    def _reset(self) -> None:
        self.options = dict(self._first_options)
        self.objects: dict[str, tuple[bytes, float, str]] = {}
        self.faults: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, _Dropped):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        address = writer.get_extra_info("sockname")[0]
        if address in self._left:
            raise _Dropped
        if "x-control" in headers:
            if target == "/reset?" and address != "127.0.0.1":
                self._left.add(address)
            answer = self._control(target, body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
            await writer.drain()
            return True
        seen = target
        if "://" in target:  # a request to a proxy
            target = "/" + target.split("://", 1)[1].partition("/")[2]
        name = unquote(target.partition("?")[0]).lstrip("/")
        entry = {"method": method, "path": seen, "headers": headers, "status": 0, "nbytes": 0}
        self.requests.append(entry)
        whole = unquote(target).lstrip("/")
        fault = self._fault(headers, whole) or self._fault(headers, name)
        if "stall_s" in fault:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1), fault["stall_s"])
                if address not in self._left:
                    self.requests.append({**entry, "status": -1})
                raise _Dropped
        await self._answer(method, whole if whole in self.objects else name, headers, fault, writer, entry)
        return headers.get("connection", "").lower() != "close"

    def _control(self, target: str, body: bytes) -> bytes:
        act, _, name = target.lstrip("/").partition("?")
        name = unquote(name)
        if act == "put":
            self.objects[name] = body, time.time(), _tag(body)
        elif act == "delete":
            del self.objects[name]
        elif act == "script":
            self.faults.update(json.loads(body))
        elif act == "set":
            self.options.update(json.loads(body))
        elif act == "reset":
            self._reset()
        else:
            done, self.requests = self.requests, []
            return json.dumps(done).encode()
        return b""

    def _fault(self, headers: dict[str, str], name: str) -> dict[str, Any]:
        for at, fault in enumerate(self.faults.get(name, ())):
            if fault.get("range") in (None, headers.get("range")):
                fault["times"] = fault.get("times", 1) - 1
                if not fault["times"]:
                    del self.faults[name][at]
                return fault
        return {}

    def _find(self, name: str) -> tuple[bytes | mmap.mmap, float, str] | None:
        """Return content, time and tag of an object."""
        folder = self.options["folder"]
        if name in self.objects or folder is None:
            return self.objects.get(name)
        path = Path(folder, name)
        if not path.is_file() or Path(folder).resolve() not in path.resolve().parents:
            return None
        status = path.stat()
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
        return content, status.st_mtime, _tag(f"{status.st_size} {status.st_mtime_ns}".encode())

    async def _answer(
        self,
        method: str,
        name: str,
        headers: dict[str, str],
        fault: dict[str, Any],
        writer: asyncio.StreamWriter,
        entry: dict[str, Any],
    ) -> None:
        options = self.options
        await asyncio.sleep(options["latency_s"])
        if "raw" in fault:
            writer.write(fault["raw"].encode("latin-1"))
            await writer.drain()
            raise _Dropped
        if "replace" in fault:
            body = fault["replace"].encode("latin-1")
            self.objects[name] = body, time.time() + 1, _tag(body)
        sent: dict[str, str | None] = {}
        begin, end, status = 0, 0, 200
        found = self._find(name)
        content: bytes | mmap.mmap = b""
        if "redirect" in fault:
            status, sent["Location"] = fault.get("status", 302), fault["redirect"]
        elif "status" in fault:
            status, content = fault["status"], b"an error"
            end = len(content)
            if "retry_after" in fault:
                sent["Retry-After"] = fault["retry_after"]
        elif found is None:
            status = 404
        elif method not in ("GET", "HEAD", "POST"):
            status = 405
        else:
            content, when, tag = found
            length = len(content)
            if options["etag"] == "length":
                tag = f'"{length}"'
            if options["ranges"]:
                sent["Accept-Ranges"] = "bytes"
            if options["etag"]:
                sent["ETag"] = f"W/{tag}" if options["etag"] == "weak" else tag
            if options["last_modified"]:
                fixed = options["last_modified"]
                sent["Last-Modified"] = formatdate(when if fixed is True else fixed, usegmt=True)
            strong = tag if options["etag"] in ("strong", "length") else None
            date = sent.get("Last-Modified")
            is_another = "if-match" in headers and headers["if-match"] != strong
            if is_another or (date and headers.get("if-unmodified-since", date) != date):
                status, content = 412, b""
            else:
                status, begin, end = self._range(
                    None if fault.get("ignores_range") else headers.get("range"), length, sent
                )
        sent["Content-Length"] = str(end - begin)
        if "content_range" in fault:
            sent["Content-Range"] = fault["content_range"]
        if "etag" in fault:
            sent["ETag"] = fault["etag"]
        sent.update(fault.get("headers", {}))
        entry["status"] = status
        lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in sent.items() if value is not None)]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
        limit = fault.get("drop_after", sys.maxsize)
        if "drop_body_after" in fault:
            limit = len(head) + fault["drop_body_after"]
        writer.write(head[:limit])
        limit -= len(head)
        if limit > 0 and method != "HEAD":
            await self._send(writer, content, begin, min(end, begin + limit), fault.get("drip_s"), entry)
        if limit < end - begin or (method == "HEAD" and limit <= 0) or "drop_after" in fault:
            await writer.drain()
            if fault.get("reset"):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise _Dropped
        await writer.drain()

    def _range(self, asked: str | None, length: int, sent: dict[str, str | None]) -> tuple[int, int, int]:
        """Return status, begin and end of the answer."""
        if asked is None or not self.options["ranges"] or not asked.startswith("bytes="):
            return 200, 0, length
        first, _, last = asked[6:].partition("-")
        if not first:
            if self.options["suffix_ranges"] not in (True, "first"):
                return int(self.options["suffix_ranges"]), 0, 0
            begin, end = max(0, length - int(last)), length
            if self.options["suffix_ranges"] == "first":
                begin, end = 0, min(int(last) + 1, length)
        else:
            begin, end = int(first), min(int(last) + 1, length) if last else length
        if begin >= end:
            sent["Content-Range"] = f"bytes */{length}"
            return 416, 0, 0
        sent["Content-Range"] = f"bytes {begin}-{end - 1}/{length}"
        return 206, begin, end

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        content: bytes | mmap.mmap,
        begin: int,
        end: int,
        drip_s: float | None,
        entry: dict[str, Any],
    ) -> None:
        while begin < end:
            nbytes = min(end - begin, 1 if drip_s is not None else _PIECE)
            await self._wait(nbytes)
            writer.write(content[begin : begin + nbytes])
            begin += nbytes
            entry["nbytes"] += nbytes
            if drip_s is not None:
                await asyncio.sleep(drip_s)
            if begin < end:
                await writer.drain()

    async def _wait(self, nbytes: int) -> None:
        """Wait until so many more bytes keep to the rate."""
        if self.options["rate"] is None:
            return
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + nbytes / self.options["rate"]
        if self.free_at - now > 0.002:  # a shorter sleep takes longer than asked for
            await asyncio.sleep(self.free_at - now)


async def _main() -> None:
    server, tls = _Server(OPTIONS | json.loads(sys.argv[1])), None
    if server.options["certificate"]:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(server.options["certificate"])
    listener = await asyncio.start_server(server.serve, "0.0.0.0", 0, limit=1 << 20, backlog=512, ssl=tls)
    print(listener.sockets[0].getsockname()[1], flush=True)
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await parent.read()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main())
