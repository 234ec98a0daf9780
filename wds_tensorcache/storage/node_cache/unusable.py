"""Internal exceptions that mean "bypass the cache"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CacheUnusable(Exception):
    """The folder or its disk cannot be used.

    Attributes:
        rest_s: Time in seconds after which it is worth trying again.
    """

    rest_s = 1.0


class NoRoom(CacheUnusable):
    """The limit is too small for one read, or other files have filled the disk."""


class Stopped(CacheUnusable):
    """Another process has locked blocks for too long; a debugger may have stopped it."""

    rest_s = 60.0


class Busy(CacheUnusable):
    """There is no room at the moment, because all files that could be evicted are being filled."""


@contextmanager
def errors_of_disk() -> Iterator[None]:
    """Raise CacheUnusable for an OSError; not for use around requests, because errors of servers are OSErrors, too."""
    try:
        yield
    except OSError as exc:
        raise CacheUnusable(str(exc)) from exc
