"""The policy of all requests: faults to retry, pauses, time limits, and cancellation by the caller.

The time limit of a request, with all its retries, is 60 s. The environment variable `TENSORCACHE_REMOTE_TIMEOUT_S` sets
another limit. A request of more than 4 MiB has the time that it takes at 64 KiB/s, if that is longer.

A request that fails for 5 s logs a warning; a process logs at most one in 30 s. The logger is `wds_tensorcache`, whose warnings
Python prints on stderr by default.
"""

from __future__ import annotations

import email.utils
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from wds_tensorcache.errors import FormatError, RemoteError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.urls import shown

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_TIMEOUT_VARIABLE = "TENSORCACHE_REMOTE_TIMEOUT_S"
_TIMEOUT_S = 60.0
_SLOWEST = 64 * 1024  # bytes per second below which a large request is given up
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
_LATE_S, _QUIET_S = 5.0, 30.0  # without a response before the first warning, and between two warnings
_TICK_S = 0.1  # how often a pause looks whether it was cancelled


class Target:
    """The object and the bytes of a request, for its errors.

    Args:
        url: Url of the object; errors show it without credentials.
        begin, end: The bytes `[begin, end)` that are requested; None for another request.
    """

    __slots__ = ("begin", "end", "url")

    def __init__(self, url: str, begin: int | None = None, end: int | None = None) -> None:
        self.url, self.begin, self.end = url, begin, end

    def error(self, problem: str, status: int | None = None) -> RemoteError:
        """Return a RemoteError that says url, range and fault."""
        where = shown(self.url)
        if self.begin is not None:
            where += f": bytes [{self.begin}, {'end' if self.end is None else self.end})"
        error = RemoteError(f"{where}: {problem}")
        error.url, error.begin, error.end, error.status = shown(self.url), self.begin, self.end, status
        return error

    def missing(self) -> FileNotFoundError:
        """Return the error for an object that does not exist."""
        return FileNotFoundError(errno.ENOENT, "the server has no such object", shown(self.url))

    def check_inside(self, expected: ObjectInfo) -> None:
        """Raise RemoteError if the requested bytes end after the end of the object."""
        if self.end is not None and self.end > expected.nbytes:
            raise self.error(f"the object has only {expected.nbytes} bytes")

    def check_same(self, state: ObjectInfo, expected: ObjectInfo) -> None:
        """Raise FormatError if an object is not the expected one, as far as is known of both."""
        if state.nbytes != expected.nbytes:
            raise self.changed(f"it had {expected.nbytes} bytes, now {state.nbytes}")
        if state.tag is not None and expected.tag is not None and state.tag != expected.tag:
            raise self.changed(f"its tag was {expected.tag:.80}, now {state.tag:.80}")

    def changed(self, change: str) -> FormatError:
        """Return the error for an object that has changed since it was opened."""
        return FormatError(f"the shard was changed while it was open ({change}); open it again").at(shown(self.url))


class TransientError(Exception):
    """A fault that may pass.

    Attributes:
        what: Description of the fault, without credentials.
        status: Status of the HTTP response, if there was one.
        retry_after_s: Pause that the server asks for.
    """

    def __init__(self, problem: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.problem, self.status, self.retry_after_s = problem, status, retry_after_s


class CancelledError(Exception):
    """A request that its caller cancelled."""


class Cancel:
    """Set this to cancel a group of requests."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


_EXIT = Cancel()  # set when the interpreter ends
_local = threading.local()
_log = logging.getLogger("wds_tensorcache")
_warned_s = -inf  # when a request of this process logged the last warning


@contextmanager
def cancellable(cancel: Cancel) -> Iterator[None]:
    """End requests of this thread with CancelledError soon after `cancel` is set."""
    before = getattr(_local, "cancel", None)
    _local.cancel = cancel
    try:
        yield
    finally:
        _local.cancel = before


def check_cancelled() -> None:
    """Raise CancelledError if the current request was cancelled."""
    cancel = getattr(_local, "cancel", None)
    if _EXIT.is_set or (cancel is not None and cancel.is_set):
        raise CancelledError


def timeout_s() -> float:
    """Return the time limit of one request with its retries, in seconds.

    Raises:
        ValueError: The environment variable is not a positive number.
    """
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


class Attempts:
    """The attempts of one request: how much time is left, and the pauses between them.

    Args:
        target: The object and the bytes, for errors.
        nbytes: Number of bytes that the request moves; 0 if it is not known.

    Raises:
        ValueError: The environment variable `TENSORCACHE_REMOTE_TIMEOUT_S` is not a positive number.

    Threads: one.
    """

    def __init__(self, target: Target, nbytes: int = 0) -> None:
        self.target = target
        self._begun = time.monotonic()
        self.limit_s = self._first_limit_s = timeout_s()
        self.deadline = self._begun + self.limit_s
        self.allow(nbytes)
        self._num_failed = 0  # since there was progress
        self._num_all = 0

    def allow(self, nbytes: int) -> None:
        """Extend the time limit to the time that `nbytes` bytes take at 64 KiB/s."""
        self.limit_s = max(self.limit_s, nbytes / _SLOWEST)
        self.deadline = self._begun + self.limit_s

    def allow_after(self, nbytes: int) -> None:
        """Extend the time limit by the time that `nbytes` bytes, which have arrived, take at 64 KiB/s.

        Announced bytes may never arrive, and a length of gigabytes would allow hours of attempts.
        """
        self.limit_s = max(self.limit_s, self._first_limit_s + nbytes / _SLOWEST)
        self.deadline = self._begun + self.limit_s

    def remaining_s(self) -> float:
        """Return the time that remains; negative if it is over."""
        return self.deadline - time.monotonic()

    def progress(self) -> None:
        """Record that some bytes arrived, so that the next pause is short again."""
        self._num_failed = 0

    def pause(self, fault: TransientError) -> None:
        """Wait before the next attempt: a random part of a time that doubles (full jitter), or the pause that the server asks
        for.

        Raises:
            RemoteError: No time remains for another attempt.
            CancelledError: The caller cancelled the request.
        """
        self._num_all += 1
        pause_s = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failed))
        self._num_failed += 1
        if fault.retry_after_s is not None:
            pause_s += fault.retry_after_s
        if pause_s >= self.remaining_s():
            tried = "1 attempt" if self._num_all == 1 else f"{self._num_all} attempts"
            problem = f"{fault.problem}; given up after {tried}, with a limit of {self.limit_s:g} s"
            if fault.retry_after_s is not None and fault.retry_after_s >= self.limit_s:
                problem += f"; the server asks for a pause of {fault.retry_after_s:g} s"
            raise self.target.error(problem + f"; try again, or raise {_TIMEOUT_VARIABLE}", fault.status)
        warn_of_delay(
            self.target, self._begun, f"{fault.problem}; trying again for up to {self.remaining_s():.0f} s more"
        )
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            check_cancelled()
            time.sleep(min(left, _TICK_S))


def warn(target: Target, problem: str) -> None:
    _log.warning("%s", target.error(problem))


def warn_of_delay(target: Target, begun_s: float, problem: str) -> None:
    """Log a warning if a request that began at `begun_s` of `time.monotonic` takes long."""
    global _warned_s
    now = time.monotonic()
    if now - begun_s >= _LATE_S and now - _warned_s >= _QUIET_S:
        _warned_s = now
        warn(target, problem)


def parse_retry_after(text: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, as a number or a date; None if it has neither."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        until = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, until.timestamp() - time.time())


def cancel_at_exit() -> None:
    """End all requests of this process soon, with CancelledError."""
    _EXIT.is_set = True
