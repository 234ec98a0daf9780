"""HTTP requests through urllib3: pools, proxies, credentials, redirects, and bodies without copies."""

from __future__ import annotations

import base64
import netrc
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from wds_tensorcache.storage.remote.retry import MAX_REQUESTS, TRANSIENT_STATUSES, Request, TransientError
from wds_tensorcache.storage.urls import origin_of, shown, web_url

try:
    import urllib3
    from urllib3 import connection, connectionpool
    from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, ProxyError, SSLError
except ImportError as missing:
    raise ImportError("reading https:// needs urllib3: pip install 'wds-tensorcache[remote]'") from missing

_CONNECT_S, _STALL_S = 10.0, 20.0  # longest waits for a connection, and for the head or the next bytes of a body
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NEED_HEADERS = _REDIRECTS | {200, 206, 416}
_FEW_BYTES, _DRAIN_S = 64 * 1024, 0.5  # the rest of a body that is read to keep its connection, and the time for it
_PIECE = 1 << 20
_sent = threading.local()  # the request that a thread sends


class _Head(HTTPResponse):
    """A response of `http.client` that raises errors for damaged and truncated heads."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        _sent.request.watch(sock)
        super().__init__(sock, *args, **options)

    def begin(self) -> None:
        super().begin()
        # `http.client` returns interim heads as responses, except `100 Continue`. The next request would then get the response
        # to this request.
        while 102 <= self.status < 200:
            self.headers: Any = None  # so that `begin` reads another head
            super().begin()
        # `http.client` accepts a head that a dropped connection has cut short. urllib3 logs the url of a damaged head, with a
        # query that may be a signature.
        is_cut = self.status in _NEED_HEADERS and self.length != 0 and not self.fp.peek(1)
        coding = self.headers.get("Transfer-Encoding")
        if is_cut or self.headers.defects or (coding is not None and not self.chunked):
            raise HTTPException("the head is damaged, or was cut short")

    def _safe_read(self, amt: int) -> bytes:
        """Read bytes, and check that each chunk ends at its stated size."""
        read: bytes = super()._safe_read(amt)  # type: ignore[misc]
        # `http.client` does not check this
        if self.chunked and amt == 2 and read != b"\r\n":
            raise HTTPException("a chunk does not end where it should")
        return read


class _HTTPConnection(connection.HTTPConnection):
    response_class = _Head


class _HTTPSConnection(connection.HTTPSConnection):
    response_class = _Head


class _HTTPPool(connectionpool.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(connectionpool.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


class Response:
    """A response whose head has arrived. Use it in a `with` block, which keeps or closes its connection.

    Attributes:
        status: HTTP status.
        headers: Headers by name, case-insensitive.
        first_headers: Headers of the first response, which may be a redirect.
        head_s: Time from the request to the head, in seconds.
        is_chunked: True if the body is sent in chunks, so that a truncated body can be detected.
    """

    def __init__(self, response: Any, request: Request, head_s: float) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.first_headers = self.headers
        self.head_s = head_s
        self._response, self._request, self._is_broken = response, request, False
        self._raw: HTTPResponse = response._fp  # `readinto` of urllib3 copies
        self.is_chunked = bool(self._raw.chunked)

    def read_into(self, view: memoryview) -> int:
        """Read the next bytes of the body into `view`. Return their number, 0 at the end of the body or the connection.

        Raises:
            TransientError: The connection failed or stalled. Bytes of the last piece are not counted.
        """
        try:
            return self._raw.readinto(view[:_PIECE])
        except (OSError, HTTPException, ValueError) as exc:
            problem = describe(exc)
        self._is_broken = True
        raise TransientError(problem)

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._request.unwatch()
        raw, connection = self._raw, self._response.connection
        if connection is not None:
            with suppress(OSError, HTTPException, ValueError):
                # without a socket, the server closes the connection after this body
                if raw.length and raw.length <= _FEW_BYTES and not self._is_broken and connection.sock:
                    connection.sock.settimeout(_DRAIN_S)
                    raw.read(raw.length)
            if raw.length != 0 or self._is_broken or self.status < 200:
                connection.close()
        raw.close()  # otherwise an empty body blocks the connection
        self._response.release_conn()


_Route = Callable[..., urllib3.BaseHTTPResponse]

# urllib3 neither follows redirects nor repeats, reads or decodes
_PLAIN: Any = {"redirect": False, "retries": False, "preload_content": False, "decode_content": False}


class Transport:
    """The connection pools, proxies and credentials of one client's requests.

    Args:
        origin: The client's server.
        authorization: Header for this server; None for the credentials of the netrc file.

    Threads/fork/pickle: any thread may call. A forked child makes its own transport. Cannot be pickled.
    """

    def __init__(self, origin: str, authorization: str | None) -> None:
        self._origin = origin
        # The environment and the netrc file are read once: for each request, that would double the time.
        self._routes: dict[str, _Route] = {}  # by origin
        self._authorization = authorization or _read_netrc(origin)

    def get(self, url: str, headers: Mapping[str, str], request: Request) -> Response:
        """Send a GET request, and follow redirects.

        Credentials are sent only to the client's own server, never to a server to which it redirects.

        Args:
            url: Url in the form that `web_url` returns.

        Returns:
            A response whose head has arrived. Its status is neither a redirect nor one of `TRANSIENT_STATUSES`.

        Raises:
            TransientError: The connection failed, the head did not arrive in time, or the status is transient.
            RemoteError: The server's name is unknown, its certificate is not trusted, or a redirect is refused.
        """
        seen = {url}
        first_headers: Mapping[str, str] | None = None
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {"Accept-Encoding": "identity", "User-Agent": "wds-tensorcache", **headers}
            if self._authorization is not None and origin_of(url) == self._origin:
                sent["Authorization"] = self._authorization
            response = self._send(url, sent, request)
            first_headers = response.first_headers = first_headers or response.headers
            if response.status in TRANSIENT_STATUSES:
                with response:
                    pause_s = parse_retry_after(response.headers.get("Retry-After"))
                    problem = f"the server responds with status {response.status}"
                    raise TransientError(problem, response.status, pause_s)
            if response.status not in _REDIRECTS:
                return response
            with response:
                url = _redirect_target(url, response.headers.get("Location"), request, response.status)
            if url in seen:
                raise request.error(f"redirects in a circle, again to {shown(url)}", response.status)
            seen.add(url)
        raise request.error(f"more than {_MAX_REDIRECTS} redirects, the last to {shown(url)}", response.status)

    def _send(self, url: str, headers: dict[str, str], request: Request) -> Response:
        begun = time.monotonic()
        remaining_s = request.deadline - begun
        if remaining_s <= 0:
            raise TransientError("no time is left")
        failed: Exception
        try:
            origin = origin_of(url)
            route = self._routes.get(origin) or self._routes.setdefault(origin, _make_route(origin))
            timeout = urllib3.Timeout(connect=min(_CONNECT_S, remaining_s), read=min(_STALL_S, remaining_s))
            _sent.request = request
            response = route(url, headers=headers, timeout=timeout, **_PLAIN)
            return Response(response, request, time.monotonic() - begun)
        except (HTTPError, HTTPException, OSError, ValueError) as exc:
            failed = exc
        finally:
            _sent.request = None
        request.unwatch()
        # Raised here, so that no traceback shows the caught error: its text may contain a signed url, or a proxy's password.
        if isinstance(failed, SSLError) and isinstance(failed.args[0], ssl.SSLCertVerificationError):
            reason = failed.args[0].verify_message.rstrip(".")
            raise request.error(
                f"the server's certificate is not trusted: {reason}; if its authority is your own, set SSL_CERT_FILE to the "
                "authority's file"
            )
        if _is_final(failed):
            raise request.error(describe(failed))
        raise TransientError(describe(failed))


def _make_route(origin: str) -> _Route:
    """Return a function that sends requests to a server."""
    scheme, _, netloc = origin.partition("://")
    proxy = urllib.request.getproxies().get(scheme)
    if proxy is not None and urllib.request.proxy_bypass(netloc):
        proxy = None
    options: dict[str, Any] = {"num_pools": 256, "maxsize": MAX_REQUESTS, "block": False, "retries": False}
    manager: urllib3.PoolManager
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        headers = None
        if parts.username is not None:
            headers = {
                "Proxy-Authorization": basic_authorization(unquote(parts.username), unquote(parts.password or ""))
            }
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        manager = urllib3.ProxyManager(address, proxy_headers=headers, **options)
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    if proxy is not None:  # the manager prepares requests for the proxy
        return partial(manager.urlopen, "GET")
    pool = manager.connection_from_url(origin)  # takes less time than its manager
    return lambda url, **options: pool.urlopen("GET", url[len(origin) :], **options)


def basic_authorization(user: str, password: str) -> str:
    """Return the value of the header `Authorization` for a user."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _read_netrc(origin: str) -> str | None:
    """Return the `Authorization` header for a server from the netrc file."""
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        credentials = netrc.netrc(path).authenticators(urlsplit(origin).hostname or "")
    except (OSError, ValueError, netrc.NetrcParseError):
        return None
    return basic_authorization(credentials[0] or "", credentials[2] or "") if credentials else None


def _redirect_target(url: str, location: str | None, request: Request, status: int) -> str:
    if not location:
        raise request.error("a redirect without an address", status)
    target = scheme = ""
    try:
        # servers send UTF-8, but the head was decoded as latin-1
        target = urljoin(url, location.encode("latin-1", "replace").decode("utf-8", "replace"))
        scheme = urlsplit(target).scheme
        target = web_url(target)
    except ValueError:
        target = ""
    if not target or scheme not in ("http", "https"):
        raise request.error("a redirect to an address that is not a web server's", status)
    if url.startswith("https:") and scheme == "http":
        raise request.error(f"a redirect from https to http, to {shown(target)}; it is not safe", status)
    return target


def parse_retry_after(text: str | None) -> float | None:
    """Return a `Retry-After` header's seconds from now, or None if invalid."""
    with suppress(HTTPError, ValueError, OverflowError):
        return None if text is None else float(urllib3.Retry().parse_retry_after(text[:40]))
    return None


def _is_final(error: BaseException) -> bool:
    """Return whether another attempt would fail in the same way."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, ProxyError) and error.original_error is not None:
        return _is_final(error.original_error)
    if isinstance(error, NameResolutionError) and isinstance(cause, socket.gaierror):
        return cause.errno != socket.EAI_AGAIN
    return isinstance(error, (urllib3.exceptions.LocationValueError, urllib3.exceptions.InvalidHeader, UnicodeError))


# Texts of errors may contain urls with signatures, and credentials of a proxy. So no text is shown.
_FAULTS: tuple[tuple[Any, str], ...] = (
    (ProxyError, "no connection to the proxy"),
    (NameResolutionError, "the server's name is unknown"),
    (NewConnectionError, "no connection to the server"),
    (urllib3.exceptions.ConnectTimeoutError, "no connection to the server in time"),
    (urllib3.exceptions.LocationValueError, "the url is not valid"),
    ((SSLError, ssl.SSLError), "the encrypted connection failed"),
    ((urllib3.exceptions.ReadTimeoutError, TimeoutError), "no more bytes in time"),
    (Exception, "the connection was dropped, or the response is not HTTP"),
)


def describe(error: BaseException) -> str:
    """Return a description of an error, from its class alone."""
    return next(problem for kind, problem in _FAULTS if isinstance(error, kind))
