"""The finished shards of a writer, and their samples by key."""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import FormatError, StaleCacheError
from wds_tensorcache.shards.after_end import load_whole
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.fingerprint import check_same
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.manifest import (
    MANIFEST,
    FoundShard,
    Manifest,
    ShardEntry,
    change_manifest,
    check_listed,
    entry_of,
)
from wds_tensorcache.shards.names import dali_index_path, older_key
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.folder import Folder, folder_of
from wds_tensorcache.storage.urls import is_url, name_of, shown
from wds_tensorcache.writing.pattern import ShardPattern


class FinishedShards:
    """The indexes of finished shards, by path or url, in order."""

    def __init__(self, indexes: Mapping[str, ShardIndex], files: Files) -> None:
        self.indexes, self.files = indexes, files
        # url and suffix of the members that were read last, and all members with this suffix in the shard at this url
        self._last: tuple[tuple[str, str], list[bytes]] | None = None
        self._paths = list(indexes)
        self._table = KeyTable((index.keys, None) for index in indexes.values())
        self._starts = [0, *accumulate(len(index.keys) for index in indexes.values())]

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: str) -> bool:
        return bool(self._table.find(key))

    def find(self, key: str) -> list[tuple[str, int]]:
        """Return (path of the shard, row) for each sample with this key."""
        numbers = [(position, bisect_right(self._starts, position) - 1) for position in self._table.find(key)]
        return [(self._paths[number], position - self._starts[number]) for position, number in numbers]

    def has_cache(self, path: str, row: int) -> bool:
        caches = self.indexes[path].caches.values()
        return any(cache.rows is None or bool((cache.rows == row).any()) for cache in caches)

    def stored_key(self, key: str) -> str:
        """Return the `older_key` if a sample has it, else `key`."""
        older = older_key(key)
        return key if older is None or older not in self else older

    def is_finished(self, key: str) -> bool:
        places = self.find(key)
        return bool(places) and all(self.has_cache(*place) for place in places)

    def read_member(self, path: str, row: int, suffix: str) -> bytes | None:
        """Return a member of a sample, or None if it is missing."""
        member = self.indexes[path].members.get(suffix)
        at = -1 if member is None else member.find(np.array([row])).item()
        if member is None or at < 0:
            return None
        if is_url(path):  # a request for each member would take too long
            if self._last is None or self._last[0] != (path, suffix):
                begins = member.begin.astype(np.int64)
                ends = begins + member.nbytes.astype(np.int64)
                self._last = (path, suffix), list(self.files.get(path).read_many(begins.tolist(), ends.tolist()))
            return self._last[1][at]
        begin = member.begin.item(at)
        return self.files.get(path).read(begin, begin + member.nbytes.item(at))

    def entry(self, path: str) -> ShardEntry:
        index = self.indexes[path]
        if is_url(path):
            return ShardEntry(name_of(path), len(index.keys), self.files.get(path).nbytes, index.digest)
        return entry_of(path, index)


def load_finished(shards: Iterable[FoundShard], files: Files | None = None) -> FinishedShards:
    """Load the indexes of finished shards.

    Raises FormatError if a shard is damaged, or differs from its entry. An index without a fingerprint gets that of the
    `FoundShard`.
    """
    files, indexes = files or Files(), dict[str, ShardIndex]()
    by_path = {shard.path: shard for shard in shards}
    remote = _load_remote(list(filter(is_url, by_path)), files)
    for path, shard in by_path.items():
        if (index := remote.get(path)) is None:
            with contextlib.suppress(OSError):  # `load_whole` reports it
                files.expect(path)
            index = load_whole(path)
        if shard.entry is not None:
            check_listed(path, shard.entry, shard.manifest, num_samples=len(index.keys), digest=index.digest)
        indexes[path] = index if index.fingerprint is not None else replace(index, fingerprint=shard.fingerprint)
    return FinishedShards(indexes, files)


def _load_remote(urls: list[str], files: Files) -> dict[str, ShardIndex]:
    if not urls:
        return {}
    from wds_tensorcache.shards.remote_indexes import RemoteIndexes
    from wds_tensorcache.storage.remote.fetch import run_all

    def load(url: str) -> ShardIndex:
        index = RemoteIndexes().load(files.get(url), may_scan=False)
        if index is None:
            problem = f"the shard has no index, or a damaged one; call tc.write_index({shown(url)!r})"
            raise FormatError(problem, kind="index").at(shown(url))
        return index

    return dict(zip(urls, run_all([partial(load, url) for url in urls]), strict=True))


def take_over(
    folder: Folder,
    pattern: ShardPattern,
    names: list[str],
    shards: list[str],
    manifest: Manifest | None,
    fingerprint: Mapping[str, Any] | None,
    dali_index: bool,
) -> FinishedShards:
    """Load the finished shards of a build, and write missing `.idx` files.

    Missing manifest entries are added, and stale entries removed. `names` are all files in the folder, and `shards` the
    finished shards among them. `manifest` was read before `names`; it is None if the writer has no manifest. See
    `load_finished` and `check_same` for errors.
    """
    listed = Manifest() if manifest is None else manifest
    finished = load_finished(
        FoundShard(folder.locate(name), fingerprint=listed.fingerprints.get(name)) for name in shards
    )
    present, unlisted = set(names), list[tuple[ShardEntry, ShardIndex]]()
    for name, (path, index) in zip(shards, finished.indexes.items(), strict=True):
        try:
            check_same(shown(path), index.fingerprint, fingerprint)
        except StaleCacheError as exc:
            raise StaleCacheError(f"{exc}; write into another folder, or delete this one") from exc
        entry, before = finished.entry(path), listed.entries.get(name)
        if before is not None and before.nbytes == entry.nbytes:  # an entry with another length is only stale
            check_listed(path, before, folder.locate(MANIFEST), digest=index.digest)
        # old writers omit the digest
        is_listed = manifest is None or (before is not None and replace(before, digest=entry.digest) == entry)
        if not is_listed:
            unlisted.append((entry, index))
        # an `.idx` of an unlisted shard may be stale
        if dali_index and not (is_listed and dali_index_path(name) in present):
            write_dali_index(folder, name, index)
    lost = [url for url in listed.entries if pattern.is_in_build(url) and url not in present]
    if lost:
        problem = f"{shown(folder.locate(lost[0]))} no longer exists"
        problem += f", nor do {len(lost) - 1} more shards" * (len(lost) > 1)
        warnings.warn(f"{problem}; removed from the manifest", stacklevel=user_level())
    if lost or unlisted:

        def change(manifest: Manifest) -> None:
            # Hazard: another writer may have stored and listed a lost shard again. So look again.
            present = set(folder.names()) if lost else set()
            manifest.remove(*(url for url in lost if url not in present))
            for entry, index in unlisted:
                if manifest.entries.get(entry.url) == listed.entries.get(entry.url):
                    manifest.add(entry, index)

        change_manifest(folder, change)
    return finished


def list_new(pattern: ShardPattern, finished: FinishedShards, options: Mapping[str, Any]) -> dict[str, ShardIndex]:
    """Add the finished shards that are not in `finished` to the manifest.

    `options` are the options of the `ShardWriter` that has written the shards of this rank. Return the indexes by path.
    """
    # NFS has no locks for folders, so ranks that change the manifest at the same time lose each other's entries. Every rank
    # calls this after its last shard, so that the last change of the manifest lists all shards.
    folder = folder_of(pattern.folder, options.get("fsync", True))

    def load_unless(is_known: Callable[[str], bool]) -> FinishedShards:
        names = (name for name in pattern.build_shards(folder.names()) if not is_known(name))
        return load_finished(FoundShard(folder.locate(name)) for name in names)

    new = load_unless(lambda name: folder.locate(name) in finished.indexes)
    while options.get("manifest", True) and (unlisted := load_unless(Manifest.of(folder).entries.__contains__)).indexes:

        def change(manifest: Manifest, unlisted: FinishedShards = unlisted) -> None:
            for path, index in unlisted.indexes.items():
                entry = unlisted.entry(path)
                if entry.url not in manifest.entries:
                    manifest.add(entry, index)

        change_manifest(folder, change)
    return dict(new.indexes)
