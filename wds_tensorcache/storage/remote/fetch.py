"""Reads of remote objects, by up to 128 requests at a time. Failed requests are repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.retry import MAX_REQUESTS, ObjectInfo, Request
from wds_tensorcache.storage.system import skip_bytes
from wds_tensorcache.storage.threads import Threads, per_process

PART_NBYTES = 4 << 20  # larger ranges are requested in parts of this length
_LEAST_GAP, _MOST_GAP = 4 << 10, 256 << 10  # bounds of the bytes between two ranges that one request fetches
_COST = 2  # measured time of one of many requests, in multiples of its part of the latency

_Result = TypeVar("_Result")


class _File(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def state(self) -> ObjectInfo: ...
    @property
    def is_asked(self) -> bool: ...
    def fix(self, state: ObjectInfo, /) -> None: ...
    def check_range(self, begin: int, end: int, /) -> None: ...
    def missing_error(self, cause: FileNotFoundError, /) -> Exception: ...


# a remote file, the offset of the first byte, and 1-D byte buffers that are filled in order
Range = tuple[Any, int, Sequence[Any]]


class _Counts(threading.local):
    """The number of requests that `fetch_many` has made for the current thread."""

    num_requests = 0


COUNTS = _Counts()
_executor = per_process(lambda: Threads(MAX_REQUESTS, "tensorcache-remote"))
_local = threading.local()
_scratch = memoryview(bytearray(_MOST_GAP))  # gaps are read into it, by all threads at once; its content is never used


@dataclass(slots=True)
class _Part:
    """The bytes `[begin, end)` of a file, and the buffers for them."""

    file: _File
    begin: int
    end: int
    buffers: list[memoryview] = field(default_factory=list)

    def read(self) -> None:
        file, client = self.file, client_for(self.file.url)
        request = Request(file.url, self.begin, self.end, file.state, self.end - self.begin)
        request.is_first = not file.is_asked
        try:
            # continues at the first byte that has not arrived
            state = request.repeat(
                lambda: client.read_range(request, skip_bytes(self.buffers, request.at - self.begin))
            )
        except FileNotFoundError as exc:
            raise file.missing_error(exc) from exc
        file.fix(state)


def fetch_many(ranges: Iterable[Range], *, merges: bool = True) -> None:
    """Read many ranges at once, straight into the caller's memory.

    Ranges of one file are requested in the order of their offsets. One request fetches several near ranges if the bytes between
    them take less time than another request. Several requests fetch a range of more than 4 MiB.

    Args:
        ranges: For each range, the file, the offset of its first byte, and 1-D byte buffers that it fills in order.
        merges: Let one request fetch near ranges. Otherwise one request fetches only adjacent ranges.

    Raises:
        FormatError: A file has changed, or is too short.
        MissingShardError: A file does not exist.
        RemoteError: A request failed. If several requests failed, the error of the first request in order is raised.

    After this function has returned or raised, even by an interrupt, no thread writes into the buffers.
    """
    requests = _plan(ranges, merges)
    if requests:
        COUNTS.num_requests += len(requests)
        run_all([request.read for request in requests])


def _plan(ranges: Iterable[Range], merges: bool) -> list[_Part]:
    wanted = []
    for file, begin, buffers in ranges:
        views = [view for view in map(_bytes, buffers) if len(view)]
        end = begin + sum(map(len, views))
        file.check_range(begin, end)
        if views:
            wanted.append(_Part(file, begin, end, views))
    wanted.sort(key=lambda part: (part.file.url, part.begin))
    requests: list[_Part] = []
    gaps: dict[str, int] = {}
    last: _Part | None = None
    for part in wanted:
        url = part.file.url
        if last is not None and last.file is part.file and part.end - last.begin <= PART_NBYTES:
            gap = part.begin - last.end
            if gap == 0 or (merges and 0 < gap <= (gaps.get(url) or gaps.setdefault(url, largest_gap(url)))):
                if gap:
                    last.buffers.append(_scratch[:gap])
                last.buffers += part.buffers
                last.end = part.end
                continue
        last = part
        requests.append(part)
    return [part for request in requests for part in _split(request)]


def largest_gap(url: str) -> int:
    """Return the longest gap that is cheaper to read than another request. It is in bytes, from 4 KiB to 256 KiB."""
    pace = client_for(url).pace
    return int(min(_MOST_GAP, max(_LEAST_GAP, _COST * pace.latency_s / MAX_REQUESTS * pace.total_rate)))


def _bytes(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" else view.cast("B")


def _split(request: _Part) -> list[_Part]:
    if request.end - request.begin <= PART_NBYTES:
        return [request]
    parts = [
        _Part(request.file, begin, min(begin + PART_NBYTES, request.end))
        for begin in range(request.begin, request.end, PART_NBYTES)
    ]
    at, left = 0, PART_NBYTES
    for buffer in request.buffers:
        while len(buffer):
            piece = buffer[:left]
            parts[at].buffers.append(piece)
            buffer, left = buffer[len(piece) :], left - len(piece)
            if not left:
                at, left = at + 1, PART_NBYTES
    return parts


def stat(url: str) -> ObjectInfo:
    """Return the state of an object by one request. Raise FileNotFoundError if it does not exist."""
    return read_head(url, 0)[0]


def read_head(url: str, nbytes: int) -> tuple[ObjectInfo, bytes]:
    """Return an object's state and first `nbytes` bytes, or all if shorter."""
    request = Request(url)
    return _run(lambda: request.repeat(lambda: client_for(url).read_head(request, nbytes)))


def read_tail(url: str, nbytes: int) -> tuple[ObjectInfo, bytes]:
    """Return an object's state and last `nbytes` bytes, or all if shorter."""
    request = Request(url, nbytes=nbytes)

    def attempt() -> tuple[ObjectInfo, bytes]:
        client = client_for(url)
        if (tail := client.read_tail(request, nbytes)) is not None:
            return tail
        state, _ = client.read_head(request, 0)
        content = bytearray(min(max(0, nbytes), state.nbytes))
        if content:
            part = Request(url, state.nbytes - len(content), state.nbytes, state)
            state = client.read_range(part, [memoryview(content)])
        return state, bytes(content)

    return _run(lambda: request.repeat(attempt))


def list_objects(folder: str) -> list[str]:
    """Return the sorted urls of the objects directly in a folder. Raise RemoteError if the server has no listings."""
    request = Request(folder)
    return _run(lambda: request.repeat(lambda: client_for(folder).list_objects(request)))


def start_read(file: _File, begin: int, view: memoryview) -> tuple[Future[None], retry.Cancel]:
    """Start to read into a buffer. Return a future for `wait_for`, and the `Cancel` of the read."""
    cancel = retry.Cancel()
    return _executor().submit(_work, _Part(file, begin, begin + len(view), [view]).read, cancel), cancel


def _run(call: Callable[[], _Result]) -> _Result:
    """Run a call that makes requests on another thread."""
    # so that Ctrl-C ends the wait for it
    (result,) = run_all([call])
    return result


def run_all(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run calls on threads and return their results. On the first error, cancel all other calls and wait for them."""
    if getattr(_local, "is_worker", False):  # all threads could be waiting here
        return [call() for call in calls]
    cancel = retry.Cancel()
    futures: list[Future[_Result]] = []
    try:
        executor = _executor()
        for call in calls:
            futures.append(executor.submit(_work, call, cancel))
        wait_for(futures)
    finally:
        # A request that still runs would write into buffers that the caller uses for something else.
        cancel.set()
        for future in futures:
            future.cancel()
        wait(futures)
    return _results(futures)


def wait_for(futures: Sequence[Future[Any]]) -> None:
    """Wait until all futures are done or one future has failed. End requests that exceed their time limits."""
    running = set(futures)
    while running:
        done, running = wait(running, retry.TICK_S, FIRST_EXCEPTION)
        if any(future.cancelled() or future.exception() is not None for future in done):
            return
        retry.end_overdue()


def _results(futures: Sequence[Future[_Result]]) -> list[_Result]:
    """Return the futures' results. Raise a cancellation only if there is no other error."""
    cancelled: BaseException | None = None
    results = []
    for future in futures:
        try:
            results.append(future.result())
        except CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return results


def _work(call: Callable[[], _Result], cancel: retry.Cancel) -> _Result:
    _local.is_worker = True
    with retry.bind_cancel(cancel):
        retry.check_cancelled()
        try:
            return call()
        except BaseException:
            cancel.set()
            raise
