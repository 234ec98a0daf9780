"""The shards that a writer finds when it goes on: their keys, and what is known of each sample."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.lookup import KeyTable
from wds_tensorcache.storage.files import Files

__all__ = ["FinishedShards"]


class FinishedShards:
    """Finished shards by path, in the order of their numbers."""

    def __init__(self, indexes: Mapping[str, ShardIndex]) -> None:
        self._paths, self._indexes = list(indexes), dict(indexes)
        self._table = KeyTable((index.keys, None) for index in self._indexes.values())
        self._starts = [0]
        for index in self._indexes.values():
            self._starts.append(self._starts[-1] + len(index.keys))
        self._files = Files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: str) -> bool:
        return bool(self._table.find(key))

    def find(self, key: str) -> list[tuple[str, int]]:
        """Return the shards that have a sample, and which one it is in each; more than one where a newer one replaces it."""
        numbers = [(position, bisect_right(self._starts, position) - 1) for position in self._table.find(key)]
        return [(self._paths[number], position - self._starts[number]) for position, number in numbers]

    def shared(self) -> dict[str, list[tuple[str, int]]]:
        """Return the keys that are there more than once, each with what `find` returns."""
        return {key: self.find(key) for key in self._table.shared()}

    def read_member(self, path: str, row: int, suffix: str) -> bytes | None:
        """Return a member of a sample, None if it has none of that suffix."""
        member = self._indexes[path].members.get(suffix)
        if member is None:
            return None
        at = member.find(np.array([row])).item()
        if at < 0:
            return None
        begin = member.begin.item(at)
        return self._files.get(path).read(begin, begin + member.nbytes.item(at))

    def close(self) -> None:
        """Close the files."""
        self._files.close()
