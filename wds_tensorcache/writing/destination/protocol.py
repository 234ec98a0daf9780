"""The folder to which a writer writes shards, as the writer sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.writing.resume import FinishedShards
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard

__all__ = ["Destination", "Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a writer that concern its folder, see `ShardWriter`."""

    manifest: bool
    dali_index: bool
    fsync: bool
    fingerprint: Mapping[str, Any] | None


class Destination(Protocol):
    """A folder to which one writer writes the shards of its pattern.

    Threads/fork: one thread at a time; not usable in a forked child.
    """

    def begin(self, overwrite: bool, resume: bool) -> tuple[FinishedShards, int]:
        """Take over or delete existing shards; return those that were taken over, and the number of the next shard.

        Raises:
            FileExistsError: There are shards, and neither `overwrite` nor `resume` is true.
        """
        ...

    @property
    def num_uploads(self) -> int:
        """Number of published shards whose uploads have not ended, or may have failed."""
        ...

    def check(self) -> None:
        """Raise the error of an upload in another thread, if there is one."""
        ...

    def new_shard(self, number: int) -> UnfinishedShard:
        """Return a new shard, which is not visible before its `finish` or `publish`."""
        ...

    def publish(self, shard: UnfinishedShard, index: ShardIndex) -> None:
        """Make a finished shard visible, then its `.idx` file, then its entry in the manifest. Uploads may follow later."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Wait until all finished shards are visible, and let other writers write; raise the error of an upload.

        Args:
            error: The exception that ends the writer, which the caller raises: an upload's error only becomes its note.
        """
        ...
