"""Errors of the reader of pickles, with advice for users that trust the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError


@contextlib.contextmanager
def advising(remedy: str) -> Iterator[None]:
    """Add `remedy` to the reason of an UnsafeSkeletonError; raise FormatError for errors of zipfile and pickletools."""
    try:
        yield
    except UnsafeSkeletonError as exc:
        exc.reason = (
            f"the pickle names {exc.needs!r:.200}, which is not run{remedy}" if exc.needs else exc.reason + remedy
        )
        raise
    except TensorCacheError:
        raise
    except Exception as exc:  # zipfile and pickletools raise many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc
