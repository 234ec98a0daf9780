"""Locate the samples of a batch: the shard, the row and the byte offset of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np

from wds_tensorcache.codec.header import Layout
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.shard import Shard

NO_SAMPLES = "no indices: a batch has at least one sample"

Array = np.ndarray[Any, Any]
_ALL = slice(None)


class RowSource(Protocol):
    """Samples that batches can be made of; see `Shard`."""

    @property
    def layout_of_all(self) -> Layout | None: ...
    @property
    def file(self) -> Any: ...  # a `RangeFile`, unless the shard is remote
    def key(self, row: int, /) -> str: ...
    def sample(self, row: int, /) -> Any: ...
    def layouts_of(self, rows: Array, /) -> tuple[list[Layout], Array]: ...
    def template(self, row: int, /) -> Template | None: ...
    def note_template(self, rows: Array, template: Template, /) -> None: ...
    def skeletons(self, rows: Array, /) -> tuple[list[bytes], list[int]]: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The locations of a batch's samples: sample `i` is row `row[i]` of `shards[number[i]]`; its tensors start at `begin[i]`.

    A row is the number of a sample among the samples of its shard that have the cache.

    Attributes:
        shards: All shards of the cache: `Store.shards`; of a cache that is not in files, one place with all samples.
        number, row, begin: Shard number, row in the shard, and byte offset of the tensors of each sample, int64 `[B]`.
        by_shard: `(shard number, positions in the batch, rows)` for each shard that has samples of the batch.
        known_layouts: Result of `layouts_of`, for views that read the same samples; empty before.
        fetched: Bytes at `Shard.skeleton_extent` of samples of remote shards, by their positions in the batch.
    """

    shards: Sequence[RowSource]
    number: Array
    row: Array
    begin: Array
    by_shard: Sequence[tuple[int, Any, Array]]
    known_layouts: list[Any] = field(default_factory=list)
    fetched: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    def key(self, i: int) -> str:
        """Return the key of sample `i` of the batch."""
        key: str = self.shards[self.number.item(i)].key(self.row.item(i))
        return key

    def sample(self, i: int) -> Any:
        """Return sample `i` of the batch, with lazy tensors."""
        shard, row = self.shards[self.number.item(i)], self.row.item(i)
        stored = self.fetched.get(i)
        return shard.sample(row) if stored is None or not isinstance(shard, Shard) else shard.sample(row, stored)

    def template(self, i: int) -> Template | None:
        """Return the template that the skeleton of sample `i` of the batch matches, if any.

        Raises:
            ValueError: The batch is empty.
        """
        if not self.by_shard:
            raise ValueError(NO_SAMPLES)
        shard, row = self.shards[self.number.item(i)], self.row.item(i)
        if _is_remote(shard) and not shard.knows_template(row):
            self.fetch_skeletons((i,))  # `sample` needs it, too
        stored = self.fetched.get(i)
        return shard.template(row) if stored is None or not isinstance(shard, Shard) else shard.template(row, stored)

    def fetch_skeletons(self, positions: Iterable[int] | None = None) -> None:
        """Read the skeletons of samples of remote shards at once, so that later calls find them; None for the whole batch."""
        wanted = {}
        for i in range(len(self)) if positions is None else positions:
            shard = self.shards[self.number.item(i)]
            if _is_remote(shard) and i not in self.fetched:
                wanted[i] = shard.file, *shard.skeleton_extent(self.row.item(i))
        if wanted:
            from wds_tensorcache.reading.remote_batches import fetch

            self.fetched.update(fetch(wanted))

    def skeletons(self, done: Array | None = None) -> Iterator[tuple[int, bytes, int]]:
        """Yield `(position in the batch, skeleton, offset of the skeleton's body)`, shard by shard.

        `done`, bool `[B]`, marks samples to leave out.
        """
        if len(self.fetched) < len(self) and any(_is_remote(self.shards[number]) for number, *_ in self.by_shard):
            self.fetch_skeletons(None if done is None else np.flatnonzero(~done).tolist())
        for number, at, rows in self.by_shard:
            which = range(len(self)) if isinstance(at, slice) else at.tolist()
            if done is not None:
                left = np.flatnonzero(~done[at])
                rows, which = rows[left], [which[i] for i in left.tolist()]
            shard = self.shards[number]
            if len(rows) and _is_remote(shard):
                yield from zip(which, *shard.skeletons(rows, map(self.fetched.__getitem__, which)), strict=True)
            elif len(rows):
                yield from zip(which, *shard.skeletons(rows), strict=True)


def _is_remote(shard: RowSource) -> TypeGuard[Shard]:
    return isinstance(shard, Shard) and shard.is_remote


def locate(store: Store, positions: Array) -> Rows:
    """Return the locations of samples; `positions` are those in `store`, int64 `[B]`."""
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
    edges = [0, *(np.flatnonzero(np.diff(present)) + 1).tolist(), len(order)]
    by_shard, begin = [], np.empty(len(order), np.int64)
    for first, last in pairwise(edges):
        at = present.item(first)
        by_shard.append((at, order[first:last], rows[first:last]))
        begin[order[first:last]] = shards[at].columns.tensors_begin[rows[first:last]]
    return Rows(shards, number, row, begin, by_shard)
