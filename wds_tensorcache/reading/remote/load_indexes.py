"""Indexes of many remote shards, loaded several at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.remote.fetch import run_all

__all__ = ["load_indexes"]


def load_indexes(shards: Iterable[Shard]) -> None:
    """Load the indexes of the remote shards among `shards` that are not loaded. Other shards load theirs on first use.

    Raises:
        MissingShardError, FormatError, RemoteError: The first error in the order of the shards.
    """
    waiting = [shard for shard in shards if shard.is_remote and not shard.is_loaded]
    # Hazard: a scan has its own threads, which need threads of the pool. If all of those ran scans, none would end.
    are_loaded = run_all([partial(shard.load, may_scan=False) for shard in waiting]) if len(waiting) > 1 else [False]
    for shard, is_loaded in zip(waiting, are_loaded, strict=False):
        if not is_loaded:
            shard.load()
