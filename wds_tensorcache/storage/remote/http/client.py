"""Objects of web servers, by ranges: every response is compared with its request and the known state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.remote.client import ObjectInfo, read_tail_by_stat
from wds_tensorcache.storage.remote.http.headers import (
    check_body,
    check_encoding,
    conditions,
    content_range,
    is_strong,
    refusal,
    show_range,
    state_of,
    tag_of,
    total_of,
)
from wds_tensorcache.storage.remote.http.transport import Response, Transport
from wds_tensorcache.storage.remote.http.whole import Opened, WholeCopies
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import Attempts, Target, TransientError, warn
from wds_tensorcache.storage.system import skip_bytes
from wds_tensorcache.storage.urls import reveal, web_url

_NO_SUFFIX = frozenset({400, 405, 416, 501})
_NO_HEAD = frozenset({400, 403, 405, 501})
_PIECE = 256 * 1024
_NUM_REPEATED = 2  # requests whose range was ignored
_IGNORED = "the server responds with the whole object instead of the range that was asked for"


class HttpClient:
    """Reads objects of one web server; see `Client`.

    A server may send a strong ETag, a weak ETag, a date of modification, or nothing of that kind. A strong ETag is sent with
    every read (`If-Match`), and a date as `If-Unmodified-Since`. Every response's tag and length are compared with the known
    ones.

    With a weak ETag or a date, an object that was changed within a second, or in a way that the server calls
    equivalent, may look unchanged. Without any of them, only its length is compared.

    Some servers ignore `Range`, and respond with the whole object. This client then keeps that body in a temporary file, and
    reads from there. A server that has obeyed ranges, or says that it does, is first asked twice more: its proxy may respond
    with whole objects only while it fetches them.

    Threads/fork/pickle: as `Client`.
    """

    def __init__(self, origin: str, credentials: tuple[str, str] | None) -> None:
        self.origin = origin
        self.pace = Pace()
        self._transport = Transport(origin, credentials)
        self._has_ranges: bool | None = None  # None until a response shows it
        self._is_warned = False
        self._has_suffix_ranges = True
        self._copies = WholeCopies(self._fetch)

    def __repr__(self) -> str:
        return f"HttpClient({self.origin!r})"

    def stat(self, url: str, /) -> ObjectInfo:
        url = _checked(url)
        attempts = Attempts(Target(url))
        while True:
            try:
                with self._transport.request("HEAD", url, {}, attempts) as response:
                    if response.status == 200 and (state := state_of(response)) is not None:
                        return state
                    if response.status != 200 and response.status not in _NO_HEAD:
                        raise refusal(response, attempts.target)
                return self._stat_by_get(url, attempts)
            except TransientError as fault:
                attempts.pause(fault)

    def _stat_by_get(self, url: str, attempts: Attempts) -> ObjectInfo:
        """Return the state of an object whose server responds to no HEAD, for example because the url is signed for GET."""
        with self._transport.request("GET", url, {"Range": "bytes=0-0"}, attempts) as response:
            if response.status == 206:
                _, _, total = content_range(response, attempts.target)
                if total is not None:
                    return ObjectInfo(total, tag_of(response))
            elif response.status == 416:
                if total_of(response) == 0:
                    return ObjectInfo(0, tag_of(response))
            elif response.status != 200:
                raise refusal(response, attempts.target)
            elif (state := state_of(response)) is not None:
                return state
        raise attempts.target.error("the server does not tell the object's length", response.status)

    def read_tail(self, url: str, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        url = _checked(url)
        if nbytes > 0 and self._has_suffix_ranges and url not in self._copies:
            tail = self._suffix(url, nbytes)
            if tail is not None:
                return tail
        return read_tail_by_stat(self, url, nbytes)

    def _suffix(self, url: str, nbytes: int) -> tuple[ObjectInfo, bytes] | None:
        """Return the end of an object by a suffix range; None if the server refuses it."""
        target = Target(url)
        attempts = Attempts(target)
        num_ignored = 0
        while True:
            try:
                with self._transport.request("GET", url, {"Range": f"bytes=-{nbytes}"}, attempts) as response:
                    whole = state_of(response) if response.status == 200 else None
                    if whole is not None and not self._may_have_ranges(response):
                        self._copies.fetch(url, whole, (response, attempts))
                        begin = max(0, whole.nbytes - nbytes)
                        content = memoryview(bytearray(whole.nbytes - begin))
                        return self.read_into(url, [content], begin, whole), bytes(content)
                    if whole is not None and whole.nbytes > nbytes and self._asks_again(target, num_ignored):
                        num_ignored += 1
                        raise TransientError(_IGNORED, 200)
                    suffix = self._check_suffix(response, nbytes, target)
                    if suffix is None:
                        return None
                    state, begin = suffix
                    target.begin, target.end = begin, state.nbytes
                    content = memoryview(bytearray(state.nbytes - begin))
                    attempts.allow(len(content))
                    check_body(response, target, len(content))
                    done, fault = self._fill(response, [content])
            except TransientError as failed:
                attempts.pause(failed)
                continue
            if fault is not None:
                attempts.pause(fault)
                if not is_strong(state.tag):
                    continue  # the rest could be that of a changed object
                state = self.read_into(url, [content[done:]], begin + done, state)
            return state, bytes(content)

    def _check_suffix(self, response: Response, nbytes: int, target: Target) -> tuple[ObjectInfo, int] | None:
        """Return the state of an object, and the offset of the body in it; None if the server refuses suffix ranges."""
        if response.status == 206:
            self._has_ranges = True
            begin, end, total = content_range(response, target)
            if total is None or end != total or begin != max(0, total - nbytes):
                got = show_range(response)
                raise target.error(f"asked for the last {nbytes} bytes, got Content-Range {got}", 206)
            return ObjectInfo(total, tag_of(response)), begin
        if response.status == 200:
            state = state_of(response)
            if state is not None and state.nbytes <= nbytes:
                return state, 0
            self._has_suffix_ranges = False
            return None
        if response.status not in _NO_SUFFIX:
            raise refusal(response, target)
        self._has_suffix_ranges = response.status == 416  # also for an empty object
        return None

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, /) -> ObjectInfo:
        url = _checked(url)
        end = begin + sum(map(len, buffers))
        target = Target(url, begin, end)
        target.check_inside(expected)
        if begin == end:
            return expected
        if not self._has_ranges:
            with self._copies.turn(url):  # the response may be the whole object, which one thread fetches for all
                if not self._has_ranges:
                    return self._read_into(url, buffers, begin, expected, Attempts(target, end - begin))
        return self._read_into(url, buffers, begin, expected, Attempts(target, end - begin))

    def _read_into(
        self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, attempts: Attempts
    ) -> ObjectInfo:
        target, end, num_ignored = attempts.target, begin + sum(map(len, buffers)), 0
        while (copied := self._copies.read_into(url, buffers, begin, expected)) is None:
            try:
                headers = {"Range": f"bytes={begin}-{end - 1}", **conditions(expected)}
                with self._transport.request("GET", url, headers, attempts) as response:
                    received = _check_range(response, target, begin, end, expected)
                    if received is None:
                        if self._may_have_ranges(response) and self._asks_again(target, num_ignored):
                            num_ignored += 1
                            raise TransientError(_IGNORED, 200)
                        self._copies.fetch(url, expected, (response, attempts))
                        continue
                    if response.status == 206:
                        self._has_ranges = True
                    expected = received
                    done, fault = self._fill(response, buffers)
            except TransientError as failed:
                attempts.pause(failed)
                continue
            if fault is None:
                return expected
            if is_strong(expected.tag):  # otherwise the rest could be that of a changed object
                begin, buffers = begin + done, skip_bytes(buffers, done)
            if done:
                attempts.progress()
            attempts.pause(fault)
        return copied

    def _may_have_ranges(self, response: Response) -> bool:
        """Return whether a server that ignored a range obeyed another request for one, or says that it does."""
        if self._has_ranges is None:
            return (response.headers.get("Accept-Ranges") or "").strip().lower() == "bytes"
        return self._has_ranges

    def _asks_again(self, target: Target, num_before: int) -> bool:
        """Return whether to repeat a request whose range was ignored, which was repeated `num_before` times.

        A server that ignores the range of a request three times counts as one without ranges until it obeys one.
        """
        if num_before == _NUM_REPEATED:
            self._has_ranges = False
            return False
        if not self._is_warned:
            self._is_warned = True
            warn(target, f"{_IGNORED}; asking again. If it does so always, whole shards are read")
        return True

    def _fill(self, response: Response, buffers: Sequence[memoryview]) -> tuple[int, TransientError | None]:
        """Read a body into buffers; return the number of bytes that arrived, and the fault that ended it early."""
        done, fault = 0, None
        clock = self.pace.begin(response.head_s)
        try:
            for buffer in buffers:
                rest = buffer
                while len(rest):
                    count = response.read_some(rest)
                    if not count:
                        raise TransientError("the body ended too soon")
                    done += count
                    rest = rest[count:]
        except TransientError as exc:
            fault = exc
        finally:
            clock.end(done)
        return done, fault

    def read_whole(self, url: str, max_nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        url = _checked(url)
        target = Target(url)
        content = bytearray()

        def write(piece: memoryview, at: int) -> None:
            if at + len(piece) > max_nbytes:
                raise target.error(f"the object has more than {max_nbytes} bytes")
            content[at:] = piece

        state = self._fetch(url, write, max_nbytes, None)
        return state, bytes(content)

    def _fetch(
        self,
        url: str,
        write: Callable[[memoryview, int], None],
        max_nbytes: int,
        expected: ObjectInfo | None,
        opened: Opened | None = None,
    ) -> ObjectInfo:
        """Pass a whole object to `write`, in order; first the body of a response that is open, if there is one.

        After a dropped connection, continue from the byte reached if there is a strong ETag, else start again.
        """
        target = Target(url)
        first, attempts = opened or (None, Attempts(target))
        piece = memoryview(bytearray(_PIECE))
        state, at = expected, 0
        while True:
            headers: dict[str, str] = {}
            if state is not None:
                headers.update(conditions(state))
                if at and self._has_ranges is not False:
                    headers["Range"] = f"bytes={at}-"
            try:
                with first or self._transport.request("GET", url, headers, attempts) as response:
                    first = None
                    state, at = _check_whole(response, target, state, at, max_nbytes)
                    clock, begun = self.pace.begin(response.head_s), at
                    try:
                        while count := response.read_some(piece):
                            write(piece[:count], at)
                            at += count
                            attempts.progress()
                            attempts.allow_after(at)
                    finally:
                        clock.end(at - begun)
                if state is None:
                    state = ObjectInfo(at, tag_of(response))  # of a chunked body, which marks its end
                if at != state.nbytes:
                    raise TransientError(f"the body ended after {at} of {state.nbytes} bytes")
                return state
            except TransientError as fault:
                if state is None or not is_strong(state.tag):
                    state, at = expected, 0  # the rest could be that of a changed object
                attempts.pause(fault)
            except FormatError:
                if expected is not None or not at:
                    raise
                state, at = None, 0  # changed since its first bytes arrived
                attempts.pause(TransientError("the object changes faster than it can be read"))

    def list_objects(self, folder: str, /) -> Iterator[tuple[str, ObjectInfo]]:
        raise Target(folder).error("web servers have no listings; list the shards, or let a manifest.json list them")


def _check_range(response: Response, target: Target, begin: int, end: int, expected: ObjectInfo) -> ObjectInfo | None:
    """Return the state that a response to a ranged request reports; None if the server has ignored the range.

    Raises:
        FormatError: The object has changed.
        RemoteError: The response does not fit the request.
    """
    if response.status == 206:
        first, last, total = content_range(response, target)
        received = ObjectInfo(expected.nbytes if total is None else total, tag_of(response))
        target.check_same(received, expected)
        if (first, last) != (begin, end):
            got = show_range(response)
            raise target.error(f"asked for bytes {begin}-{end - 1}, got Content-Range {got}", 206)
        check_body(response, target, end - begin)
        return ObjectInfo(received.nbytes, received.tag or expected.tag)
    if response.status == 200:
        whole = state_of(response)
        if whole is not None:
            target.check_same(whole, expected)
            if (begin, end) == (0, whole.nbytes):
                check_body(response, target, end)
                return ObjectInfo(whole.nbytes, whole.tag or expected.tag)
        return None
    if response.status == 416 and (total := total_of(response)) is not None and total != expected.nbytes:
        raise target.changed(f"it had {expected.nbytes} bytes, now {total}")
    raise refusal(response, target)


def _check_whole(
    response: Response, target: Target, state: ObjectInfo | None, at: int, max_nbytes: int
) -> tuple[ObjectInfo | None, int]:
    """Return the state of an object, None if it is unknown before the end of the body, and the offset of the body in it."""
    if response.status == 206 and at and state is not None:
        first, last, total = content_range(response, target)
        target.check_same(ObjectInfo(state.nbytes if total is None else total, tag_of(response)), state)
        if (first, last) != (at, state.nbytes):
            raise target.error(f"asked for bytes {at}-, got Content-Range {show_range(response)}", 206)
        check_body(response, target, last - first)
        return state, at
    if response.status != 200:
        raise refusal(response, target)
    check_encoding(response, target)
    received = state_of(response)
    if received is None:
        if not response.is_chunked:
            # A dropped connection looks like the end of the body.
            raise target.error("the server does not tell the object's length, so it may be cut short", 200)
        return state, 0
    if state is not None:
        target.check_same(received, state)
        received = ObjectInfo(received.nbytes, received.tag or state.tag)
    if received.nbytes > max_nbytes:
        raise target.error(f"the object has {received.nbytes} bytes, more than {max_nbytes}", 200)
    return received, 0


def _checked(url: str) -> str:
    try:
        return web_url(reveal(url))
    except ValueError as exc:
        raise Target(url).error(f"{exc}") from None
