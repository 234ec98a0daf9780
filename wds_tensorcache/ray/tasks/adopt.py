"""Shards that killed or failed builds have finished, but not listed: those that double no key join the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wds_tensorcache.ray.tasks.folder import WriteFolder
from wds_tensorcache.reading.find_shards import shard_names
from wds_tensorcache.shards.fingerprint import check_same
from wds_tensorcache.shards.manifest import Manifest
from wds_tensorcache.storage.urls import shown


def adopt(folder: WriteFolder, manifest: Manifest, fingerprint: Mapping[str, Any]) -> None:
    """Add unlisted shards to the content of a manifest, as long as no key occurs twice.

    Two attempts of one task may both have finished shards, with the same keys in other combinations. Shards with more samples
    come first. A shard with a key that is already there is left out, so its other samples are computed again.

    Raises:
        StaleCacheError: A shard has another fingerprint.
        FormatError: A shard is damaged.
    """
    unlisted = [name for name in shard_names(folder.names()) if name not in manifest.entries]
    indexes = folder.load((*manifest.entries, *unlisted))
    for name, index in indexes.items():
        fingerprint_of_shard = index.fingerprint if index.fingerprint is not None else manifest.fingerprint(name)
        check_same(f"{shown(folder.path)}/{name}", fingerprint_of_shard, fingerprint)
    listed_keys = {key for name in manifest.entries for key in indexes[name].keys}
    for name in sorted(unlisted, key=lambda name: (-len(indexes[name].keys), name)):
        keys = list(indexes[name].keys)
        if listed_keys.isdisjoint(keys):
            folder.add(manifest, name, indexes[name])
            listed_keys.update(keys)
