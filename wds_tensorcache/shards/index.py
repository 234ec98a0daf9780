"""What is where in a shard, as arrays: no Python object per sample.

A standard sample takes 22 bytes and its key: where its key ends (4), where its members begin and how long the skeleton
is (10), the number of its layout (1 or 2), and the digest of its tensors (8). Layouts are stored once, and of those that
are of one form (the names, dtypes and numbers of dimensions) only the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.layout import Form, Layout, make_layout
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.lookup import Keys

__all__ = ["CacheColumns", "LayoutTable", "MemberColumns", "ShardIndex", "narrow"]

Array = np.ndarray[Any, Any]
_LIMIT = 1 << 62  # offsets, shapes and sizes stay below, so that sums of two do not overflow


def narrow(values: Sequence[int] | Array) -> Array:
    """Return non-negative integers as the narrowest unsigned dtype that holds them all."""
    array = np.asarray(values, np.uint64)
    return array.astype(np.min_scalar_type(int(array.max())) if len(array) else np.uint8)


@dataclass(frozen=True, slots=True)
class MemberColumns:
    """Members with one suffix. `rows`: the samples that have it, ascending, None for all; then byte offsets and sizes."""

    rows: Array | None
    begin: Array
    nbytes: Array

    def find(self, rows: Array) -> Array:
        """Return which of these members each sample of `rows` has, -1 for none."""
        if self.rows is None:
            return rows.astype(np.int64)
        if not len(self.rows):
            return np.full(len(rows), -1, np.int64)
        # of one dtype: else numpy makes a copy of the whole column to search for a single row
        wanted = np.minimum(rows, self.rows.item(-1)).astype(self.rows.dtype)
        found = np.searchsorted(self.rows, wanted)
        return np.where(self.rows[found] == rows, found, -1)


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """The layouts of a shard: each one's form, where its tensors begin in the member, and the dimensions of their shapes.

    `references`, one for each form, are how the skeletons refer to the tensors, which gives their true dtypes; None where
    they could not be read. Forms that differ in these alone are two.
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
        if len(self.form) and int(self.form.max()) >= len(self.forms):
            raise FormatError("the index has a layout of a form that it does not have", kind="index")
        ends = np.cumsum(counts[self.form], dtype=np.int64)
        if len(self.data_begin) != len(self.form) or (int(ends[-1]) if len(ends) else 0) != len(self.dims):
            raise FormatError("the index has layouts with other numbers of dimensions than their forms", kind="index")
        object.__setattr__(self, "dims_begin", ends - counts[self.form])
        object.__setattr__(self, "nbytes", self._nbytes())

    def _nbytes(self) -> Array:
        if len(self.dims) and int(self.dims.max()) >= _LIMIT:
            raise FormatError("the index has a layout of an impossible size", kind="index")
        total = self.data_begin.astype(np.float64)  # exact below 2^53, and far above that it only has to be seen
        result = self.data_begin.astype(np.int64)
        # linear in what the file has, whatever it announces: one pass over the layouts, and one over their dimensions
        order = np.argsort(self.form, kind="stable")
        ends = np.cumsum(np.bincount(self.form.astype(np.int64), minlength=len(self.forms)))
        first = 0
        for form, end in zip(self.forms, ends.tolist(), strict=True):
            which, first = order[first:end], end
            if not len(which):
                continue
            scalars = sum(STORED[dtype][0] for _, dtype, ndim in form.entries if not ndim)
            total[which] += scalars
            result[which] += scalars
            begin = self.dims_begin[which]
            for _, dtype, ndim in form.entries:
                if not ndim:
                    continue
                shapes = self.dims[begin[:, None] + np.arange(ndim)].astype(np.int64)
                with np.errstate(over="ignore"):
                    total[which] += np.where(shapes == 0, 1.0, shapes).prod(1) * STORED[dtype][0]
                result[which] += shapes.prod(1) * STORED[dtype][0]
                begin = begin + ndim
        if len(total) and float(total.max()) >= _LIMIT:
            raise FormatError("the index has a layout of an impossible size", kind="index")
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
    """One cache of the samples in `rows` (None: of all).

    `skeleton_begin` and `tensors_begin` are byte offsets in the shard, `layout` numbers of the layout table, `digest` what
    both members declare of the tensors, 0 where one declares nothing.
    """

    rows: Array | None
    skeleton_begin: Array
    skeleton_nbytes: Array
    tensors_begin: Array
    layout: Array
    digest: Array

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Everything that is known of a shard without reading its samples.

    Attributes:
        keys: In the order of the shard.
        caches: By name, `""` for the one without.
        members: All other members by suffix.
        layouts: What the caches' `layout` numbers mean.
        end: Byte offset of the end-of-archive marker.
        fingerprint: How the cache was made, if its footer says so.
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
        """Bytes of memory that the arrays take."""
        arrays = [self.keys.text, self.keys.ends, *vars_of(self.layouts)]
        for columns in (*self.caches.values(), *self.members.values()):
            arrays.extend(vars_of(columns))
        return sum(array.nbytes for array in arrays)

    def check(self) -> None:
        """Raise FormatError if anything points out of the shard, or to nothing: indexes are read from files."""
        num_samples = len(self.keys)
        ends = self.keys.ends
        if np.any(np.diff(ends, prepend=ends.dtype.type(0)) == 0):
            raise FormatError("the index has empty keys", kind="index")
        if np.any(ends[1:] < ends[:-1]) or (ends.item(-1) if num_samples else 0) != len(self.keys.text):
            raise FormatError("the index has keys that overlap", kind="index")
        self.keys.ascend(False)  # here, where the keys are in the processor's cache, it costs least
        total = 0.0
        for columns in self.caches.values():
            self._check_rows(columns.rows, columns.layout, num_samples)
            if len(columns) and int(columns.layout.max()) >= len(self.layouts):
                raise FormatError("the index has a sample with a layout that it does not have", kind="index")
            self._check_extent(columns.skeleton_begin, columns.skeleton_nbytes)
            self._check_extent(columns.tensors_begin, self.layouts.nbytes[columns.layout])
            total += columns.skeleton_nbytes.sum(dtype=float) + self.layouts.nbytes[columns.layout].sum(dtype=float)
            if len(columns.digest) != len(columns):
                raise FormatError("the index has columns of unequal lengths", kind="index")
        for member in self.members.values():
            self._check_rows(member.rows, member.begin, num_samples)
            self._check_extent(member.begin, member.nbytes)
            total += member.nbytes.sum(dtype=float)
        if total > self.end:  # else reading all of them could take the archive's size for each
            raise FormatError("the index has members that overlap", kind="index")

    def _check_rows(self, rows: Array | None, column: Array, num_samples: int) -> None:
        if rows is None:
            good = len(column) == num_samples
        else:
            good = len(rows) == len(column) and not np.any(rows[1:] <= rows[:-1])
            good = good and (not len(rows) or int(rows[-1]) < num_samples)
        if not good:
            raise FormatError("the index has columns of unequal lengths", kind="index")

    def _check_extent(self, begin: Array, nbytes: Array) -> None:
        if len(begin) != len(nbytes):
            raise FormatError("the index has columns of unequal lengths", kind="index")
        if len(begin) and (int(begin.min()) < 512 or int(begin.max()) > self.end or int(nbytes.max()) > self.end):
            raise FormatError("the index has a member outside of the archive", kind="index")
        if np.any(begin.astype(np.int64) + nbytes.astype(np.int64) > self.end):
            raise FormatError("the index has a member that reaches beyond the archive", kind="index")


def vars_of(columns: Any) -> list[Array]:
    """Return the arrays of a record."""
    values = [getattr(columns, name) for name in columns.__slots__]
    return [value for value in values if isinstance(value, np.ndarray)]
