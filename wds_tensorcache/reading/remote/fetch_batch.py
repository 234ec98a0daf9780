"""The reads of a batch from remote shards: all ranges at once, straight into the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.node_cache.cache import read_remote

__all__ = ["BatchFetch", "add_member", "add_skeleton", "fetch_skeletons"]

_Check = Callable[[bytes], object]


class BatchFetch:
    """Ranges of remote shards, collected one by one and then fetched at once.

    Requests of several batches share the 128 that a process has in flight.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[Any, int, list[Any]]] = []
        self._extents: list[tuple[bytearray, _Check]] = []  # bytes that are not part of a batch's memory

    def add_into(self, shard: Shard, begin: int, buffers: list[Any]) -> None:
        """Read from offset `begin` of a shard on into 1-D byte buffers, in order."""
        self._ranges.append((shard.files.remote(shard.path), begin, buffers))

    def add_extent(self, shard: Shard, begin: int, end: int, use: _Check) -> None:
        """Read the bytes `[begin, end)` of a shard; `run` then calls `use` with them."""
        stored = bytearray(end - begin)
        self.add_into(shard, begin, [stored])
        self._extents.append((stored, use))

    def run(self) -> None:
        """Fetch all ranges, and call the functions that use some of them, in the order in which they were added.

        Raises:
            MissingShardError: A shard does not exist any more.
            FormatError: A shard has changed, or does not match its index.
            RemoteError: A request failed.
        """
        ranges, extents = self._ranges, self._extents
        self._ranges, self._extents = [], []
        read_remote(ranges)
        for stored, use in extents:
            use(bytes(stored))


def fetch_skeletons(wanted: Iterable[tuple[int, Shard, int]]) -> dict[int, bytes]:
    """Return the bytes at `Shard.skeleton_extent` of samples, by their positions in a batch.

    Args:
        wanted: For each sample, its position in the batch, its shard, and its row.
    """
    fetch, skeletons = BatchFetch(), dict[int, bytes]()
    for i, shard, row in wanted:
        add_skeleton(fetch, i, shard, row, skeletons)
    fetch.run()
    return skeletons


def add_skeleton(fetch: BatchFetch, i: int, shard: Shard, row: int, skeletons: dict[int, bytes]) -> None:
    """Read the skeleton of a sample into `found`, by its position `i` in the batch."""
    fetch.add_extent(shard, *shard.skeleton_extent(row), lambda stored: skeletons.__setitem__(i, stored))


def add_member(fetch: BatchFetch, i: int, shard: Shard, suffix: str, number: int, members: dict[int, bytes]) -> None:
    """Read a member of a sample into `found`, by its position `i` in the batch; `number` is as for `Shard.member`."""
    fetch.add_extent(shard, *shard.member_extent(suffix, number), lambda stored: members.__setitem__(i, stored))
