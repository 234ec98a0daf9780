"""Fetch many ranges of remote objects at once: near ranges in one request, large ranges in several, up to 128 at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.client import MAX_REQUESTS, ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.threads import Threads, per_process

PART_NBYTES = 4 << 20  # larger ranges are requested in parts of this length
_LEAST_GAP, _MOST_GAP = 4 << 10, 256 << 10  # bounds of the bytes between two ranges that one request fetches
_COST = 2  # measured: how long one of many requests takes, in multiples of its part of the latency

_Result = TypeVar("_Result")


class _File(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def state(self) -> ObjectInfo: ...
    def fix(self, state: ObjectInfo, /) -> None: ...
    def check_range(self, begin: int, end: int, /) -> None: ...
    def missing(self) -> Exception: ...


Ranges = Iterable[tuple[_File, int, Sequence[Any]]]


class _Made(threading.local):
    """The number of requests that `fetch_many` has made so far for calls of the current thread."""

    num_requests = 0


MADE = _Made()
_executor = per_process(lambda: Threads(MAX_REQUESTS, "tensorcache-remote"))
_local = threading.local()
_scratch = memoryview(bytearray(_MOST_GAP))  # bytes between ranges go here, from all threads at once; never read


# The interpreter waits for the threads of all executors before it calls the functions of `atexit`. This function was
# registered after that of `concurrent.futures`, and so is called before it.
with suppress(RuntimeError):  # the main thread has ended
    threading._register_atexit(retry.cancel_at_exit)  # type: ignore[attr-defined]


def measured_pace(url: str) -> Pace:
    """Return the measured pace of a url's server: `latency_s`, `rate` and `total_rate`."""
    return client_for(url).pace


@dataclass(slots=True)
class _Request:
    """A request for the bytes `[begin, end)` of a file, and the buffers for them."""

    file: _File
    begin: int
    end: int
    buffers: list[memoryview] = field(default_factory=list)

    def __call__(self) -> None:
        url = self.file.url
        try:
            state = client_for(url).read_into(url, self.buffers, self.begin, self.file.state)
        except FileNotFoundError as exc:
            raise self.file.missing() from exc
        self.file.fix(state)


def fetch_many(ranges: Ranges, *, merges: bool = True) -> None:
    """Read many ranges at once, straight into the caller's memory.

    Ranges of one file are read in the order of their offsets. One request fetches near ranges, if the bytes between them cost
    less time than another request. A range of more than 4 MiB is fetched by several requests.

    Args:
        ranges: For each range, the file, the offset of its first byte, and 1-D byte buffers that it fills in order.
        merges: Let one request fetch near ranges. Otherwise one request fetches only adjacent ones.

    Raises:
        FormatError: A file has changed, or is too short.
        MissingShardError: A file does not exist.
        RemoteError: As `Client.read_into`. If several requests fail, the error of the first in order is raised.

    After this function has returned or raised, even by an interrupt, no thread writes into the buffers.
    """
    requests = _plan(ranges, merges)
    if requests:
        MADE.num_requests += len(requests)
        run_all(requests)


def _plan(ranges: Ranges, merges: bool = True) -> list[_Request]:
    wanted = []
    for file, begin, buffers in ranges:
        views = [view for view in map(_bytes, buffers) if len(view)]
        end = begin + sum(map(len, views))
        file.check_range(begin, end)
        if views:
            wanted.append(_Request(file, begin, end, views))
    wanted.sort(key=lambda one: (one.file.url, one.begin))
    requests: list[_Request] = []
    gaps: dict[str, int] = {}
    last: _Request | None = None
    for one in wanted:
        if last is not None and last.file is one.file and one.end - last.begin <= PART_NBYTES:
            gap = one.begin - last.end
            if gap == 0 or (
                merges
                and 0 < gap <= (gaps.get(one.file.url) or gaps.setdefault(one.file.url, largest_gap(one.file.url)))
            ):
                if gap:
                    last.buffers.append(_scratch[:gap])
                last.buffers += one.buffers
                last.end = one.end
                continue
        last = one
        requests.append(one)
    return [part for one in requests for part in _parts(one)]


def largest_gap(url: str) -> int:
    """Return the length of the gap between two ranges that takes as long to read as another request."""
    pace = measured_pace(url)
    return int(min(_MOST_GAP, max(_LEAST_GAP, _COST * pace.latency_s / MAX_REQUESTS * pace.total_rate)))


def _bytes(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" else view.cast("B")


def _parts(request: _Request) -> list[_Request]:
    """Split a request into parts of at most 4 MiB."""
    if request.end - request.begin <= PART_NBYTES:
        return [request]
    parts = [
        _Request(request.file, begin, min(begin + PART_NBYTES, request.end))
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


def run(call: Callable[[], _Result]) -> _Result:
    """Run a call that makes requests on a thread of the executor, so that Ctrl-C ends the wait for it."""
    (result,) = run_all([call])
    return result


def run_all(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run calls in the threads of this process; on the first error, cancel all other calls and wait for them."""
    if getattr(_local, "is_worker", False):  # all threads could be waiting here
        return [call() for call in calls]
    cancel = retry.Cancel()
    futures: list[Future[_Result]] = []
    try:
        executor = _executor()
        for call in calls:
            futures.append(executor.submit(_work, call, cancel))
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        # A request that still runs would write into buffers that the caller uses for something else.
        cancel.is_set = True
        for future in futures:
            future.cancel()
        wait(futures)
    return _results(futures)


def _results(futures: Sequence[Future[_Result]]) -> list[_Result]:
    """Return the results of futures that are done; raise the first error that is not a cancellation."""
    cancelled: BaseException | None = None
    results = []
    for future in futures:
        try:
            results.append(future.result())
        except (CancelledError, retry.CancelledError) as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return results


def _work(call: Callable[[], _Result], cancel: retry.Cancel) -> _Result:
    _local.is_worker = True
    with retry.cancellable(cancel):
        retry.check_cancelled()
        try:
            return call()
        except BaseException:
            cancel.is_set = True
            raise
