"""Finished shards of a writer: find their samples by key, and write the sidecars that a killed writer did not write."""

from __future__ import annotations

import contextlib
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.shards.after_end import load_whole
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.fingerprint import check_same
from wds_tensorcache.shards.index import MemberColumns, ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.manifest import Catalog, FoundShard, check_listed
from wds_tensorcache.shards.names import older_key
from wds_tensorcache.storage.files import Files
from wds_tensorcache.writing.pattern import ShardPattern

__all__ = ["FinishedShards", "list_new", "load_finished", "take_over"]


class FinishedShards:
    """Indexes of finished shards by path, in the order of their samples.

    Args:
        indexes: Indexes by path or url.
        files: The opened shards, if they are local files.
        read_members: Function that reads all members with one suffix of the shard at a url, if the shards are not local files.
            The members of the shard read last stay in memory.
    """

    def __init__(
        self,
        indexes: Mapping[str, ShardIndex],
        files: Files,
        read_members: Callable[[str, MemberColumns], list[bytes]] | None = None,
    ) -> None:
        self.indexes, self.files = indexes, files
        self._read_members = read_members
        self._last: tuple[tuple[str, str], list[bytes]] | None = None  # path and suffix, and all such members
        self._paths = list(indexes)
        self._table = KeyTable((index.keys, None) for index in indexes.values())
        self._starts = [0, *accumulate(len(index.keys) for index in indexes.values())]

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: str) -> bool:
        return bool(self._table.find(key))

    def find(self, key: str) -> list[tuple[str, int]]:
        """Return the shard's path and the row (number in the shard) of each sample with a key."""
        numbers = [(position, bisect_right(self._starts, position) - 1) for position in self._table.find(key)]
        return [(self._paths[number], position - self._starts[number]) for position, number in numbers]

    def has_cache(self, path: str, row: int) -> bool:
        """Return whether a sample has a cache; without one, the sample consists of other members only."""
        caches = self.indexes[path].caches.values()
        return any(cache.rows is None or bool((cache.rows == row).any()) for cache in caches)

    def stored_key(self, key: str) -> str:
        """Return the key, or the one that an earlier version of `safe_key` made of the same name if a sample has it."""
        older = older_key(key)
        return key if older is None or older not in self else older

    def is_finished(self, key: str) -> bool:
        """Return whether the key has a sample, and all samples with this key have a cache."""
        places = self.find(key)
        return bool(places) and all(self.has_cache(*place) for place in places)

    def origin(self, path: str, row: int) -> tuple[int, str | None]:
        """Return the origin of a sample; see `ShardIndex.origin`."""
        return self.indexes[path].origin(row)

    def read_member(self, path: str, row: int, suffix: str) -> bytes | None:
        """Return a member of a sample; None if the sample has no member with that suffix."""
        member = self.indexes[path].members.get(suffix)
        at = -1 if member is None else member.find(np.array([row])).item()
        if member is None or at < 0:
            return None
        if self._read_members is not None:
            if self._last is None or self._last[0] != (path, suffix):
                self._last = (path, suffix), self._read_members(path, member)
            return self._last[1][at]
        begin = member.begin.item(at)
        return self.files.get(path).read(begin, begin + member.nbytes.item(at))


def load_finished(
    shards: Mapping[str, tuple[FoundShard | None, Mapping[str, Any] | None]], files: Files | None = None
) -> FinishedShards:
    """Load the indexes of finished shards.

    Args:
        shards: By path, what a manifest lists, and the fingerprint for an index that has none.
        files: The opened shards.

    Raises:
        FormatError: A shard is damaged, or differs from what the manifest lists.
    """
    files, indexes = files or Files(), dict[str, ShardIndex]()
    for path, (listed, fingerprint) in shards.items():
        with contextlib.suppress(OSError):  # `load_whole` reports it
            files.expect(path)
        index = load_whole(path)
        if listed is not None and listed.entry is not None:
            check_listed(path, listed.entry, listed.manifest, num_samples=len(index.keys), digest=index.digest)
        indexes[path] = index if index.fingerprint is not None else replace(index, fingerprint=fingerprint)
    return FinishedShards(indexes, files)


def take_over(
    pattern: ShardPattern,
    paths: list[str],
    catalog: Catalog | None,
    fingerprint: Mapping[str, Any] | None,
    dali_index: bool,
    fsync: bool,
) -> FinishedShards:
    """Load the finished shards of a build; write missing `.idx` files and manifest entries, and remove stale entries.

    Raises:
        FormatError: A shard or the manifest is damaged.
        StaleCacheError: A shard has another fingerprint.
    """
    listing = None if catalog is None else catalog.read()
    made = {} if listing is None else listing.fingerprints
    finished = load_finished({path: (None, made.get(os.path.basename(path))) for path in paths})
    unlisted = {path: i for path, i in finished.indexes.items() if listing is not None and not listing.lists(path, i)}
    for path, index in finished.indexes.items():
        check_same(path, index.fingerprint, fingerprint)
        if listing is not None:
            listing.check(path, os.path.basename(path), index, os.path.getsize(path))
        # an `.idx` of an unlisted shard may be stale
        if dali_index and (path in unlisted or not os.path.exists(dali_index_path(path))):
            write_dali_index(dali_index_path(path), index, fsync)
    if catalog is not None and listing is not None:
        lost = [url for url in listing.entries if pattern.is_in_build(url) and not os.path.exists(pattern.locate(url))]
        if lost:
            what = f"{pattern.locate(lost[0])} no longer exists" + f", nor do {len(lost) - 1} more shards" * (
                len(lost) > 1
            )
            warnings.warn(f"{what}; removed from the manifest", stacklevel=user_level())
        if lost or unlisted:
            with catalog.changed() as listing:
                listing.remove(*lost)
                for path, index in unlisted.items():
                    listing.add(path, index)
    return finished


def list_new(pattern: ShardPattern, known: FinishedShards, catalog: Catalog | None) -> dict[str, ShardIndex]:
    """Return the indexes, by path, of the finished shards of a build that are not `known`; list them in the manifest.

    Hazard: on a file system without locks, ranks that change the manifest at the same time lose each other's entries. Every
    rank calls this after its last shard, so that the last change of the manifest lists all shards.
    """
    new = {path: load_whole(path) for path in pattern.build_shards() if path not in known.indexes}
    while catalog is not None:
        entries = catalog.read().entries
        unlisted = [path for path in pattern.build_shards() if os.path.basename(path) not in entries]
        if not unlisted:
            break
        with catalog.changed() as listing:
            for path in unlisted:
                listing.add(path, new[path] if path in new else load_whole(path))
    return new
