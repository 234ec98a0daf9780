"""Shards without a cache. A sample is a dict of its members as bytes, as webdataset yields it before decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wds_tensorcache.codec.header import form_of
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.shards.index import CacheColumns, LayoutTable, ShardIndex, narrow
from wds_tensorcache.shards.names import is_reserved
from wds_tensorcache.shards.shard import Shard

NO_CACHE = "no cache, only other members; tc.build(tc.open(…), fn, out, …) adds a cache"
_KEY, _URL = "__key__", "__url__"
_ZERO = np.zeros(1, np.uint8)
_NO_TENSORS = LayoutTable((form_of(()),), ((),), _ZERO, _ZERO, _ZERO[:0], ((),))


class MemberSample(dict[str, Any]):
    """A sample without a cache: `__key__`, `__url__`, and members' bytes by suffix.

    `members` contains the bytes alone. It stays the same if a dataset or a function changes the dict.
    """

    __slots__ = ("members",)

    def __init__(self, key: str, url: str, members: dict[str, bytes]) -> None:
        super().__init__({_KEY: key, _URL: url, **members})
        self.members = members


class MemberShard(Shard):
    """A shard without a cache. The bytes from a sample's first member to its last member take the place of its skeleton."""

    has_cache = False

    def _set_index(self, index: ShardIndex) -> None:
        for suffix in index.members:
            if suffix in (_KEY, _URL) or is_reserved(suffix):
                problem = f"members have the suffix {suffix!r:.100}, which is reserved"
                raise FormatError(f"{problem}; rename them in the shard").at(self.path)
        table, count = index.members_in_order(), len(index.keys)
        edges = np.searchsorted(table.rows, np.arange(count + 1))
        # Each sample of a forged index could span the whole shard.
        if bool((np.diff(table.rows) < 0).any() or (np.diff(edges) == 0).any()):
            problem = "the index has samples that overlap or have no members, so it does not match the shard"
            raise FormatError(f"{problem}; `tensorcache index` writes it anew", kind="index").at(self.path)
        begin, end = table.begins[edges[:-1]], (table.begins + table.sizes)[edges[1:] - 1]
        self._suffixes, self._kinds, self._edges = table.suffixes, narrow(table.kinds), narrow(edges)
        self._begins, self._sizes = narrow(table.begins), narrow(table.sizes)
        zeros = np.zeros(count, np.uint8)
        columns = CacheColumns(None, narrow(begin), narrow(end - begin), zeros, zeros, zeros)
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
        which = slice(self._edges.item(row), self._edges.item(row + 1))
        columns = (self._kinds[which].tolist(), self._begins[which].tolist(), self._sizes[which].tolist())
        extents = ((self._suffixes[kind], begin - start, nbytes) for kind, begin, nbytes in zip(*columns, strict=True))
        members = {suffix: stored[begin : begin + nbytes] for suffix, begin, nbytes in extents}
        return MemberSample(self.key(row), self.path, members)
