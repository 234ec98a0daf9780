"""Read shards without a cache: a sample is a dict of its members as bytes, as webdataset yields it before decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wds_tensorcache.codec.header import form_of
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.shards.index import CacheColumns, LayoutTable, ShardIndex
from wds_tensorcache.shards.shard import Shard

NO_CACHE = "no cache, only other members; tc.build(tc.open(…), fn, out, …) adds a cache"
_KEY, _URL = "__key__", "__url__"
_NONE = np.zeros(1, np.uint8)
_NO_TENSORS = LayoutTable((form_of(()),), ((),), _NONE, _NONE, _NONE[:0], ((),))


class MemberSample(dict[str, Any]):
    """A sample of a shard without a cache: `__key__`, `__url__`, and the bytes of each member by its suffix.

    `members` has the members only; it stays the same if a dataset or a function changes the dict.
    """

    __slots__ = ("members",)

    def __init__(self, key: str, url: str, members: dict[str, bytes]) -> None:
        super().__init__({_KEY: key, _URL: url, **members})
        self.members = members


class MemberShard(Shard):
    """A shard without a cache. The bytes from a sample's first member to its last one take the place of its skeleton."""

    has_cache = False

    def _set_index(self, index: ShardIndex) -> None:
        if reserved := {_KEY, _URL}.intersection(index.members):
            raise FormatError(f"a member is named {min(reserved)!r}, which webdataset reserves").at(self.path)
        count = len(index.keys)
        begin, end = np.full(count, index.end, np.uint64), np.zeros(count, np.uint64)
        for member in index.members.values():
            rows, first = slice(None) if member.rows is None else member.rows, member.begin.astype(np.uint64)
            begin[rows] = np.minimum(begin[rows], first)
            end[rows] = np.maximum(end[rows], first + member.nbytes)
        begin = np.minimum(begin, end)  # a forged index may have a sample without members
        if (end - begin).sum(dtype=float) > index.end:  # each sample of a forged index could span the whole shard
            problem = "the index has samples that overlap, so it does not match the shard"
            raise FormatError(f"{problem}; `tensorcache index` writes it anew", kind="index").at(self.path)
        zeros = np.zeros(count, np.uint8)
        columns = CacheColumns(None, begin, end - begin, begin, zeros, zeros)
        super()._set_index(replace(index, caches={self.name: columns}, layouts=_NO_TENSORS))
        self.layout_of_all = None  # so that each batch calls `layouts_of`

    def layouts_of(self, rows: Any) -> Any:
        raise BatchError(f"{self.path}: {NO_CACHE}")

    def sample(self, row: int, stored: bytes | None = None) -> MemberSample:
        """Return the members of a sample in their order. Cost: one read, unless `stored` has the bytes at `skeleton_extent`."""
        start, end = self.skeleton_extent(row)
        if stored is None:
            file = self.file
            stored = file.read(start, end)
            file.check_unchanged()
        extents = []
        for suffix, columns in self.index.members.items():
            if (at := columns.find(np.array([row])).item()) >= 0:
                begin = columns.begin.item(at) - start
                extents.append((begin, begin + columns.nbytes.item(at), suffix))
        members = {suffix: stored[begin:end] for begin, end, suffix in sorted(extents)}
        return MemberSample(self.key(row), self.path, members)
