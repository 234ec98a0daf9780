"""Shards that are there: their keys, and where the bytes of each sample are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.lookup import KeyTable
from wds_tensorcache.shards.remainder import load_whole
from wds_tensorcache.shards.tar.archive import BLOCK
from wds_tensorcache.storage.files import Files, ShardFile

__all__ = ["FinishedShards", "Place", "Span", "load_finished"]

Place = tuple[str, int]  # path of a shard, and row of a sample in it
Span = tuple["FinishedShards", str, int, int]  # whole members [begin, end) of one of the shards, with their headers


class FinishedShards:
    """Indexes of finished shards by path, in the order in which samples are numbered."""

    def __init__(self, indexes: Mapping[str, ShardIndex], files: Files | None = None) -> None:
        self.indexes = indexes
        self._paths = list(indexes)
        self._table = KeyTable((index.keys, None) for index in indexes.values())
        self._starts = [0]
        for index in indexes.values():
            self._starts.append(self._starts[-1] + len(index.keys))
        self._files = files or Files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: str) -> bool:
        return bool(self._table.find(key))

    def find(self, key: str) -> list[Place]:
        """Return where the samples of a key are, in the order of the shards."""
        numbers = [(position, bisect_right(self._starts, position) - 1) for position in self._table.find(key)]
        return [(self._paths[number], position - self._starts[number]) for position, number in numbers]

    def file(self, path: str) -> ShardFile:
        """Return the file of a shard.

        Raises:
            FormatError: It is not the one that was indexed.
        """
        return self._files.get(path)

    def read_member(self, place: Place, suffix: str) -> bytes | None:
        """Return a member of a sample, None if it has none of that suffix."""
        path, row = place
        member = self.indexes[path].members.get(suffix)
        if member is None:
            return None
        at = member.find(np.array([row])).item()
        if at < 0:
            return None
        begin = member.begin.item(at)
        return self.file(path).read(begin, begin + member.nbytes.item(at))

    def span(self, key: str) -> Span:
        """Return the members of the last sample of a key, in shards in which every sample begins with a skeleton."""
        path, row = self.find(key)[-1]
        index = self.indexes[path]
        begins = index.caches[""].skeleton_begin
        end = begins.item(row + 1) - BLOCK if row + 1 < len(begins) else index.end
        return self, path, begins.item(row) - BLOCK, end


def load_finished(paths: Iterable[str], listed: Mapping[str, Mapping[str, Any] | None]) -> FinishedShards:
    """Return finished shards; `listed` has fingerprints for those that have none themselves.

    Raises:
        FormatError: A shard is damaged.
    """
    files, indexes = Files(), dict[str, ShardIndex]()
    for path in paths:
        files.expect(path)
        index = load_whole(path)
        indexes[path] = index if index.fingerprint is not None else replace(index, fingerprint=listed.get(path))
    return FinishedShards(indexes, files)
