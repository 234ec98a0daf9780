"""The index that a shard has, at its end or else in its sidecar; and files that no index may take the place of."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.tar.archive import BLOCK
from wds_tensorcache.shards.tar.fields import adds_up
from wds_tensorcache.storage.files import ShardFile

__all__ = ["check_replaceable", "open_sidecar", "sidecar_path", "stored"]

_Found = TypeVar("_Found")


def sidecar_path(path: str) -> str:
    """Return where the index of the shard at `path` lies if it is not behind the shard."""
    return path + ".index"


def open_sidecar(path: str) -> ShardFile | None:
    """Return the sidecar of the shard at `path`; None if there is none, perhaps as no file can have so long a name."""
    try:
        return ShardFile(sidecar_path(path))
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise


def stored(file: ShardFile, parse: Callable[[ShardFile], _Found | None], *, lenient: bool = False) -> Iterator[_Found]:
    """Yield what `parse` finds in a shard, and then in its sidecar; either may end in an index.

    Args:
        file: The shard.
        parse: Returns None, or raises FormatError, where there is no index.
        lenient: Take a file that the system cannot read for one without an index.
    """
    for is_sidecar in (False, True):
        found = None
        with contextlib.suppress(FormatError, *[OSError] * lenient):
            each = open_sidecar(file.path) if is_sidecar else file
            found = None if each is None else parse(each)
        if found is not None:
            yield found


def check_replaceable(*paths: str) -> None:
    """Raise FileExistsError if a file that an index would replace is a shard, or not a file at all."""
    for path in filter(os.path.exists, paths):
        if not os.path.isfile(path):
            raise FileExistsError(f"{path} is no file, and an index of a shard would have this name: move it away")
        file = ShardFile(path)
        if adds_up(file.read(0, min(BLOCK, file.nbytes))):
            what = f"{path} is a tar, and an index of a shard would have this name"
            raise FileExistsError(f"{what}: rename one of the two, so that shards end in .tar")
