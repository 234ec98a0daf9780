"""Shards in a local folder: named by a rename, listed in a manifest that several processes change under a lock."""

from __future__ import annotations

import os

from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import check_replaceable, dali_index_path
from wds_tensorcache.shards.manifest import Catalog
from wds_tensorcache.storage.output import Output
from wds_tensorcache.writing.destination.protocol import Options
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.pattern_lock import WriterLock
from wds_tensorcache.writing.resume import FinishedShards, take_over
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard

__all__ = ["LocalDestination"]


class LocalDestination:
    """The folder of a pattern, made if it is missing, and the lock on the pattern; implements `Destination`.

    Raises:
        FileExistsError: Another writer writes shards with the same names.

    Threads/fork: as for `Destination`; `close` has no effect in a forked child.
    """

    def __init__(self, pattern: ShardPattern, options: Options) -> None:
        self._pattern, self._options = pattern, options
        self._lock = WriterLock(pattern)
        self._catalog = Catalog(pattern.folder or ".", options.fsync) if options.manifest else None

    def begin(self, overwrite: bool, resume: bool) -> tuple[FinishedShards, int]:
        """See `Destination`."""
        pattern, catalog = self._pattern, self._catalog
        existing = pattern.existing()
        if existing and not overwrite and not resume:
            first = next(iter(existing.values()))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        if self._lock.is_locked:
            pattern.remove_strays()
        paths = list(existing.values())
        of = self._options
        shards = pattern.build_shards() if resume else []
        finished = take_over(pattern, shards, catalog, of.fingerprint, of.dali_index, of.fsync)
        if paths and not resume:
            pattern.check_removable(paths)
            if catalog is not None:
                catalog.remove(*map(os.path.basename, paths))  # before the shards themselves are deleted
            pattern.remove(paths)
        return finished, max(existing) + 1 if resume and existing else 0

    @property
    def num_uploads(self) -> int:
        """See `Destination`."""
        return 0

    def check(self) -> None:
        """See `Destination`; shards are made visible in the caller's thread."""

    def new_shard(self, number: int) -> UnfinishedShard:
        """See `Destination`."""
        path = self._pattern.path(number)
        if os.path.exists(path):
            if not self._pattern.is_numbered and number:
                raise FileExistsError(f"{path} is finished; for more shards, use a pattern with a number, such as %06d")
            raise FileExistsError(f"{path} was created after this writer started; write to another folder")
        if self._options.dali_index:
            check_replaceable(dali_index_path(path))
        return UnfinishedShard(path, Output(path, self._options.fsync))

    def publish(self, shard: UnfinishedShard, index: ShardIndex) -> None:
        """See `Destination`; `shard` already has its name."""
        if self._options.dali_index:
            write_dali_index(dali_index_path(shard.path), index, self._options.fsync)
        if self._catalog is not None:
            self._catalog.add(shard.path, index)

    def close(self, error: BaseException | None = None) -> None:
        """Release the lock on the pattern."""
        self._lock.close()
