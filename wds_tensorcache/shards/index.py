"""The index of a shard, as arrays: offsets, lengths and layouts, without a Python object per sample.

A standard sample takes 22 bytes plus its key. The end of its key takes 4, its members' offsets and the skeleton's length
10, its layout's number 1 or 2, and its digest 8. Each layout is stored once. Layouts of one form (names, dtypes and numbers
of dimensions) share all but the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.layout import Form, Layout, make_layout
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.lookup import Keys
from wds_tensorcache.shards.names import SKELETON, TENSORS, member_suffix

__all__ = ["CacheColumns", "LayoutTable", "MemberColumns", "MemberTable", "ShardIndex", "narrow"]

Array = np.ndarray[Any, Any]
_LIMIT = 1 << 62  # offsets, shapes and sizes are smaller, so that the sum of two does not overflow


def narrow(values: Sequence[int] | Array) -> Array:
    """Return non-negative integers as the narrowest unsigned dtype that holds them all."""
    array = np.asarray(values, np.uint64)
    return array.astype(np.min_scalar_type(int(array.max())) if len(array) else np.uint8)


@dataclass(frozen=True, slots=True)
class MemberColumns:
    """Members with one suffix: the samples that have one, ascending, or None for all; and the members' offsets and lengths."""

    rows: Array | None
    begin: Array
    nbytes: Array

    def find(self, rows: Array) -> Array:
        """Return the position in these columns of each sample's member, -1 for a sample without one."""
        if self.rows is None:
            return rows.astype(np.int64)
        if not len(self.rows):
            return np.full(len(rows), -1, np.int64)
        # with equal dtypes, since numpy otherwise copies the whole column to search for a single row
        wanted = np.minimum(rows, self.rows.item(-1)).astype(self.rows.dtype)
        found = np.searchsorted(self.rows, wanted)
        return np.where(self.rows[found] == rows, found, -1)


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """The layouts of a shard: the form of each, the offset of its tensors in the member, and the sizes of their dimensions.

    `references` contains, for each form, the reference texts of its tensors, which determine true dtypes; None if unknown.
    """

    forms: tuple[Form, ...]
    references: tuple[tuple[str, ...] | None, ...]
    form: Array
    data_begin: Array
    dims: Array
    dims_begin: Array = field(init=False)
    nbytes: Array = field(init=False)  # of the whole member

    def __post_init__(self) -> None:
        counts = np.array([sum(ndim for *_, ndim in form.entries) for form in self.forms], np.int64)
        _refuse(len(self.form) and int(self.form.max()) >= len(self.forms), "a layout of a form that it does not have")
        ends = np.cumsum(counts[self.form], dtype=np.int64)
        are_equal = len(self.data_begin) == len(self.form) and (ends.item(-1) if len(ends) else 0) == len(self.dims)
        _refuse(not are_equal, "layouts with other numbers of dimensions than their forms")
        object.__setattr__(self, "dims_begin", ends - counts[self.form])
        object.__setattr__(self, "nbytes", self._nbytes())

    def _nbytes(self) -> Array:
        _refuse(len(self.dims) and int(self.dims.max()) >= _LIMIT, "a layout of an impossible size")
        total = self.data_begin.astype(np.float64)  # exact below 2^53; far larger values only have to be detected
        result = self.data_begin.astype(np.int64)
        # linear in the size of the file, whatever it declares: one pass over the layouts, and one over their dimensions
        order = np.argsort(self.form, kind="stable")
        ends = np.cumsum(np.bincount(self.form.astype(np.int64), minlength=len(self.forms)))
        first = 0
        for form, end in zip(self.forms, ends.tolist(), strict=True):
            which, first = order[first:end], end
            scalars = sum(STORED[dtype][0] for _, dtype, ndim in form.entries if not ndim)
            total[which] += scalars
            result[which] += scalars
            begin = self.dims_begin[which]
            for dtype, ndim in [entry[1:] for entry in form.entries if entry[2]] if len(which) else ():
                shapes = self.dims[begin[:, None] + np.arange(ndim)].astype(np.int64)
                with np.errstate(over="ignore"):
                    total[which] += np.where(shapes == 0, 1.0, shapes).prod(1) * STORED[dtype][0]
                result[which] += shapes.prod(1) * STORED[dtype][0]
                begin = begin + ndim
        _refuse(len(total) and float(total.max()) >= _LIMIT, "a layout of an impossible size")
        return result

    def __len__(self) -> int:
        return len(self.form)

    def __getitem__(self, number: int) -> Layout:
        form_number = self.form.item(number)
        form, texts = self.forms[form_number], self.references[form_number]
        begin = self.dims_begin.item(number)
        ndim = sum(entry[2] for entry in form.entries)
        return make_layout(form, tuple(self.dims[begin : begin + ndim].tolist()), self.data_begin.item(number), texts)


@dataclass(frozen=True, slots=True)
class CacheColumns:
    """One cache of the samples `rows`; None for all samples.

    `skeleton_begin` and `tensors_begin` are byte offsets in the shard. `layout` contains positions in the layout table.
    `digest` contains the digests that both members declare for the tensors, 0 if one of them declares none.
    """

    rows: Array | None
    skeleton_begin: Array
    skeleton_nbytes: Array
    tensors_begin: Array
    layout: Array
    digest: Array

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, slots=True)
class MemberTable:
    """All members of a shard in the order of their bytes, as int64 arrays; `kinds` lists the suffixes."""

    suffixes: list[str]
    caches: list[CacheColumns | None]  # of each suffix, None for other members
    kinds: Array
    numbers: Array  # rows in the cache or the `MemberColumns`
    rows: Array  # samples
    begins: Array  # of the content, in bytes
    sizes: Array


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """The keys, offsets, lengths and layouts of a shard's samples.

    Attributes:
        keys: Keys in the order of the shard.
        caches: Caches by name, `""` for the one without a name.
        members: All other members by suffix.
        layouts: Layouts, to which the `layout` columns of the caches refer.
        end: Byte offset of the end-of-archive marker.
        fingerprint: Description of how the cache was made; None if unknown.
    """

    keys: Keys
    caches: Mapping[str, CacheColumns]
    members: Mapping[str, MemberColumns]
    layouts: LayoutTable
    end: int
    fingerprint: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"ShardIndex({len(self.keys)} samples, caches {list(self.caches)}, other members {list(self.members)})"

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes."""
        records: list[Any] = [self.keys, self.layouts, *self.caches.values(), *self.members.values()]
        columns = (getattr(record, name) for record in records for name in record.__slots__)
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))

    def members_in_order(self) -> MemberTable:
        """Return all members, including those of caches."""
        everything = np.arange(len(self.keys))
        parts: list[tuple[str, CacheColumns | None, Array | None, Array, Array]] = []
        for name, cache in self.caches.items():
            skeletons, tensors = member_suffix(name, SKELETON), member_suffix(name, TENSORS)
            parts.append((skeletons, cache, cache.rows, cache.skeleton_begin, cache.skeleton_nbytes))
            parts.append((tensors, cache, cache.rows, cache.tensors_begin, self.layouts.nbytes[cache.layout]))
        for suffix, member in self.members.items():
            parts.append((suffix, None, member.rows, member.begin, member.nbytes))
        begins = _joined(part[3] for part in parts)
        order = np.argsort(begins, kind="stable")
        return MemberTable(
            [part[0] for part in parts],
            [part[1] for part in parts],
            _joined(np.full(len(part[3]), kind) for kind, part in enumerate(parts))[order],
            _joined(np.arange(len(part[3])) for part in parts)[order],
            _joined(everything if part[2] is None else part[2] for part in parts)[order],
            begins[order],
            _joined(part[4] for part in parts)[order],
        )

    def check(self) -> None:
        """Raise FormatError if an offset is outside the shard, or columns do not match. Indexes come from untrusted files."""
        num_samples = len(self.keys)
        ends = self.keys.ends
        _refuse(np.any(np.diff(ends, prepend=ends.dtype.type(0)) == 0), "empty keys")
        last = ends.item(-1) if num_samples else 0
        _refuse(np.any(ends[1:] < ends[:-1]) or last != len(self.keys.text), "keys that overlap")
        # now, where the keys are in the processor's cache: at the first look-up it would take ten times as long
        _ = self.keys.is_ascending(False) or self.keys.is_ascending(True)
        total = 0.0
        for columns in self.caches.values():
            self._check_rows(columns.rows, columns.layout, num_samples)
            is_known = not len(columns) or int(columns.layout.max()) < len(self.layouts)
            _refuse(not is_known, "a sample with a layout that it does not have")
            tensors_nbytes = self.layouts.nbytes[columns.layout]
            self._check_extent(columns.skeleton_begin, columns.skeleton_nbytes)
            self._check_extent(columns.tensors_begin, tensors_nbytes)
            total += columns.skeleton_nbytes.sum(dtype=float) + tensors_nbytes.sum(dtype=float)
            _refuse(len(columns.digest) != len(columns), "columns of unequal lengths")
        for member in self.members.values():
            self._check_rows(member.rows, member.begin, num_samples)
            self._check_extent(member.begin, member.nbytes)
            total += member.nbytes.sum(dtype=float)
        # without this check, reading every member could cost the archive's size each time
        _refuse(total > self.end, "members that overlap")

    def _check_rows(self, rows: Array | None, column: Array, num_samples: int) -> None:
        if rows is None:
            good = len(column) == num_samples
        else:
            good = len(rows) == len(column) and not np.any(rows[1:] <= rows[:-1])
            good = good and (not len(rows) or int(rows[-1]) < num_samples)
        _refuse(not good, "columns of unequal lengths")

    def _check_extent(self, begin: Array, nbytes: Array) -> None:
        _refuse(len(begin) != len(nbytes), "columns of unequal lengths")
        if len(begin):
            is_outside = int(begin.min()) < 512 or int(begin.max()) > self.end or int(nbytes.max()) > self.end
            _refuse(is_outside, "a member outside of the archive")
        is_beyond = np.any(begin.astype(np.int64) + nbytes.astype(np.int64) > self.end)
        _refuse(is_beyond, "a member that reaches beyond the archive")


def _refuse(is_bad: Any, what: str) -> None:
    if is_bad:
        raise FormatError(f"the index has {what}", kind="index")


def _joined(arrays: Iterable[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *(array.astype(np.int64) for array in arrays)])
