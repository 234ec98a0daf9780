"""The policy of all requests: retries, pauses, time limits and cancellation.

The time limit of a request, with all its attempts, is 60 s. The environment variable `TENSORCACHE_REMOTE_TIMEOUT_S` sets
another limit. For a long request, the limit is the time of the transfer at 64 KiB/s, if that is longer.

A request that fails for 5 s logs a warning. A process logs at most one such warning in 30 s. The logger is `wds_tensorcache`,
whose warnings Python prints on stderr by default.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from wds_tensorcache.errors import FormatError, RemoteError
from wds_tensorcache.storage.threads import per_process
from wds_tensorcache.storage.urls import shown

# Requests in flight in this process. Measured, for 1,000 ranges of 2.5 KB at 20 ms of latency: 64 take 0.52 s, 128 take 0.34 s,
# and 192 take no less.
MAX_REQUESTS = 128
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
TICK_S = 0.1  # time between two searches for cancelled and overdue requests
_TIMEOUT_VARIABLE = "TENSORCACHE_REMOTE_TIMEOUT_S"
_TIMEOUT_S = 60.0
_SLOWEST = 64 * 1024  # bytes per second below which a large request is given up
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
_LATE_S, _QUIET_S = 5.0, 30.0  # without a response before the first warning, and between two warnings

_Result = TypeVar("_Result")


class TransientError(Exception):
    """A fault that may pass.

    Attributes:
        problem: Description of the fault, without credentials.
        status: Status of the HTTP response, if there was one.
        retry_after_s: Pause that the server asks for.
    """

    def __init__(self, problem: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.problem, self.status, self.retry_after_s = problem, status, retry_after_s


class MissingBucketError(FileNotFoundError):
    """A bucket or container that does not exist."""


class Cancel(threading.Event):
    """Set this to cancel a group of requests. They raise CancelledError soon."""

    def set(self) -> None:
        super().set()
        end_overdue()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The state of an object."""

    nbytes: int
    # strong ETag as the server sends it, or else another text that changes with the object, such as its date; None if unknown
    tag: str | None


class Request:
    """An operation on an object, with all its attempts.

    Args:
        url: Url of the object; errors show it without secrets.
        begin, end: The bytes `[begin, end)` that are requested; None if the request is not for a range.
        state: Expected state of the object; None accepts any state.
        nbytes: Number of bytes that the request moves, by which its time limit is set.

    Attributes:
        at: Offset of the next byte that is needed, after `begin` if an earlier attempt was cut short.
        num_ignored: Number of responses that ignored the range.
        is_first: True if no response has reported the object's state since the object was opened.
        limit_s: Time limit of all attempts together.
        sock: Socket of the attempt that is in flight.

    Raises:
        ValueError: The environment variable `TENSORCACHE_REMOTE_TIMEOUT_S` is not a positive number.
    """

    def __init__(
        self,
        url: str,
        begin: int | None = None,
        end: int | None = None,
        state: ObjectInfo | None = None,
        nbytes: int = 0,
    ) -> None:
        self.url, self.begin, self.end, self.state = url, begin, end, state
        self.at = begin or 0
        self.num_ignored = 0
        self.is_first = False
        self.sock: socket.socket | None = None
        self.cancel: Cancel | None = None
        self._begun = time.monotonic()
        self.limit_s = self._first_limit_s = max(timeout_s(), nbytes / _SLOWEST)
        self._num_failed = 0
        self._num_in_vain = 0  # attempts since bytes arrived
        self._tried_at = self.at

    @property
    def deadline(self) -> float:
        """End of the time limit, by `time.monotonic`."""
        return self._begun + self.limit_s

    def watch(self, sock: socket.socket) -> None:
        """Let `end_overdue` end reads from a socket, until `unwatch`. Raise CancelledError if the request is cancelled."""
        self.sock, self.cancel = sock, getattr(_local, "cancel", None)
        _in_flight().add(self)
        try:
            check_cancelled()  # after the request was added, so that no cancellation is missed
        except CancelledError:
            self.unwatch()
            raise

    def unwatch(self) -> None:
        self.sock = None  # a connection that is kept serves other requests next
        _in_flight().discard(self)

    def extend(self, nbytes: int) -> None:
        """Extend the time limit for `nbytes` received bytes, at 64 KiB/s."""
        # announced bytes may never arrive, and a length of gigabytes would allow hours of attempts
        self.limit_s = max(self.limit_s, self._first_limit_s + nbytes / _SLOWEST)

    def error(self, problem: str, status: int | None = None) -> RemoteError:
        """Return a RemoteError whose message contains url, range and fault."""
        where = shown(self.url)
        if self.begin is not None:
            where += f": bytes [{self.begin}, {self.end})"
        error = RemoteError(f"{where}: {problem}")
        error.url, error.begin, error.end, error.status = shown(self.url), self.begin, self.end, status
        return error

    def missing_error(self, noun: str = "object") -> FileNotFoundError:
        """Return the error for an object that does not exist."""
        return FileNotFoundError(errno.ENOENT, f"the server has no such {noun}", shown(self.url))

    def missing_bucket_error(self, bucket: str) -> MissingBucketError:
        """Return the error for an object whose bucket does not exist."""
        problem = f"there is no bucket or container {bucket!r}; check its name, and the endpoint, region or account"
        return MissingBucketError(errno.ENOENT, problem, shown(self.url))

    def changed_error(self, change: str) -> FormatError:
        """Return the error for an object that was changed while open."""
        return FormatError(f"the shard was changed while it was open ({change}); open it again").at(shown(self.url))

    def check(self, received: ObjectInfo) -> ObjectInfo:
        """Return a received state, with the expected tag if it has none. Raise FormatError if it has changed."""
        expected = self.state
        if expected is None:
            return received
        if received.nbytes != expected.nbytes:
            raise self.changed_error(f"it had {expected.nbytes} bytes, now {received.nbytes}")
        tags = [state.tag and state.tag.removeprefix("W/") for state in (received, expected)]
        if all(tags) and tags[0] != tags[1]:  # Apache's tags are weak in the second after a change
            raise self.changed_error(f"its tag was {expected.tag!s:.80}, now {received.tag!s:.80}")
        return ObjectInfo(received.nbytes, received.tag or expected.tag)

    def repeat(self, attempt: Callable[[], _Result]) -> _Result:
        """Return the result of an attempt, repeated after transient faults. Raise RemoteError when no time remains."""
        while True:
            check_cancelled()
            try:
                return attempt()
            except TransientError as exc:
                fault = exc
            self.pause(fault)

    def pause(self, fault: TransientError) -> None:
        """Wait a random part of a doubling pause, plus the server's pause. Raise RemoteError if time is up."""
        check_cancelled()
        self._num_failed += 1
        self._num_in_vain = self._num_in_vain + 1 if self.at == self._tried_at else 0
        self._tried_at = self.at
        pause_s = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._num_in_vain, 10)))
        if fault.retry_after_s is not None:
            pause_s += fault.retry_after_s
        remaining_s = self.deadline - time.monotonic()
        if pause_s >= remaining_s:
            tried = "1 attempt" if self._num_failed == 1 else f"{self._num_failed} attempts"
            problem = f"{fault.problem}; given up after {tried}, with a limit of {self.limit_s:g} s"
            if fault.retry_after_s is not None and fault.retry_after_s >= self.limit_s:
                problem += f"; the server asks for a pause of {fault.retry_after_s:g} s"
            raise self.error(problem + f"; try again, or raise {_TIMEOUT_VARIABLE}", fault.status)
        self._warn_if_late(f"{fault.problem}; trying again for up to {remaining_s:.0f} s more")
        sleep(pause_s)

    def _warn_if_late(self, problem: str) -> None:
        global _warned_s
        now = time.monotonic()
        if now - self._begun >= _LATE_S and now - _warned_s >= _QUIET_S:
            _warned_s = now
            self.warn(problem)

    def warn(self, problem: str) -> None:
        _log.warning("%s", self.error(problem))


_local = threading.local()
_log = logging.getLogger("wds_tensorcache")
_warned_s = -inf  # when a request of this process logged the last warning
_exit = Cancel()  # set when the interpreter ends
# Requests with a socket. A forked child has its own: a shutdown would end the parent's connections.
_in_flight: Callable[[], set[Request]] = per_process(set)


@contextmanager
def bind_cancel(cancel: Cancel) -> Iterator[None]:
    """Let requests of this thread raise CancelledError soon after `cancel` is set."""
    before = getattr(_local, "cancel", None)
    _local.cancel = cancel
    try:
        yield
    finally:
        _local.cancel = before


def check_cancelled() -> None:
    """Raise CancelledError if the request was cancelled or the interpreter ends."""
    cancel = getattr(_local, "cancel", None)
    # the main thread itself makes the requests of functions of `atexit`, after the threads of all executors have ended
    is_ending = _exit.is_set() and threading.current_thread() is not threading.main_thread()
    if is_ending or (cancel is not None and cancel.is_set()):
        raise CancelledError


def sleep(seconds: float) -> None:
    """Wait; raise CancelledError soon after the current request is cancelled."""
    until = time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        check_cancelled()
        time.sleep(min(remaining_s, TICK_S))


def end_overdue() -> None:
    """Shut down the sockets of cancelled and overdue requests. This ends their reads."""
    now = time.monotonic()
    for request in _in_flight().copy():
        cancel, sock = request.cancel, request.sock
        if sock is not None and (_exit.is_set() or (cancel is not None and cancel.is_set()) or now > request.deadline):
            with suppress(OSError):
                # not SSLSocket.shutdown, after which reads return encrypted bytes
                socket.socket.shutdown(getattr(sock, "socket", sock), socket.SHUT_RDWR)


def _cancel_all() -> None:
    """Cancel all requests, unless a thread of the caller may need them."""
    # the interpreter waits for these threads before it ends
    waited_for = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if all(thread.name.startswith("tensorcache") for thread in waited_for):
        _exit.set()


def timeout_s() -> float:
    """Return the time limit of a short request with its retries. Raise ValueError if the variable is invalid."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return _TIMEOUT_S
    try:
        limit = float(text)
    except ValueError:
        limit = 0
    if not limit > 0:
        raise ValueError(f"{_TIMEOUT_VARIABLE}={text!r}, expected a positive number of seconds")
    return limit


# The interpreter waits for the threads of all executors before it calls the functions of `atexit`. It calls `_cancel_all`
# before it waits, because `concurrent.futures`, which `threads` imports, has registered its function earlier.
with suppress(RuntimeError):  # the main thread has ended
    threading._register_atexit(_cancel_all)  # type: ignore[attr-defined]
