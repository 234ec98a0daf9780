"""A client of web servers, which checks every response. Without ranges, it keeps whole objects in temporary files."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from wds_tensorcache.storage.remote.http_transport import Response, Transport
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import TICK_S, ObjectInfo, Request, TransientError, check_cancelled
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes
from wds_tensorcache.storage.urls import reveal, web_url

_NO_SUFFIX = frozenset({400, 405, 416, 501})
_NUM_REPEATED = 2  # requests whose range was ignored
_IGNORED = "the server responds with the whole object instead of the range that was asked for"
_REPEATS = "the request is repeated. If the server always does so, whole shards are read"
_COPIES = (
    "so each shard is fetched whole into TMPDIR on its first use. Serve the shards with a server that has ranges, or read them "
    "as a stream with tc.ResumablePipeline"
)
_NO_LENGTH = "the server sent no Content-Length, so a truncated body cannot be detected"
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_MAX_COPIES = 32
_PIECE = 256 * 1024


class Copy:
    """The body of a response in a temporary file without a name.

    The file is in the folder `TMPDIR`. The argument `state` is None if the object's length is unknown.
    """

    def __init__(self, response: Response, request: Request, state: ObjectInfo | None, tag: str | None) -> None:
        piece, nbytes = memoryview(bytearray(_PIECE)), 0
        try:
            self._file = tempfile.TemporaryFile(prefix="tensorcache-", buffering=0)  # noqa: SIM115, closed below
            weakref.finalize(self, self._file.close)
            while count := response.read_into(piece):
                nbytes += count
                rest = piece[:count]
                while rest:
                    rest = rest[self._file.write(rest) :]
                request.extend(nbytes)
        except OSError as exc:
            folder = tempfile.tempdir or "TMPDIR"  # `gettempdir` raises an error if no folder can be used
            problem = f"the server has no ranges, and {folder} cannot hold the object ({exc.strerror})"
            raise request.error(problem + "; set TMPDIR to another disk") from exc
        if state is not None and nbytes != state.nbytes:
            raise TransientError(f"the connection ended after {nbytes} of {state.nbytes} bytes")
        self.state = state or request.check(ObjectInfo(nbytes, tag))

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
    """The 32 most recently used copies of objects. Any thread may call."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def get(self, url: str, state: ObjectInfo | None) -> Copy | None:
        """Return the copy of an object in this state, or None."""
        with self._lock:
            copy = self._copies.get(url)
            if copy is None or copy.state != state:
                return None
            self._copies[url] = self._copies.pop(url)  # the most recently used copy is the last
            return copy

    def keep(self, response: Response, request: Request, state: ObjectInfo | None, tag: str | None) -> Copy:
        """Return a copy of an object, made by this or another thread."""
        with self._lock:
            turn = self._turns.setdefault(request.url, threading.Lock())
            # without a tag, the object may have changed since the last copy, but not since a copy that is made during the wait
            before = self._copies.get(request.url) if tag is None else None
        while not turn.acquire(timeout=TICK_S):
            check_cancelled()
        try:
            copy = self.get(request.url, state)
            if copy is None or copy is before:
                copy = Copy(response, request, state, tag)
            with self._lock:
                self._copies[request.url] = copy
                while len(self._copies) > _MAX_COPIES:
                    del self._copies[next(iter(self._copies))]
        finally:
            turn.release()
        return copy


class HttpClient:
    """A client of one web server; see `Client`.

    A server may send a strong ETag, a weak ETag, a date of modification, or none of them. The client sends a known strong ETag
    with every read (`If-Match`), and a date as `If-Unmodified-Since`. It compares the tag and the length in every response with
    the tag and the length that it knows.

    With a date, changes within a second may go unnoticed. With a weak ETag, changes that the server calls equivalent may go
    unnoticed. Without a tag and a date, the client compares only the object's length.

    Some servers ignore `Range`, and respond with the whole object. The client then keeps the object in a temporary file, and
    reads from this file. If the server has obeyed or announced ranges, the client first repeats the request twice: a proxy may
    respond with whole objects only while it fetches them.

    Threads/fork/pickle: as `Client`.
    """

    def __init__(self, origin: str, authorization: str | None) -> None:
        self.pace = Pace()
        self._transport = Transport(origin, authorization)
        self._has_ranges: bool | None = None  # None until a response shows it
        self._num_suffixes_ignored = 0
        self._is_warned = False
        self._copies = Copies()

    def _locate(self, request: Request) -> str:
        try:
            return web_url(reveal(request.url))
        except ValueError as exc:
            raise request.error(f"{exc}") from None

    def _tag(self, response: Response) -> str | None:
        """Return the ETag, or else the date of modification, or None."""
        tag = (response.headers.get("ETag") or "").strip()
        if tag and not tag.startswith(('"', "W/")):
            tag = f'"{tag}"'  # some servers forget the quotes
        tag = tag or (response.headers.get("Last-Modified") or "").strip()
        # a later request sends it in a header, which cannot contain other characters
        return tag if tag and tag.isprintable() and tag.isascii() else None

    def _conditions(self, request: Request) -> Mapping[str, str]:
        """Return the headers that let a server refuse another version."""
        tag = request.state.tag if request.state is not None else None
        # `If-Match` needs a strong ETag (RFC 9110)
        if tag is None or tag.startswith("W/"):
            return {}
        return {"If-Match" if tag.startswith('"') else "If-Unmodified-Since": tag}

    @contextmanager
    def _get(self, request: Request, text: str) -> Iterator[tuple[Response, ObjectInfo | None]]:
        """Request a range; yield the response, and the object's state or None."""
        headers = {"Range": text, **self._conditions(request)}
        with self._transport.get(self._locate(request), headers, request) as response:
            state = None
            if response.status == 206:
                self._has_ranges = True
                total = _content_range(response, request)[2]
                nbytes = total if total is not None or request.state is None else request.state.nbytes
            elif response.status == 416:
                nbytes = _total_of(response)
            else:
                nbytes = _length_of(response) if response.status == 200 else None
            if nbytes is not None:
                tag = self._tag(response)
                if tag is None and response.status != 416 and request.state is not None and request.state.tag:
                    raise TransientError(
                        f"its tag was {request.state.tag:.80}, now the server sends none", response.status
                    )
                state = request.check(ObjectInfo(nbytes, tag))
            yield response, state

    def read_head(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        # not HEAD: a url may be signed for GET alone, and a truncated head looks like a whole head
        with self._get(request, f"bytes=0-{max(nbytes, 1) - 1}") as (response, state):
            if response.status == 200:
                if state is not None and state.nbytes <= nbytes:
                    return state, self._read(response, request, state.nbytes)
                copy = self._keep(response, state, request)
                return copy.state, copy.read(request, 0, min(nbytes, copy.state.nbytes))
            if response.status == 416 and state is not None and not state.nbytes:
                return state, b""
            if response.status != 206:
                raise _refusal(response, request)
            if state is None:
                raise request.error("the server does not send the object's length", response.status)
            _check_range(response, request, 0, min(max(nbytes, 1), state.nbytes))
            return state, self._read(response, request, min(nbytes, state.nbytes)) if nbytes else b""

    def read_tail(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes] | None:
        if nbytes > 0 and self._num_suffixes_ignored <= _NUM_REPEATED:
            with self._get(request, f"bytes=-{nbytes}") as (response, state):
                if state is not None and response.status == 206:
                    self._num_suffixes_ignored = 0
                    _check_range(response, request, max(0, state.nbytes - nbytes), state.nbytes)
                    return state, self._read(response, request, min(nbytes, state.nbytes))
                if response.status == 200 and self._may_have_ranges(response):
                    if state is not None and state.nbytes <= nbytes:
                        return state, self._read(response, request, state.nbytes)
                    self._num_suffixes_ignored += 1
                    self._warn_once(request, _REPEATS)
                elif response.status == 200:
                    copy = self._keep(response, state, request)
                    return copy.state, copy.read(request, max(0, copy.state.nbytes - nbytes), copy.state.nbytes)
                elif response.status not in _NO_SUFFIX:
                    raise _refusal(response, request)
                elif response.status != 416:  # 416 is also the response for an empty object
                    self._num_suffixes_ignored = _NUM_REPEATED + 1
        return None

    def read_range(self, request: Request, buffers: Sequence[memoryview], /) -> ObjectInfo:
        begin, end = request.at, request.end
        assert end is not None
        # the object may have changed since an earlier file read this copy
        copy = None if request.is_first else self._copies.get(request.url, request.state)
        if copy is None:
            with self._get(request, f"bytes={begin}-{end - 1}") as (response, state):
                if state is not None and response.status == 206:
                    _check_range(response, request, begin, end)
                    self._fill(response, request, buffers, state)
                    return state
                if state is not None and response.status == 200 and (begin, end) == (0, state.nbytes):
                    self._fill(response, request, buffers, state)
                    return state
                if response.status != 200:
                    raise _refusal(response, request)
                copy = self._keep(response, state, request)
        copy.read_into(request, buffers, begin)
        return copy.state

    def list_objects(self, request: Request, /) -> list[str]:
        raise request.error("web servers have no listings; list the shards, or let a manifest.json list them")

    def _read(self, response: Response, request: Request, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        self._fill(response, request, [memoryview(content)], None)
        return bytes(content)

    def _fill(
        self, response: Response, request: Request, buffers: Sequence[memoryview], state: ObjectInfo | None
    ) -> None:
        """Read a body into buffers."""
        _check_body(response, request, sum(map(len, buffers)))
        begun, done = self.pace.begin(response.head_s), 0
        try:
            for view in buffers:
                while len(view):
                    count = response.read_into(view)
                    if not count:
                        raise TransientError("the connection ended before the end of the body")
                    done, view = done + count, view[count:]
        finally:
            self.pace.end(begun, done)
            # The next attempt continues here. Without a strong ETag, the rest could come from a changed object.
            if done and state is not None and (state.tag or "").startswith('"'):
                request.state, request.at = state, request.at + done

    def _may_have_ranges(self, response: Response) -> bool:
        """Return whether the server has obeyed or announced ranges."""
        if self._has_ranges is None:
            return (response.headers.get("Accept-Ranges") or "").strip().lower() == "bytes"
        return self._has_ranges

    def _warn_once(self, request: Request, effect: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            request.warn(f"{_IGNORED}; {effect}")

    def _keep(self, response: Response, state: ObjectInfo | None, request: Request) -> Copy:
        """Copy the whole object, or raise TransientError to try again."""
        # a server that ignores the range of a request three times has no ranges until it obeys one
        if self._may_have_ranges(response) and request.num_ignored < _NUM_REPEATED:
            request.num_ignored += 1
            self._warn_once(request, _REPEATS)
            raise TransientError(_IGNORED, 200)
        self._has_ranges = False
        self._warn_once(request, _COPIES)
        _check_encoding(response, request)
        if state is None and not response.is_chunked:
            raise request.error(_NO_LENGTH, 200)
        begun, nbytes = self.pace.begin(response.head_s), 0
        try:
            copy = self._copies.keep(response, request, state, self._tag(response))
            nbytes = copy.state.nbytes
        finally:
            self.pace.end(begun, nbytes)
        return copy


def _length_of(response: Response) -> int | None:
    text = (response.headers.get("Content-Length") or "").strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def _show_range(response: Response) -> str:
    return f"{response.headers.get('Content-Range')!r:.100}"


def _content_range(response: Response, request: Request) -> tuple[int, int, int | None]:
    """Return begin, end and object length of a partial response."""
    match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
    if not match or match[1] is None:
        raise request.error(f"a partial response with Content-Range {_show_range(response)}", 206)
    total = None if match[3] == "*" else int(match[3])
    begin, end = int(match[1]), int(match[2]) + 1
    if begin >= end or (total is not None and end > total):
        raise request.error(f"an impossible Content-Range {_show_range(response)}", 206)
    return begin, end, total


def _check_range(response: Response, request: Request, begin: int, end: int) -> None:
    if _content_range(response, request)[:2] != (begin, end):
        raise request.error(f"asked for bytes {begin}-{end - 1}, got Content-Range {_show_range(response)}", 206)


def _total_of(response: Response) -> int | None:
    """Return the object's length from the `Content-Range` of a refusal."""
    match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
    return int(match[3]) if match and match[3] != "*" else None


def _check_encoding(response: Response, request: Request) -> None:
    encoding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        problem = (
            f"the server encodes the bytes ({encoding:.40}) although it was asked not to; switch its compression off"
        )
        raise request.error(problem, response.status)


def _check_body(response: Response, request: Request, nbytes: int) -> None:
    """Raise RemoteError for an encoded body, or a length other than `nbytes`."""
    _check_encoding(response, request)
    length = _length_of(response)
    if length is not None and length != nbytes:
        raise request.error(f"expected {nbytes} bytes, the server sends {length}", response.status)


def _refusal(response: Response, request: Request) -> Exception:
    status = response.status
    if status == 412:
        return request.changed_error("the server has another version of it")
    if status in (404, 410):
        return request.missing_error()
    problem = f"the server responds with status {status}"
    if status == 407:
        problem = "the proxy responds with status 407; check the user name and password in http_proxy"
    if status in (401, 403):
        problem += "; check the credentials: of the url, a netrc file or HF_TOKEN; a signed url may have expired"
    return request.error(problem, status)
