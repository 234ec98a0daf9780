"""Names in a folder of shards, and the shards of a build, in a local folder or in an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import Catalog
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.urls import is_url, join_url, name_of
from wds_tensorcache.writing.destination.remote_shards import load_indexes
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards, list_new

__all__ = ["list_build", "names_in"]


def names_in(folder: str) -> list[str]:
    """Return the sorted names of the files in a folder; none if there is no such folder."""
    if is_url(folder):
        return list(ObjectWriter(join_url(folder, "")).list_names(folder))
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def list_build(pattern: ShardPattern, known: FinishedShards, options: Mapping[str, Any]) -> dict[str, ShardIndex]:
    """Return the indexes, by path or url, of the finished shards of a build that are not `known`.

    List them in the manifest of a local folder, as `list_new` says. In an object store, no entry is lost.

    Args:
        options: Those of the `ShardWriter` that has written the shards of this rank.
    """
    folder = pattern.folder or os.curdir
    if not is_url(folder):
        catalog = Catalog(folder, options.get("fsync", True)) if options.get("manifest", True) else None
        return list_new(pattern, known, catalog)
    objects = ObjectWriter(folder)
    names = objects.list_names(folder)
    new = [url for url in pattern.build_shards(names) if url not in known.indexes]
    return load_indexes(objects, {url: names[name_of(url)] for url in new}, {})
