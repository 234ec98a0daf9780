"""Paths of a shard's indexes, which are files next to it, and a check that an index may replace the file at its path."""

from __future__ import annotations

import os

from wds_tensorcache.shards.tar import BLOCK, is_header
from wds_tensorcache.storage.files import ShardFile

SIDECAR_SUFFIX = ".index"
DALI_SUFFIX = ".idx"


def sidecar_path(path: str) -> str:
    return path + SIDECAR_SUFFIX


def dali_index_path(path: str) -> str:
    """Return the path at which DALI's tools put the index of the shard at `path`."""
    return os.path.splitext(path)[0] + DALI_SUFFIX


def check_replaceable(*paths: str) -> None:
    """Raise FileExistsError if an index must not replace one of the paths: it is a tar, or not an ordinary file."""
    for path in filter(os.path.exists, paths):
        if not os.path.isfile(path):
            raise FileExistsError(f"{path} is not a file, but the index of a shard needs this name; move it away")
        file = ShardFile(path)
        if is_header(file.read(0, min(BLOCK, file.nbytes))):
            problem = f"{path} is a tar, but the index of another shard needs this name"
            raise FileExistsError(f"{problem}; rename the tar so that its name ends in .tar")
