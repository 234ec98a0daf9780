"""Indexes of shards in an object store, for a writer that resumes after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.footer import parse_index, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import sidecar_path
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.threads import Threads, run_in_order
from wds_tensorcache.storage.urls import shown

__all__ = ["load_indexes"]

_NUM_THREADS = 16
_TAIL_NBYTES = 1 << 17  # contains the index of most shards


def load_indexes(
    objects: ObjectWriter, nbytes: Mapping[str, int], fingerprints: Mapping[str, Any]
) -> dict[str, ShardIndex]:
    """Return the indexes of shards by url, in the given order; several are read at once.

    Args:
        objects: The bucket.
        nbytes: Lengths of the shards by url.
        fingerprints: Fingerprints by url for indexes that have none.

    Raises:
        FormatError: A shard has no index, or a damaged one.
        RemoteError: A request failed.
    """

    def load(url: str) -> tuple[str, ShardIndex]:
        index = _load_index(objects, url, nbytes[url])
        return url, index if index.fingerprint is not None else replace(index, fingerprint=fingerprints.get(url))

    with Threads(min(_NUM_THREADS, len(nbytes) or 1), "tensorcache-indexes") as pool:
        return dict(run_in_order(nbytes, load, pool, _NUM_THREADS))


def _load_index(objects: ObjectWriter, url: str, nbytes: int) -> ShardIndex:
    begins = max(0, nbytes - _TAIL_NBYTES)
    tail = objects.read_range(url, begins, nbytes)

    def read(begin: int, end: int) -> bytes:
        return tail[begin - begins : end - begins] if begin >= begins else objects.read_range(url, begin, end)

    try:
        index = read_footer(read, nbytes)
        if index is None:
            found = objects.read(sidecar_path(url))
            index = None if found is None else parse_index(found[0], nbytes)
    except FormatError as exc:
        raise exc.at(shown(url)) from exc
    if index is None:
        what = f"the shard of {nbytes:,} bytes has no index, or a damaged one; call tc.write_index({shown(url)!r})"
        raise FormatError(what, kind="index").at(shown(url))
    return index
