"""Shards in a folder of an object store: collected on local disk, and uploaded while the next shard is written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from wds_tensorcache.arguments import user_level
from wds_tensorcache.shards.dali_index import build_dali_index, list_members
from wds_tensorcache.shards.fingerprint import check_same
from wds_tensorcache.shards.index import MemberColumns, ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path, sidecar_path
from wds_tensorcache.shards.manifest import Listing, ShardEntry
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.urls import name_of, shown
from wds_tensorcache.writing.destination.protocol import Options
from wds_tensorcache.writing.destination.remote_catalog import RemoteCatalog
from wds_tensorcache.writing.destination.remote_shards import load_indexes
from wds_tensorcache.writing.destination.spool import Spool
from wds_tensorcache.writing.destination.uploads import Uploads
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard

__all__ = ["MAX_SHARD_NBYTES", "RemoteDestination"]

# the last sample and the index may make a shard longer, and stores accept 5 GB in one request
MAX_SHARD_NBYTES = 4 << 30


class RemoteDestination:
    """The folder of a pattern in an object store; implements `Destination`.

    There is no lock on the pattern. A shard is created by one conditional request. So if two writers use the same names, the
    second one fails.

    Threads/fork: as for `Destination`; `close` has no effect in a forked child.
    """

    def __init__(self, pattern: ShardPattern, options: Options) -> None:
        self._pattern, self._options = pattern, options
        self._objects = ObjectWriter(pattern.folder)
        self._catalog = RemoteCatalog(self._objects, pattern.folder) if options.manifest else None
        self._uploads = Uploads(self._objects.cancel)
        self._spools: dict[str, Spool] = {}  # of the shards that are written
        self._lost: str | None = None  # shards that the manifest listed, but that do not exist
        self._is_checked = False  # whether the store is known to obey conditions
        self._pid = os.getpid()

    def begin(self, overwrite: bool, resume: bool) -> tuple[FinishedShards, int]:
        """See `Destination`."""
        found = self._uploads.call(self._begin, overwrite, resume)
        if self._lost is not None:
            warnings.warn(self._lost, stacklevel=user_level())
        return found

    def _begin(self, overwrite: bool, resume: bool) -> tuple[FinishedShards, int]:
        # Hazard: the manifest may list shards that other ranks have stored after the folder was listed. So it is read first.
        listing = self._catalog.read() if resume and self._catalog is not None else None
        names = self._objects.list_names(self._pattern.folder)
        existing = self._pattern.existing(names)
        if existing and not overwrite and not resume:
            first = shown(next(iter(existing.values())))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        finished = self._take_over(names, listing) if resume else FinishedShards({}, Files())
        if existing and not resume:
            if self._catalog is not None:
                self._catalog.read()
            self._remove(names, [name_of(url) for url in existing.values()])
        return finished, max(existing) + 1 if resume and existing else 0

    def _take_over(self, names: Mapping[str, int], listing: Listing | None) -> FinishedShards:
        """Load the finished shards of a build; write missing `.idx` files and manifest entries, and remove stale entries."""
        urls = self._pattern.build_shards(names)
        nbytes = {url: names[name_of(url)] for url in urls}
        fingerprints = {} if listing is None else {url: listing.fingerprints.get(name_of(url)) for url in urls}
        indexes = load_indexes(self._objects, nbytes, fingerprints)
        missing: dict[str, tuple[ShardIndex, ShardEntry]] = {}
        for url, index in indexes.items():
            check_same(shown(url), index.fingerprint, self._options.fingerprint)
            entry = ShardEntry(name_of(url), len(index.keys), nbytes[url], index.digest)
            if listing is not None:
                listing.check(shown(url), entry.url, index, entry.nbytes)
                if not entry.is_listed(listing.entries.get(entry.url)):
                    missing[url] = index, entry
            # an `.idx` of an unlisted shard may be stale
            if self._options.dali_index and (url in missing or dali_index_path(entry.url) not in names):
                self._objects.put(dali_index_path(url), build_dali_index(list_members(index)))
        if self._catalog is not None and listing is not None:
            lost = [each for each in listing.entries if self._pattern.is_in_build(each) and each not in names]
            if lost:
                what = f"{shown(self._pattern.locate(lost[0]))} no longer exists"
                what += f", nor do {len(lost) - 1} more shards" * (len(lost) > 1)
                self._lost = f"{what}; removed from the manifest"
            if lost or missing:
                self._check_store()
            self._catalog.change(lost, missing)

        def read_members(url: str, members: MemberColumns) -> list[bytes]:
            file, contents = RemoteFile(url, nbytes[url]), [bytearray(each) for each in members.nbytes.tolist()]
            fetch_many([(file, begin, [into]) for begin, into in zip(members.begin.tolist(), contents, strict=True)])
            return list(map(bytes, contents))

        return FinishedShards(indexes, Files(), read_members)

    def _check_store(self) -> None:
        """Raise RemoteError, before anything is changed, if the store ignores conditions."""
        if not self._is_checked:
            self._objects.check_conditions(self._pattern.folder)
            self._is_checked = True

    def _remove(self, names: Mapping[str, int], shards: list[str]) -> None:
        """Delete shards and their indexes."""
        self._check_store()
        if self._catalog is not None:
            self._catalog.change(shards, {})  # before the shards themselves are deleted
        found = [each for name in shards for each in (name, dali_index_path(name), sidecar_path(name)) if each in names]
        self._objects.delete([self._pattern.locate(name) for name in found])

    @property
    def num_uploads(self) -> int:
        """See `Destination`."""
        return self._uploads.num_waiting

    def check(self) -> None:
        """See `Destination`."""
        self._uploads.check()

    def new_shard(self, number: int) -> UnfinishedShard:
        """See `Destination`; the shard is a spool, which has no name on disk."""
        url = self._pattern.path(number)
        if not self._pattern.is_numbered and number:
            what = f"{shown(url)} is finished; for more shards, use a pattern with a number, such as %06d"
            raise FileExistsError(what)
        spool = self._spools[url] = Spool(shown(url))
        return UnfinishedShard(url, spool)

    def publish(self, shard: UnfinishedShard, index: ShardIndex) -> None:
        """See `Destination`; another thread uploads the shard. Wait if earlier shards are still being uploaded."""
        dali_index = build_dali_index(list_members(index)) if self._options.dali_index else None
        self._uploads.submit(self._upload, shard.path, self._spools.pop(shard.path).content, index, dali_index)

    def _upload(self, url: str, content: Any, index: ShardIndex, dali_index: bytes | None) -> None:
        self._check_store()
        self._objects.create(url, content)
        if dali_index is not None:
            self._objects.put(dali_index_path(url), dali_index)
        if self._catalog is not None:
            entry = ShardEntry(name_of(url), len(index.keys), len(content), index.digest)
            self._catalog.change((), {url: (index, entry)})

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the uploads; a second interrupt during this cancels them."""
        if self._pid == os.getpid():
            self._uploads.close(error)
