"""Locations of a batch's samples: shard, row and byte offset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from wds_tensorcache.reading.store import Store

Array = np.ndarray[Any, Any]
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The locations of a batch's samples.

    Sample `i` is row `row[i]` of `shards[number[i]]`, and its `.safetensors` member starts at byte `begin[i]`. A row
    is the index of a sample among the samples of its shard that have the cache.
    """

    shards: Sequence[Any]  # of the cache; for a `SharedDataset`, one object with the methods that batches need
    number: Array  # int64 `[B]`, as `row` and `begin`
    row: Array
    begin: Array
    # `(shard number, positions in the batch, rows)` for each shard with samples of the batch; positions: an array or a slice
    by_shard: Sequence[tuple[int, Any, Array]]
    known_layouts: list[Any] = field(default_factory=list)  # result of `layouts_of`, empty until it is known
    known_samples: dict[int, Any] = field(default_factory=dict)  # results of `sample`, by position in the batch
    # bytes at `Shard.skeleton_extent` of samples of remote shards, by position in the batch
    fetched: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    def key(self, i: int) -> str:
        key: str = self.shards[self.number.item(i)].key(self.row.item(i))
        return key

    def sample(self, i: int) -> Any:
        if i not in self.known_samples:
            shard, row, stored = self.shards[self.number.item(i)], self.row.item(i), self.fetched.get(i)
            self.known_samples[i] = shard.sample(row) if stored is None else shard.sample(row, stored)
        return self.known_samples[i]

    def samples(self) -> list[Any]:
        self.fetch_skeletons(range(len(self)))
        return list(map(self.sample, range(len(self))))

    def fetch_skeletons(self, positions: Iterable[int]) -> None:
        """Fetch the skeletons of samples in remote shards together into `fetched`."""
        wanted = {}
        for i in positions:
            shard = self.shards[self.number.item(i)]
            if shard.is_remote and i not in self.fetched:
                wanted[i] = shard.file, *shard.skeleton_extent(self.row.item(i))
        if wanted:
            from wds_tensorcache.reading.remote_batches import fetch

            self.fetched.update(fetch(wanted))

    def skeletons(self, done: Array) -> Iterator[tuple[int, bytes, int]]:
        """Yield `(position in the batch, skeleton, offset of the skeleton's body)`, shard by shard.

        `done`, bool `[B]`, marks samples to leave out.
        """
        if any(self.shards[number].is_remote for number, *_ in self.by_shard):
            self.fetch_skeletons(np.flatnonzero(~done).tolist())
        for number, at, rows in self.by_shard:
            shard, left = self.shards[number], np.flatnonzero(~done[at])
            if len(left):
                which = (left if isinstance(at, slice) else at[left]).tolist()
                stored = (map(self.fetched.__getitem__, which),) if shard.is_remote else ()
                yield from zip(which, *shard.skeletons(rows[left], *stored), strict=True)


def locate(store: Store, positions: Array) -> Rows:
    """Return the locations of the samples at `positions` in `store`, int64 `[B]`. Load the indexes of remote shards."""
    shards = store.shards
    if len(shards) == 1 or not len(positions):
        number, row = np.zeros(len(positions), np.int64), positions
    else:
        number = np.searchsorted(store.starts, positions, "right") - 1
        row = positions - store.starts[number]
    if not len(positions):
        return Rows(shards, number, row, number, ())
    if store.has_remote:
        store.load_indexes(set(number.tolist()))
    at = number.item(0)
    if len(shards) == 1 or (number == at).all():
        begin = shards[at].columns.tensors_begin[row].astype(np.int64)
        return Rows(shards, number, row, begin, ((at, _ALL, row),))
    order = np.argsort(number.astype(store.number_dtype), kind="stable")  # numpy uses a radix sort for short integers
    present, rows = number[order], row[order]
    edges = [0, *(np.flatnonzero(present[1:] != present[:-1]) + 1).tolist(), len(order)]
    by_shard, begin = [], np.empty(len(order), np.int64)
    for first, last in pairwise(edges):
        at = present.item(first)
        by_shard.append((at, order[first:last], rows[first:last]))
        begin[order[first:last]] = shards[at].columns.tensors_begin[rows[first:last]]
    return Rows(shards, number, row, begin, by_shard)
