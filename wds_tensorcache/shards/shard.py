"""One shard by sample number: its index, the samples' skeletons, and sources for their tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from wds_tensorcache.codec.binding import PREAMBLE_NBYTES, is_preamble
from wds_tensorcache.codec.header import DIGITS_BEGIN, DIGITS_END, parse_header
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.sample import check_binding, decode_body
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import parse_footer, read_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.sidecar import open_sidecar
from wds_tensorcache.shards.sources import FileSource, StoredBytes
from wds_tensorcache.shards.tar.archive import BLOCK, names_of
from wds_tensorcache.shards.tar.fields import parse_number
from wds_tensorcache.storage.files import Files, ShardFile
from wds_tensorcache.storage.maps import Maps, gather, read_ranges
from wds_tensorcache.storage.pool import Pool

__all__ = ["Shard", "load_index"]

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
_NAME_NBYTES = 100  # of the tar header's field
_SIZE_BEGIN = 124  # of the next field but three
_OCTAL_SHIFTS = np.arange(30, -1, -3)
_MAX_TEMPLATES = 255
_HEX = np.array([list(b"%02x" % byte) for byte in range(256)], np.uint8)


def load_index(file: ShardFile) -> ShardIndex:
    """Return the index of a shard: from its footer, the file beside it, or one scan; the three are the same.

    Raises:
        FormatError: It is no shard, or a damaged one.
    """
    try:
        index = read_footer(file.read, file.nbytes)
        if index is None and (sidecar := open_sidecar(file.path)) is not None:
            index = parse_footer(sidecar.read(0, sidecar.nbytes), file.nbytes)
        return scan_shard(file.read, file.nbytes) if index is None else index
    except TensorCacheError as exc:
        raise exc.at(file.path) from exc


class _Loaded(Generic[_T]):
    """An attribute that is there once the shard's index is loaded; when it is first looked up, the index is."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, shard: Any, owner: Any = None) -> _T:
        # only until then: an object's own attributes go before this
        shard._load()
        return getattr(shard, self._name)  # type: ignore[no-any-return]


class Shard:
    """One cache of one shard. `row` counts the samples that have it.

    Attributes:
        index: The shard's index, loaded on first use, as are the others.
        columns: The columns of this cache.
        checked: Whether `check_tensors` has looked at a sample, bool `[len(shard)]`.
        layout_of_all: The layout of all samples; None if the shard has several.

    Threads/fork/pickle: safe everywhere; pickles as its path, and loads its index again.
    """

    index = _Loaded[ShardIndex]()
    columns = _Loaded[CacheColumns]()
    checked = _Loaded[Array]()
    layout_of_all = _Loaded["Layout | None"]()
    _template_numbers = _Loaded[Array]()  # the number of each sample's template, where it is known; uint8, 0 where not

    def __init__(
        self,
        path: str,
        name: str,
        files: Files,
        pool: Pool,
        allow: Mapping[tuple[str, str], type],
        count: int | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        self.path = sys.intern(os.path.abspath(path))  # of use in other processes, and after os.chdir; pickled once
        self.name = name
        self.files = files
        self.pool = pool
        self._allow = allow
        self._count = count
        self._index = index
        prefix = f"{name}." if name else ""
        self._suffixes = (f".{prefix}{SKELETON}".encode(), f".{prefix}{TENSORS}".encode())
        self._layouts: dict[int, Layout] = {}
        self._confirmed: dict[int, bytes] = {}  # by layout, what its headers have after the digest
        self._templates: list[Template] = []

    def __reduce__(self) -> Any:
        return Shard, (self.path, self.name, self.files, self.pool, self._allow, len(self))

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self.columns)
        return self._count

    def _load(self) -> None:
        index = self._index or load_index(self.file)
        columns = index.caches.get(self.name, _NONE)
        if self._count is not None and self._count != len(columns):
            raise FormatError(
                f"{self.path}: {len(columns)} samples, but the manifest says {self._count}: it is of another state"
            )
        # by setattr: what looks an object's dictionary up makes its attributes slow from then on
        loaded = {"index": index, "columns": columns, "checked": np.zeros(len(columns), np.bool_)}
        loaded["_template_numbers"] = np.zeros(len(columns), np.uint8)
        loaded["layout_of_all"] = index.layouts[0] if len(index.layouts) == 1 else None
        for name, value in loaded.items():
            setattr(self, name, value)

    @property
    def file(self) -> ShardFile:
        """The file, opened if it is not."""
        return self.files.get(self.path)

    def sample_row(self, row: int) -> int:
        """Return the number of the sample in the shard, where some samples lack this cache."""
        rows = self.columns.rows
        return row if rows is None else rows.item(row)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        return self.index.keys[self.sample_row(row)]

    def layout(self, row: int) -> Layout:
        """Return the layout of a sample."""
        number = self.columns.layout.item(row)
        layout = self._layouts.get(number)
        if layout is None:
            if len(self._layouts) >= 4096:
                self._layouts.clear()
            layout = self._layouts[number] = self.index.layouts[number]
        return layout

    def layouts_of(self, rows: Array) -> tuple[list[Layout], Array]:
        """Return the layouts of samples, and which of them each sample has."""
        _, some, inverse = np.unique(self.columns.layout[rows], return_index=True, return_inverse=True)
        return [self.layout(row) for row in rows[some].tolist()], inverse

    def sample(self, row: int) -> Any:
        """Return a sample, its tensors lazy; from one read of its skeleton.

        Raises:
            FormatError: The shard is not what its index says, or damaged.
            UnsafeSkeletonError: The skeleton asks for anything outside the format.
        """
        columns = self.columns
        layout = self._layouts.get(columns.layout.item(row)) or self.layout(row)
        skeleton, begin = self._skeleton(row, layout)
        source = _ShardSource(self, row, columns.tensors_begin.item(row))
        try:
            return decode_body(skeleton, begin, layout, source, True, self._allow)
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def template(self, row: int) -> Template | None:
        """Return the template that a sample's skeleton matches, if any: samples of one template differ in values.

        The skeleton is read once. What the index knows does not tell: samples with the same tensors may have other values.
        """
        known: int = self._template_numbers.item(row)
        if known:
            return self._templates[known - 1]
        layout = self.layout(row)
        template: Template | None = layout.form.template
        if template is None:
            return None
        skeleton, begin = self._skeleton(row, layout)
        if template.match(skeleton, begin) is MISS:
            return None
        self.note_template(row, template)
        return template

    def note_template(self, rows: int | Array, template: Template) -> None:
        """Remember that the skeletons of samples match a template."""
        for number, known in enumerate(self._templates, start=1):
            if known is template:
                self._template_numbers[rows] = number
                return
        if len(self._templates) < _MAX_TEMPLATES:
            # by its place in the list, which another thread may extend too
            self._templates.append(template)
            self.note_template(rows, template)

    def _skeleton(self, row: int, layout: Layout) -> tuple[bytes, int]:
        """Return the skeleton member, and where its body begins; its tar header is checked, which costs no read of its own."""
        index, columns = self.index, self.columns
        begin = columns.skeleton_begin.item(row)
        data = self.files.get(self.path).read(begin - BLOCK, begin + columns.skeleton_nbytes.item(row))
        name = index.keys.raw(row if columns.rows is None else columns.rows.item(row)) + self._suffixes[0]
        if not data.startswith(name) or data[len(name)]:
            self._check_name(data, name, begin)
        skeleton = data[BLOCK:]
        try:
            return skeleton, check_binding(skeleton, layout.nbytes, columns.digest.item(row) or None)[0]
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def _check_name(self, data: bytes, name: bytes, begin: int) -> None:
        if data.startswith(name) and not data[len(name)] and len(name) < _NAME_NBYTES:
            return
        dot = name.find(b".", name.rfind(b"/") + 2)
        # long and odd names, which other writers put elsewhere, and suffixes in capitals
        for found in names_of(self.file.read, begin, self.file.nbytes):
            if found[:dot] == name[:dot] and found[dot:].lower() == name[dot:]:
                return
        there = data[:_NAME_NBYTES].partition(b"\0")[0].decode(errors="replace")
        raise FormatError(
            f"{self.path}: the index has member {name.decode(errors='replace')!r} where {there!r:.120} is: "
            "the shard was changed or damaged; tc.verify tells which"
        )

    def find_members(self, rows: Array, suffix: str) -> Array:
        """Return the number of each sample's member with this suffix, -1 for samples without one."""
        members = self.index.members.get(suffix)
        samples = rows if self.columns.rows is None else self.columns.rows[rows]
        return np.full(len(rows), -1) if members is None else members.find(samples)

    def member(self, row: int, suffix: str, number: int) -> bytes:
        """Return the member that `find_members` found.

        Raises:
            FormatError: The shard is not what its index says.
        """
        members = self.index.members[suffix]
        begin, nbytes = members.begin.item(number), members.nbytes.item(number)
        data = self.file.read(begin - BLOCK, begin + nbytes)
        self._check_name(data, self.index.keys.raw(self.sample_row(row)) + f".{suffix}".encode(), begin)
        if nbytes < 1 << 33 and parse_number(data[_SIZE_BEGIN : _SIZE_BEGIN + 12]) != nbytes:
            raise FormatError(f"{self.path}: sample {self.key(row)!r}: its {suffix!r} is not the one that was indexed")
        return data[BLOCK:]

    def check_tensors(self, row: int) -> None:
        """Raise FormatError unless the tensors of a sample are where the index says; looks once per sample."""
        index, columns, checked = self.index, self.columns, self.checked
        if checked[row]:
            return
        layout = self.layout(row)
        begin, digest = columns.tensors_begin.item(row), columns.digest.item(row)
        data = self.file.read(begin - BLOCK, begin + max(layout.data_begin, DIGITS_END))
        self._check_name(data, index.keys.raw(self.sample_row(row)) + self._suffixes[1], begin)
        # from 8 GiB on, sizes may be in a pax record
        good = layout.nbytes >= 1 << 33 or parse_number(data[_SIZE_BEGIN : _SIZE_BEGIN + 12]) == layout.nbytes
        good = good and (not digest or data.startswith(b"%016x" % digest, BLOCK + DIGITS_BEGIN))
        number, rest = columns.layout.item(row), data[BLOCK + DIGITS_END :]
        if good and not (digest and self._confirmed.get(number) == rest):
            try:
                good = parse_header(data[BLOCK:], layout.nbytes)[0] == layout
            except FormatError:
                good = False
            if good and digest:
                if len(self._confirmed) >= 4096:
                    self._confirmed.clear()
                self._confirmed[number] = rest
        if not good:
            raise FormatError(
                f"{self.path}: sample {self.key(row)!r}: its tensors are not those that were indexed: "
                "the shard was changed or damaged; tc.verify tells which"
            )
        checked[row] = True

    def skeletons(self, rows: Array, io: str) -> tuple[list[bytes], list[int]]:
        """Return the skeleton members of many samples, and where their bodies begin; `io` is as of `tc.open`.

        Raises:
            FormatError: The shard is not what its index says.
        """
        columns, file = self.columns, self.file
        begins = columns.skeleton_begin[rows].astype(np.int64)
        ends = begins + columns.skeleton_nbytes[rows].astype(np.int64)
        nbytes = self.index.layouts.nbytes[columns.layout[rows]].astype("<u8")
        bound = np.stack([nbytes, columns.digest[rows].astype("<u8")], 1).tobytes()
        key_begins, key_ends = self._key_extents(rows)
        text, suffix = self.index.keys.text.data, self._suffixes[0]
        skeletons, bodies = [], []
        # one slice or read per sample; what is not just as the writer makes it is looked at closely
        extents = zip(read_ranges(file, begins - BLOCK, ends, io), key_begins.tolist(), key_ends.tolist(), strict=True)
        for i, (data, key_begin, key_end) in enumerate(extents):
            skeleton, body = data[BLOCK:], PREAMBLE_NBYTES
            name = text[key_begin:key_end].tobytes() + suffix
            if not (data.startswith(name) and is_preamble(skeleton, bound[16 * i : 16 * i + 16])):
                row = rows.item(i)
                skeleton, body = self._skeleton(row, self.layout(row))
            skeletons.append(skeleton)
            bodies.append(body)
        return skeletons, bodies

    def _key_extents(self, rows: Array) -> tuple[Array, Array]:
        columns = self.columns
        samples = rows if columns.rows is None else columns.rows[rows].astype(np.int64)
        ends = self.index.keys.ends
        return np.where(samples > 0, ends[samples - 1], 0).astype(np.int64), ends[samples].astype(np.int64)

    def check_mapped(self, rows: Array, maps: Maps, base: int) -> None:
        """Do what `check_tensors` does for many samples, through the map, which begins at `base` in `maps`."""
        index, columns, checked = self.index, self.columns, self.checked
        known = checked[rows]
        if known.all():
            return
        rows = rows[~known]
        numbers = columns.layout[rows]
        begins = columns.tensors_begin[rows].astype(np.int64) + base
        digests = columns.digest[rows]
        digits = _HEX[digests.astype(">u8").view(np.uint8)]
        good = _equal(maps.gather(begins + DIGITS_BEGIN, 16), digits.reshape(-1, 16))
        for number in np.unique(numbers).tolist():
            which = slice(None) if bool((numbers == number).all()) else np.flatnonzero(numbers == number)
            rest = self._confirmed.get(number)
            if rest is None:
                self.check_tensors(rows[which][0].item())
                rest = self._confirmed.get(number)
            if rest is None:
                good[which] = False
            elif rest:
                found = maps.gather(begins[which] + DIGITS_END, len(rest))
                good[which] &= (found == np.frombuffer(rest, np.uint8)).all(1)
        good &= digests != 0  # the others are parsed one by one
        headers = maps.gather(begins - BLOCK, _SIZE_BEGIN + 12)
        nbytes = index.layouts.nbytes[numbers]
        octal = (nbytes[:, None] >> _OCTAL_SHIFTS & 7) + ord("0")
        good &= (headers[:, _SIZE_BEGIN : _SIZE_BEGIN + 11] == octal).all(1) | (nbytes >= 1 << 33)
        key_begins, key_ends = self._key_extents(rows)
        lengths = key_ends - key_begins
        text = torch.from_numpy(view_bytes(index.keys.text.data))
        suffix = np.frombuffer(self._suffixes[1], np.uint8)
        for length in np.unique(lengths).tolist():
            which = slice(None) if bool((lengths == length).all()) else np.flatnonzero(lengths == length)
            width = -(-(length + len(suffix) + 1) // 8) * 8  # the field is filled up with zeros
            if width > _NAME_NBYTES:
                good[which] = False
                continue
            expected = np.zeros((len(key_begins[which]), width), np.uint8)
            expected[:, :length] = gather(text, key_begins[which], length)
            expected[:, length : length + len(suffix)] = suffix
            good[which] &= _equal(np.ascontiguousarray(headers[which, :width]), expected)
        checked[rows[good]] = True
        for row in rows[~good].tolist():
            self.check_tensors(row)  # raises


_EMPTY = np.empty(0, np.uint64)
_NONE = CacheColumns(None, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)


def _equal(left: Array, right: Array) -> Array:
    """Return which rows are equal; their width is a multiple of 8."""
    return (left.view(np.uint64) == np.ascontiguousarray(right).view(np.uint64)).all(1)  # type: ignore[no-any-return]


class _ShardSource(StoredBytes):
    """The tensors of one sample of a shard; pickles as the file's path and identity."""

    __slots__ = ("_begin", "_row", "_shard")

    def __init__(self, shard: Shard, row: int, begin: int) -> None:
        self._shard = shard
        self._row = row
        self._begin = begin

    def _open(self) -> tuple[ShardFile, int, Pool]:
        shard = self._shard
        if not shard.checked[self._row]:
            shard.check_tensors(self._row)
        return shard.files.get(shard.path), self._begin, shard.pool

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        file, first, _ = self._open()
        return FileSource(file.path, file.identity), first + begin
