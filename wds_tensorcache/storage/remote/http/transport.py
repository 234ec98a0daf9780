"""HTTP requests: pooled connections, proxies, credentials and redirects; responses whose bodies go straight into memory."""

from __future__ import annotations

import base64
import io
import netrc
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from wds_tensorcache.storage.remote.client import MAX_REQUESTS
from wds_tensorcache.storage.remote.retry import (
    TRANSIENT_STATUSES,
    Attempts,
    TransientError,
    check_cancelled,
    parse_retry_after,
)
from wds_tensorcache.storage.urls import origin_of, shown, web_url

try:
    import urllib3
    from urllib3 import connection, connectionpool
    from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, ProxyError, SSLError
except ImportError as missing:
    raise ImportError("reading https:// needs urllib3: pip install 'wds-tensorcache[remote]'") from missing

_CONNECT_S, _STALL_S = 10.0, 20.0  # longest waits for a connection, and for the head or the next bytes of a body
_TICK_S = 0.25  # how often a wait looks whether the request was cancelled
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FEW_BYTES, _DRAIN_S = 64 * 1024, 0.5  # the most bytes and seconds of a body that is dropped to keep its connection
_DROPPED = memoryview(bytearray(_FEW_BYTES))  # read into, never read


class _Source(io.RawIOBase):
    """A socket whose reads end at a deadline, however slowly bytes arrive, and when the request is cancelled."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)  # holds the socket open
        self.deadline = time.monotonic() + (sock.gettimeout() or _STALL_S)
        self.has_ended = False

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the file from which `http.client` reads; all that it asks of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stalled_at = time.monotonic() + _STALL_S
        while True:
            check_cancelled()
            left = min(self.deadline, stalled_at) - time.monotonic()
            if left <= 0:
                raise TimeoutError("no more bytes in time")
            self._sock.settimeout(min(left, _TICK_S))
            try:
                count = self._sock.recv_into(buffer)
            except TimeoutError:
                continue
            self.has_ended = not count
            return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Raw(HTTPResponse):
    """A response that reads through a `_Source`, and fills a caller's buffer with the bytes that have arrived."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        self.source = _Source(sock)
        super().__init__(self.source, *args, **options)  # type: ignore[arg-type]

    def begin(self) -> None:
        """Read the head, after any interim ones, such as `103 Early Hints`.

        `http.client` skips only `100 Continue`. It takes another interim head for the response, and gives the
        connection back, whose next request would then get the response to this one: perhaps bytes of another object.

        `http.client` accepts a head that a dropped connection has cut short, and urllib3 then writes the whole url,
        which may have a signature, to the log.
        """
        super().begin()
        while 100 <= self.status < 200:
            if self.status == 101:
                raise HTTPException("the server has switched to another protocol")
            self.headers: Any = None  # otherwise `begin` has nothing to do
            super().begin()
        if self.source.has_ended:
            raise ConnectionResetError("the head was cut short")
        if self.headers.defects:
            raise HTTPException("the head is damaged")

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that have arrived, at least one unless the body has ended, by one system call."""
        if self.fp is None or not len(buffer):
            return 0
        if self.chunked:
            content = self.read1(len(buffer))
            buffer[: len(content)] = content
            return len(content)
        if self.length is not None:
            buffer = memoryview(buffer)[: self.length]
        count = self.fp.readinto1(buffer)
        if self.length is not None:
            self.length -= count
        if not count or self.length == 0:  # None: the body ends with the connection
            self.close()
        return count


class _HTTPConnection(connection.HTTPConnection):
    response_class = _Raw


class _HTTPSConnection(connection.HTTPSConnection):
    response_class = _Raw


class _HTTPPool(connectionpool.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(connectionpool.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


class Response:
    """A response whose head has arrived.

    Attributes:
        status: HTTP status.
        headers: Headers, by names in any case.
        head_s: Time from the request to the head, in seconds.
        is_chunked: True if the body itself marks its end.

    Threads: one. Use it in a `with` block, which gives the connection back or closes it.
    """

    def __init__(self, response: Any, attempts: Attempts, head_s: float) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.head_s = head_s
        self._response = response
        self._raw: _Raw = response._fp
        self._attempts = attempts
        self.is_chunked = bool(self._raw.chunked)

    @property
    def length(self) -> int | None:
        """The number of bytes of the body that have not been read; None if the server sent no length."""
        return self._raw.length if self._raw.fp is not None else 0

    def read_some(self, buffer: memoryview) -> int:
        """Read the bytes that have arrived into a buffer; return their number, 0 at the end of the body.

        Raises:
            TransientError: The connection ended or stalled, also before the announced end.
        """
        self._raw.source.deadline = self._attempts.deadline
        expects_more = self.length != 0
        failed: Exception | None = None
        count = 0
        try:
            count = self._raw.readinto(buffer)
        except (OSError, HTTPException, ValueError) as exc:
            failed = exc
        except BaseException:
            self.abort()
            raise
        if failed is not None:
            self.abort()
            raise TransientError(_fault(failed))
        if not count and expects_more and self._raw.length:
            self.abort()
            raise TransientError(f"the connection ended {self._raw.length} bytes before the end of the body")
        return count

    def __enter__(self) -> Response:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close; after an error, do not wait for the rest of the body."""
        if kind is None:
            self.close()
        else:
            self.abort()

    def close(self) -> None:
        """Give the connection back if the body has few more bytes; else close it."""
        length = self.length
        try:
            if length is not None and length <= _FEW_BYTES:
                # the server may never send what it has announced
                self._attempts = Attempts(self._attempts.target)
                self._attempts.deadline = time.monotonic() + _DRAIN_S
                while self.length and self.read_some(_DROPPED):
                    pass
        except TransientError:
            return
        if self.length == 0:
            self._raw.close()
            self._response.release_conn()
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection."""
        self._raw.close()
        if self._response.connection is not None:
            self._response.connection.close()
        self._response.release_conn()


class _Route(NamedTuple):
    manager: urllib3.PoolManager
    pool: connectionpool.HTTPConnectionPool | None


# urllib3 neither follows redirects nor repeats, reads or decodes
_PLAIN: Any = {"redirect": False, "retries": False, "preload_content": False, "decode_content": False}


class Transport:
    """The transport of one client's requests: pools of connections, the environment's proxies, and credentials.

    Args:
        origin: The client's server.
        credentials: User name and password; None for those of the netrc file.

    Threads/fork/pickle: any thread may call; a forked child makes its own; not pickled.
    """

    def __init__(self, origin: str, credentials: tuple[str, str] | None) -> None:
        self._origin = origin
        self._managers: dict[str | None, urllib3.PoolManager] = {}  # by proxy
        # The environment and the netrc file are read once: for each request, that takes as long as the rest.
        self._routes: dict[str, _Route] = {}  # by origin
        self._authorization = _from_netrc(origin) if credentials is None else _basic(*credentials)

    def request(self, method: str, url: str, headers: Mapping[str, str], attempts: Attempts) -> Response:
        """Send a request, follow redirects, and return the response once its head has arrived. Not repeated here.

        Credentials go to the client's own server alone, never to one to which it redirects.

        Args:
            url: As `web_url` returns it.

        Returns:
            A response with any status except a redirect's and those that `TransientError` reports.

        Raises:
            TransientError: There was no connection, no whole head in time, or a status that may pass.
            RemoteError: The fault does not pass: a certificate, a redirect that is refused, a head that is not HTTP.
        """
        seen = {url}
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {"Accept-Encoding": "identity", "User-Agent": "wds-tensorcache", **headers}
            if self._authorization is not None and origin_of(url) == self._origin:
                sent["Authorization"] = self._authorization
            response = self._send(method, url, sent, attempts)
            if response.status not in _REDIRECTS:
                if response.status in TRANSIENT_STATUSES:
                    pause = parse_retry_after(response.headers.get("Retry-After"))
                    response.close()
                    raise TransientError(f"the server responds with status {response.status}", response.status, pause)
                return response
            response.close()
            url = _next(url, response.headers.get("Location"), attempts, response.status)
            if url in seen:
                raise attempts.target.error(f"redirects in a circle, again to {shown(url)}", response.status)
            seen.add(url)
        raise attempts.target.error(f"more than {_MAX_REDIRECTS} redirects, the last to {shown(url)}", response.status)

    def _route(self, origin: str) -> _Route:
        """Return the connections for a server: direct ones, or those of the proxy that the environment names."""
        route = self._routes.get(origin)
        if route is None:
            scheme, _, netloc = origin.partition("://")
            proxy = urllib.request.getproxies().get(scheme)
            if proxy is not None and urllib.request.proxy_bypass(netloc):
                proxy = None
            manager = self._managers.setdefault(proxy, _make_manager(proxy))
            # a pool takes less time than its manager, but only the manager knows what a proxy needs
            route = _Route(manager, None if proxy is not None else manager.connection_from_url(origin))
            self._routes[origin] = route
        return route

    def _send(self, method: str, url: str, headers: dict[str, str], attempts: Attempts) -> Response:
        check_cancelled()
        left = attempts.remaining_s()
        if left <= 0:
            raise TransientError("no time is left")
        begun = time.monotonic()
        failed: Exception
        try:
            origin = origin_of(url)
            route = self._route(origin)
            timeout = urllib3.Timeout(connect=min(_CONNECT_S, left), read=min(_STALL_S, left))
            if route.pool is None:
                response = route.manager.urlopen(method, url, headers=headers, timeout=timeout, **_PLAIN)
            else:
                response = route.pool.urlopen(method, url[len(origin) :], headers=headers, timeout=timeout, **_PLAIN)
            return Response(response, attempts, time.monotonic() - begun)
        except (HTTPError, HTTPException, OSError, ValueError) as exc:
            failed = exc
        # Raised here, so that no traceback shows the caught error: its text may contain a signed url, or a proxy's password.
        if isinstance(failed, SSLError) and isinstance(failed.args[0], ssl.SSLCertVerificationError):
            raise attempts.target.error(
                "the server's certificate is not trusted; set SSL_CERT_FILE to the file of the authority that signed it"
            )
        if _is_final(failed):
            raise attempts.target.error(_fault(failed))
        raise TransientError(_fault(failed))


def _make_manager(proxy: str | None) -> urllib3.PoolManager:
    options: dict[str, Any] = {"num_pools": 256, "maxsize": MAX_REQUESTS, "block": False, "retries": False}
    manager: urllib3.PoolManager
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        headers = None
        if parts.username is not None:
            headers = {"Proxy-Authorization": _basic(unquote(parts.username), unquote(parts.password or ""))}
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        manager = urllib3.ProxyManager(address, proxy_headers=headers, **options)
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _from_netrc(origin: str) -> str | None:
    """Return the credentials of the netrc file for a server; None if there are none, or the file cannot be read."""
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        credentials = netrc.netrc(path).authenticators(urlsplit(origin).hostname or "")
    except (OSError, ValueError, netrc.NetrcParseError):
        return None
    return _basic(credentials[0] or "", credentials[2] or "") if credentials else None


def _next(url: str, location: str | None, attempts: Attempts, status: int) -> str:
    """Return the address of a redirect."""
    if not location:
        raise attempts.target.error("a redirect without an address", status)
    target = scheme = ""
    try:
        # servers send UTF-8, which the head was decoded from as latin-1
        target = urljoin(url, location.encode("latin-1", "replace").decode("utf-8", "replace"))
        scheme = urlsplit(target).scheme
        target = web_url(target)
    except ValueError:
        target = ""
    if not target or scheme not in ("http", "https"):
        raise attempts.target.error("a redirect to an address that is not a web server's", status)
    if url.startswith("https:") and scheme == "http":
        raise attempts.target.error(f"a redirect from https to http, to {shown(target)}; it is not safe", status)
    return target


def _is_final(error: BaseException) -> bool:
    """Return whether another attempt would fail in the same way."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, ProxyError) and error.original_error is not None:
        return _is_final(error.original_error)
    if isinstance(error, NameResolutionError) and isinstance(cause, socket.gaierror):
        return cause.errno != socket.EAI_AGAIN
    return isinstance(error, (urllib3.exceptions.LocationValueError, urllib3.exceptions.InvalidHeader, UnicodeError))


# Texts of errors may contain urls with signatures, and credentials of a proxy. So none of them is shown.
_FAULTS: tuple[tuple[type[BaseException], str], ...] = (
    (ProxyError, "no connection to the proxy"),
    (NameResolutionError, "the server's name is unknown"),
    (NewConnectionError, "no connection to the server"),
    (urllib3.exceptions.ConnectTimeoutError, "no connection to the server in time"),
    (urllib3.exceptions.ReadTimeoutError, "no response in time"),
    (TimeoutError, "no more bytes in time"),
    (urllib3.exceptions.LocationValueError, "the url is not valid"),
    (SSLError, "the encrypted connection failed"),
    (ssl.SSLError, "the encrypted connection failed"),
    (ConnectionError, "the connection was dropped"),
    (urllib3.exceptions.ProtocolError, "the connection was dropped, or the response is not HTTP"),
    (HTTPException, "the response is not HTTP, or was cut short"),
)


def _fault(error: BaseException) -> str:
    """Return a description of an error, by its class alone."""
    for kind, problem in _FAULTS:
        if isinstance(error, kind):
            return problem
    return f"the request failed ({type(error).__name__})"
