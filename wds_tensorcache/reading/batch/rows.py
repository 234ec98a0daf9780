"""Locate the samples of a batch: the shard of each, its row there, and where its tensors begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.reading.shard_set import Store
from wds_tensorcache.shards.shard import Shard

__all__ = ["NO_SAMPLES", "Rows", "locate"]

NO_SAMPLES = "no indices: a batch has at least one sample"

Array = np.ndarray[Any, Any]
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of a batch: sample `i` is `row[i]` of `shards[number[i]]`, and its tensors begin at byte `begin[i]`.

    Attributes:
        shards: All shards of the cache.
        number, row, begin: int64 `[B]`.
        parts: For each shard of the batch: its number, which samples of the batch it has, and their rows.
    """

    shards: Sequence[Shard]
    number: Array
    row: Array
    begin: Array
    parts: Sequence[tuple[int, Any, Array]]

    def __len__(self) -> int:
        return len(self.row)

    def key(self, i: int) -> str:
        """Return the key of sample `i` of the batch."""
        key: str = self.shards[self.number.item(i)].key(self.row.item(i))
        return key

    def sample(self, i: int) -> Any:
        """Return sample `i` of the batch, with lazy tensors."""
        return self.shards[self.number.item(i)].sample(self.row.item(i))

    def template(self) -> Template | None:
        """Return the template that the first sample is of, if any.

        Raises:
            ValueError: There is no first sample.
        """
        if not self.parts:
            raise ValueError(NO_SAMPLES)
        shard: Shard = self.shards[self.number.item(0)]
        return shard.template(self.row.item(0))

    def skeletons(self, io: str) -> Iterator[tuple[int, bytes, int]]:
        """Yield (which sample, its skeleton, where the skeleton's body begins), shard by shard."""
        everything = range(len(self))
        for number, at, rows in self.parts:
            which = everything if isinstance(at, slice) else at.tolist()
            yield from zip(which, *self.shards[number].skeletons(rows, io), strict=True)


def locate(store: Store, positions: Array) -> Rows:
    """Return the rows of the samples at `positions`, int64 `[B]`."""
    shards = store.shards
    if len(shards) == 1 or not len(positions):
        number, row = np.zeros(len(positions), np.int64), positions
    else:
        number = np.searchsorted(store.starts, positions, "right") - 1
        row = positions - store.starts[number]
    if not len(positions):
        return Rows(shards, number, row, number, ())
    at = number.item(0)
    if len(shards) == 1 or (number == at).all():
        return Rows(shards, number, row, shards[at].columns.tensors_begin[row].astype(np.int64), ((at, _ALL, row),))
    order = np.argsort(number.astype(store.number_dtype), kind="stable")  # by radix, if they are short
    present, rows = number[order], row[order]
    edges = [0, *(np.flatnonzero(np.diff(present)) + 1).tolist(), len(order)]
    parts, begin = [], np.empty(len(order), np.int64)
    for first, last in pairwise(edges):
        at = present.item(first)
        parts.append((at, order[first:last], rows[first:last]))
        begin[order[first:last]] = shards[at].columns.tensors_begin[rows[first:last]]
    return Rows(shards, number, row, begin, parts)
