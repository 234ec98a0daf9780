"""A shard's index as arrays, without a Python object per sample.

A *layout* is the content of a safetensors header. Each distinct layout is stored once and has a number. Layouts with the
same *form* (names, dtypes, numbers of dimensions, references) differ only in shapes and in the offset of the first tensor.
In most shards of up to 4 GiB, a sample takes 22 to 24 bytes plus its key. The end of the key takes 4, the offsets of its two
members 8, and the digest 8. The length of the skeleton and the number of the layout take 1 or 2 bytes each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import Form, Further, Layout, make_layout
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.names import SKELETON, TENSORS, NamedKey, member_suffix
from wds_tensorcache.shards.tar import BLOCK

Array = np.ndarray[Any, Any]
_PART = 1 << 20  # dimensions that are multiplied at once
_LIMIT = 1 << 62  # offsets, dimensions and sizes must be smaller, so that the sum of two does not overflow


def narrow(values: Sequence[int] | Array) -> Array:
    """Convert non-negative integers to the narrowest unsigned dtype."""
    array = np.asarray(values, np.uint64)
    return array.astype(np.min_scalar_type(int(array.max())) if len(array) else np.uint8)


@dataclass(frozen=True, slots=True)
class MemberColumns:
    """All members with one suffix, in the order of the samples. Offsets and lengths of contents are in bytes."""

    rows: Array | None  # the number of each member's sample, ascending; None if all samples have a member
    begin: Array
    nbytes: Array

    def find(self, rows: Array) -> Array:
        """Return each sample's position in these columns, int64; -1 if missing."""
        rows = rows.astype(np.int64)  # the dtype of another column may be too narrow for the last row of this column
        if self.rows is None:
            return rows
        if not len(self.rows):
            return np.full(len(rows), -1, np.int64)
        # equal dtypes: otherwise numpy converts the whole column, even to search for a single row
        wanted = np.minimum(rows, self.rows.item(-1)).astype(self.rows.dtype)
        places = np.searchsorted(self.rows, wanted)
        return np.where(self.rows[places] == rows, places, -1)


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """The layouts of a shard, and their forms."""

    forms: tuple[Form, ...]
    references: tuple[tuple[str, ...] | None, ...]  # by form, strings of its tensors in skeletons; None if unknown
    form: Array  # number of the form of each layout
    data_begin: Array  # offset of the first tensor in the member
    dims: Array  # all shapes, layout after layout
    # for each form, the further names of its tensors; None if an old writer did not list further names
    further: tuple[Further, ...] | None = None
    dims_begin: Array = field(init=False)  # position of each layout's first dimension in `dims`
    nbytes: Array = field(init=False)  # length of the whole member

    def __post_init__(self) -> None:
        counts = np.array([sum(ndim for *_, ndim in form.entries) for form in self.forms], np.int64)
        _refuse(len(self.form) and int(self.form.max()) >= len(self.forms), "a layout with a form that does not exist")
        ends = np.cumsum(counts[self.form], dtype=np.int64)
        are_equal = len(self.data_begin) == len(self.form) and (ends.item(-1) if len(ends) else 0) == len(self.dims)
        _refuse(not are_equal, "layouts whose dimensions do not match their forms")
        object.__setattr__(self, "dims_begin", ends - counts[self.form])
        object.__setattr__(self, "nbytes", self._nbytes())

    def _nbytes(self) -> Array:
        _refuse(len(self.dims) and int(self.dims.max()) >= _LIMIT, "a layout of an impossible size")
        total = self.data_begin.astype(np.float64)  # exact below 2^53; far larger totals need only be detected
        result = self.data_begin.astype(np.int64)
        # Cost: depends on the length of the index only: one sort and one pass over the layouts, one pass over their dimensions.
        order = np.argsort(self.form, kind="stable")
        ends = np.cumsum(np.bincount(self.form.astype(np.int64), minlength=len(self.forms)))
        first = 0
        for form, end in zip(self.forms, ends.tolist(), strict=True):
            which, first = order[first:end], end
            scalars = sum(STORED[dtype][0] for _, dtype, ndim in form.entries if not ndim)
            total[which] += scalars
            result[which] += scalars
            widths, ndims = np.array(
                [(STORED[dtype][0], ndim) for _, dtype, ndim in form.entries if ndim] or [(0, 0)]
            ).T
            num_dims, firsts = int(ndims.sum()), np.cumsum(ndims) - ndims
            # Cost: about 32 bytes of memory for each dimension of a part; a shard may have a layout for each of its samples.
            for part in np.array_split(which, 1 + len(which) * num_dims // _PART) if len(which) and num_dims else ():
                shapes = self.dims[self.dims_begin[part, None] + np.arange(num_dims)].astype(np.int64)
                with np.errstate(over="ignore"):
                    total[part] += np.multiply.reduceat(np.where(shapes == 0, 1.0, shapes), firsts, 1) @ widths
                result[part] += np.multiply.reduceat(shapes, firsts, 1) @ widths
        _refuse(len(total) and float(total.max()) >= _LIMIT, "a layout of an impossible size")
        return result

    def __len__(self) -> int:
        return len(self.form)

    def __getitem__(self, number: int) -> Layout:
        form_number = self.form.item(number)
        form, texts = self.forms[form_number], self.references[form_number]
        begin = self.dims_begin.item(number)
        ndim = sum(entry[2] for entry in form.entries)
        dims, data_begin = tuple(self.dims[begin : begin + ndim].tolist()), self.data_begin.item(number)
        return make_layout(form, dims, data_begin, texts, () if self.further is None else self.further[form_number])


@dataclass(frozen=True, slots=True)
class CacheColumns:
    """One cache of a shard. Offsets are in bytes, from the start of the shard to the contents of the members."""

    rows: Array | None  # numbers of the samples that have this cache, ascending; None if all samples have it
    skeleton_begin: Array
    skeleton_nbytes: Array
    tensors_begin: Array
    layout: Array  # numbers in the layout table
    digest: Array  # the digest that each `.safetensors` member declares; 0 if it declares none

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, slots=True)
class Origins:
    """Digests of the items and original names of a shard's samples.

    Only the writer of the shard knows them, so an index from a scan contains none.
    """

    digest: Array | None  # of each sample's item, uint64; 0 if unknown
    rows: Array  # numbers of the samples whose key does not hold their original name, ascending
    text: Array  # these names in UTF-8
    ends: Array  # the offsets in `text` at which the names end

    @classmethod
    def of(cls, samples: Iterable[tuple[int, str | None]]) -> Origins | None:
        """Build from results of `ShardIndex.origin`; None if all are unknown."""
        digests, rows, ends, text = array("Q"), array("Q"), array("Q"), bytearray()
        for row, (digest, name) in enumerate(samples):
            digests.append(digest)
            if name is not None:
                text += name.encode("utf-8", "surrogatepass")
                rows.append(row)
                ends.append(len(text))
        has_digests = any(digests)
        if not has_digests and not rows:
            return None
        column = np.array(digests, np.uint64) if has_digests else None
        return cls(column, narrow(rows), np.frombuffer(bytes(text), np.uint8), narrow(ends))

    def check(self, num_samples: int) -> None:
        lengths = np.diff(self.ends.astype(np.int64), prepend=0)
        is_bad = self.digest is not None and (len(self.digest) != num_samples or self.digest.dtype != np.uint64)
        is_bad |= len(self.rows) != len(self.ends) or int(lengths.sum()) != len(self.text) or bool((lengths < 0).any())
        is_bad |= bool((self.rows[1:] <= self.rows[:-1]).any()) or bool((self.rows >= num_samples).any())
        _refuse(is_bad, "impossible original names, or digests of items")


@dataclass(frozen=True, slots=True)
class MemberTable:
    """All members of a shard by ascending offset, as int64 arrays."""

    suffixes: list[str]
    caches: list[CacheColumns | None]  # the cache of each suffix; None if a suffix belongs to no cache
    kinds: Array  # positions in `suffixes`
    numbers: Array  # positions in the columns of the cache or suffix
    rows: Array  # numbers of the samples
    begins: Array  # offsets of the contents, in bytes
    sizes: Array  # lengths of the contents, in bytes


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """The keys, offsets, lengths and layouts of a shard's samples.

    Attributes:
        keys: Keys in the order of the shard.
        caches: Caches by name; `""` is the name of the unnamed cache.
        members: All members that belong to no cache, by suffix.
        layouts: Layouts, to which the `layout` columns of the caches refer.
        end: Byte offset of the end-of-archive marker.
        fingerprint: Description of how the cache was made; None if unknown.
        origins: Digests of the items and original names of the samples; None if there are none.
        hidden: Byte offset of a tar header after the end of the archive; readers do not see its member. None if a scan saw no
            such header, or if no scan made the index.
        digest: Digest in the trailer of the footer or sidecar that contains the index, as in a manifest; None if unknown.
    """

    keys: Keys
    caches: Mapping[str, CacheColumns]
    members: Mapping[str, MemberColumns]
    layouts: LayoutTable
    end: int
    fingerprint: Mapping[str, Any] | None = None
    origins: Origins | None = None
    hidden: int | None = None
    digest: str | None = None

    def __repr__(self) -> str:
        return f"ShardIndex({len(self.keys)} samples, caches {list(self.caches)}, other members {list(self.members)})"

    @property
    def nbytes(self) -> int:
        """Total size of the arrays in bytes."""
        records: list[Any] = [self.keys, self.layouts, *self.caches.values(), *self.members.values()]
        records += [] if self.origins is None else [self.origins]
        columns = (getattr(record, name) for record in records for name in record.__slots__)
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))

    def origin(self, row: int) -> tuple[int, str | None]:
        """Return a sample's item digest (or 0) and stored name (or None). Raise FormatError if the name is not UTF-8."""
        origins = self.origins
        if origins is None:
            return 0, None
        digest = 0 if origins.digest is None else origins.digest.item(row)
        at = int(np.searchsorted(origins.rows, row))
        if at == len(origins.rows) or origins.rows.item(at) != row:
            return digest, None
        raw = origins.text[origins.ends.item(at - 1) if at else 0 : origins.ends.item(at)].tobytes()
        try:
            return digest, raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as exc:
            remedy = "`tensorcache repair` (tc.repair) writes the samples without names"
            raise FormatError(f"the index has a name that is not UTF-8: {raw!r:.100}; {remedy}", kind="index") from exc

    def key(self, row: int) -> str:
        """Return a sample's key, as a `NamedKey` if its name is stored. Raise FormatError as `origin` does."""
        key, name = self.keys[row], self.origin(row)[1] if self.has_names else None
        return key if name is None else NamedKey(key, name)

    @property
    def has_names(self) -> bool:
        return self.origins is not None and len(self.origins.rows) > 0

    def origins_of(self, keys: Iterable[str]) -> Origins | None:
        """Return the origins of these keys, in order. None if all are unknown, as the origins of missing keys are."""
        if self.origins is None:
            return None
        rows = {key: row for row, key in enumerate(self.keys)}
        return Origins.of(self.origin(rows[key]) if key in rows else (0, None) for key in keys)

    def columns(self) -> list[tuple[str, CacheColumns | None, Array | None, Array, Array]]:
        """Return (suffix, cache, rows, offsets, lengths) for each suffix of the members.

        The tensors of a cache follow its skeletons.
        """
        columns: list[tuple[str, CacheColumns | None, Array | None, Array, Array]] = []
        for name, cache in self.caches.items():
            skeletons, tensors = member_suffix(name, SKELETON), member_suffix(name, TENSORS)
            columns.append((skeletons, cache, cache.rows, cache.skeleton_begin, cache.skeleton_nbytes))
            columns.append((tensors, cache, cache.rows, cache.tensors_begin, self.layouts.nbytes[cache.layout]))
        return columns + [
            (name, None, member.rows, member.begin, member.nbytes) for name, member in self.members.items()
        ]

    def members_in_order(self) -> MemberTable:
        """Return all members by ascending offset, including the members of caches."""
        everything, parts = np.arange(len(self.keys)), self.columns()
        begins = _concatenate(part[3] for part in parts)
        order = np.argsort(begins, kind="stable")
        return MemberTable(
            [part[0] for part in parts],
            [part[1] for part in parts],
            _concatenate(np.full(len(part[3]), kind) for kind, part in enumerate(parts))[order],
            _concatenate(np.arange(len(part[3])) for part in parts)[order],
            _concatenate(everything if part[2] is None else part[2] for part in parts)[order],
            begins[order],
            _concatenate(part[4] for part in parts)[order],
        )

    def check(self) -> None:
        """Raise FormatError if offsets leave the archive or columns are inconsistent."""
        # Hazard: an index may be hostile.
        num_samples = len(self.keys)
        # checked first: with ends of 2^63 or more, the lengths of keys could be wrong
        last = self.keys.ends.max().item() if num_samples else 0
        _refuse(last != len(self.keys.text), "keys that overlap")
        lengths = self.keys.lengths()
        _refuse((lengths == 0).any(), "empty keys")
        _refuse((lengths < 0).any(), "keys that overlap")
        for cache in self.caches.values():
            is_known = not len(cache) or int(cache.layout.max()) < len(self.layouts)
            _refuse(not is_known, "a sample with a layout that does not exist")
            _refuse(len(cache.digest) != len(cache), "columns of unequal lengths")
        total = 0.0
        for _, _, rows, begin, nbytes in self.columns():
            self._check_members(rows, begin, nbytes)
            total += nbytes.sum(dtype=float)
        if self.origins is not None:
            self.origins.check(num_samples)
        # Many members could each span the whole archive; reading them all would take quadratic time.
        _refuse(total > self.end, "members that overlap")

    def _check_members(self, rows: Array | None, begin: Array, nbytes: Array) -> None:
        count = len(self.keys)
        if rows is not None:
            are_possible = not (rows[1:] <= rows[:-1]).any() and (not len(rows) or int(rows[-1]) < count)
            _refuse(not are_possible, "impossible rows")
            count = len(rows)
        _refuse(len(begin) != count or len(nbytes) != count, "columns of unequal lengths")
        if count:
            is_outside = int(begin.min()) < BLOCK or max(int(begin.max()), int(nbytes.max())) > self.end
            _refuse(is_outside, "a member outside the archive")
            ends = begin.astype(np.int64) + nbytes.astype(np.int64)
            _refuse(int(ends.max()) > self.end, "a member that extends beyond the archive")


def _refuse(is_bad: Any, problem: str) -> None:
    if is_bad:
        raise FormatError(f"the index has {problem}", kind="index")


def _concatenate(arrays: Iterable[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *(array.astype(np.int64) for array in arrays)])
