"""Find the index of a shard: at the end of the shard, or in its sidecar, a separate file `PATH.index`."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import TypeVar

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.index_paths import sidecar_path
from wds_tensorcache.storage.files import ShardFile

__all__ = ["open_sidecar", "stored"]

_Found = TypeVar("_Found")


def open_sidecar(path: str) -> ShardFile | None:
    """Return the opened sidecar of the shard at `path`; None if there is none."""
    try:
        return ShardFile(sidecar_path(path))
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise


def stored(file: ShardFile, parse: Callable[[ShardFile], _Found | None], *, lenient: bool = False) -> Iterator[_Found]:
    """Yield what `parse` finds in a shard, then what it finds in the shard's sidecar; either may contain an index.

    Args:
        file: The shard.
        parse: Function that returns None, or raises FormatError, for a file without an index.
        lenient: Skip a file that the system cannot read instead of raising OSError.
    """
    for is_sidecar in (False, True):
        found = None
        with contextlib.suppress(FormatError, *[OSError] * lenient):
            each = open_sidecar(file.path) if is_sidecar else file
            found = None if each is None else parse(each)
        if found is not None:
            yield found
