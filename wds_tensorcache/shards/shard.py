"""Read one cache of one shard: its index, the skeletons of its samples, and the bytes of their tensors."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar, cast

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import DIGITS_BEGIN, DIGITS_END, parse_header
from wds_tensorcache.codec.layout import Form, Layout
from wds_tensorcache.codec.preamble import PREAMBLE_NBYTES, are_preambles, is_preamble, sign_header
from wds_tensorcache.codec.sample import check_binding, decode_body
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.codec.views import are_equal_at, read_windows, view_bytes
from wds_tensorcache.errors import FormatError, TarFormatError, TensorCacheError
from wds_tensorcache.shards.dali_index import MIN_LOST_NBYTES, listed_after
from wds_tensorcache.shards.footer import parse_footer, read_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.manifest import ListedCounts, check_listed, other_count
from wds_tensorcache.shards.names import SKELETON, TENSORS, member_suffix
from wds_tensorcache.shards.remote.find_index import FindIndex, scan_remote
from wds_tensorcache.shards.sidecar import open_sidecar
from wds_tensorcache.shards.tar.fields import parse_number
from wds_tensorcache.shards.tar.headers import BLOCK, names_of
from wds_tensorcache.shards.tar.hidden import hidden_members, lost_members
from wds_tensorcache.storage.files import Files, Identity, ShardFile
from wds_tensorcache.storage.maps import Maps, read_ranges
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.node_cache.cache import read_remote
from wds_tensorcache.storage.remote.fetch import PART_NBYTES
from wds_tensorcache.storage.remote.remote_file import RemoteFile, RemoteIdentity
from wds_tensorcache.storage.remote.urls import is_url

__all__ = ["FileSource", "Shard", "load_index"]

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
_NAME_NBYTES = 100  # the width of a tar header's name field
_SIZE_BEGIN = 124  # the offset of a tar header's size field
_OCTAL_SHIFTS = np.arange(30, -1, -3)
_MAX_TEMPLATES = 255
_LEASED_NBYTES = 1 << 16  # from this size on, recycled memory is faster than new memory
_NEAR_NBYTES = 1 << 12  # one request always reads ranges with up to this many bytes between them
_MAX_LAYOUTS = 4096  # the most layouts of one shard in memory
_CHANGED = "the shard was changed or damaged; `tensorcache verify` (tc.verify) reports which"
_HEX = np.array([list(b"%02x" % byte) for byte in range(256)], np.uint8)


def load_index(file: ShardFile) -> ShardIndex:
    """Return the index of a shard from its footer, otherwise from its sidecar, otherwise from a scan. All three are equal.

    Raises:
        FormatError: The file is not a shard, or is damaged.
    """
    try:
        index = read_footer(file.read, file.nbytes)
        if index is None and (sidecar := open_sidecar(file.path)) is not None:
            index = parse_footer(sidecar.read(0, sidecar.nbytes), file.nbytes)
        return scan_shard(file.read, file.nbytes) if index is None else index
    except TensorCacheError as exc:
        raise exc.at(file.path) from exc


@lru_cache(maxsize=64)  # one or a few names for all shards
def _suffixes(name: str) -> tuple[bytes, bytes]:
    """Return the suffixes of a cache's two members, each with a leading dot."""
    return f".{member_suffix(name, SKELETON)}".encode(), f".{member_suffix(name, TENSORS)}".encode()


class _Loaded(Generic[_T]):
    """An attribute whose first use loads the shard's index."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, shard: Any, owner: Any = None) -> _T:
        # called only before the index is loaded: instance attributes take precedence over this descriptor
        shard._load()
        return getattr(shard, self._name)  # type: ignore[no-any-return]


class Shard:
    """One cache of one shard. A `row` is a sample's number among the samples that have this cache.

    Attributes:
        index: Index of the shard; loaded on first use of any of these attributes.
        columns: Columns of this cache in the index.
        checked: True for each sample that `check_tensors` accepted, bool `[len(shard)]`.
        layout_of_all: Layout of all samples; None unless the shard has exactly one.

    Threads/fork/pickle: safe everywhere; pickles as its path, so a copy loads the index again.
    """

    index = _Loaded[ShardIndex]()
    columns = _Loaded[CacheColumns]()
    checked = _Loaded[Array]()
    layout_of_all = _Loaded["Layout | None"]()
    _template_numbers = _Loaded[Array]()  # the number of each sample's template, uint8; 0 if unknown

    def __init__(
        self,
        path: str,
        name: str,
        files: Files,
        pool: Pool,
        allow: Mapping[tuple[str, str], type],
        count: int | None = None,
        index: ShardIndex | None = None,
        listed: ListedCounts = ListedCounts(),  # noqa: B008  # immutable
        *,
        find_index: FindIndex | None = None,
    ) -> None:
        self.is_remote = is_url(path)
        # also valid in other processes and after os.chdir; pickled once
        self.path = path if self.is_remote else sys.intern(os.path.abspath(path))
        self.name = name
        self.files = files
        self.pool = pool
        self._listed = listed  # the numbers include samples without this cache
        self._allow = allow
        self._count = count
        self._index = index
        self._is_own = False  # whether the index is that of a remote shard's own bytes
        self._find_index = find_index
        self._suffixes = _suffixes(name)
        self._layouts: dict[int, Layout] = {}
        self._confirmed: dict[int, bytes] = {}  # by layout number, one header; its other headers differ only in digests
        self._templates: list[Template] = []

    def __reduce__(self) -> Any:
        known = (self.path, self.name, self.files, self.pool, self._allow, len(self), None, self._listed)
        return partial(Shard, find_index=self._find_index), known

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self.columns)
        return self._count

    def forms(self) -> list[tuple[Form, int]]:
        """Return each form of the samples, with the row of one of them."""
        numbers, rows = np.unique(self.index.layouts.form[self.columns.layout], return_index=True)
        return [(self.index.layouts.forms[at], row) for at, row in zip(numbers.tolist(), rows.tolist(), strict=True)]

    def with_names(self) -> Shard:
        """Return this shard with an index that has the further names of tensors, from a scan: old indexes lack them.

        Raises:
            FormatError: The shard does not match its index.
        """
        file = self.files.remote(self.path) if self.is_remote else self.file
        scanned = scan_remote(file) if isinstance(file, RemoteFile) else scan_shard(file.read, file.nbytes)
        names = scanned.caches.get(self.name, _NONE)
        if not np.array_equal(names.digest, self.columns.digest):
            raise FormatError(f"{self.path}: the index does not match the shard: {_CHANGED}")
        caches = {**self.index.caches, self.name: replace(self.columns, layout=names.layout)}
        index = replace(self.index, caches=caches, layouts=scanned.layouts)
        made = Shard(
            self.path, self.name, self.files, self.pool, self._allow, len(self), index, self._listed,
            find_index=self._find_index,
        )  # fmt: skip
        made._is_own = self._is_own
        return made

    def take_index(self, other: Shard) -> None:
        """Use the index that is loaded in `other`, another cache of the same shard."""
        self._index, self._is_own = other.index, other._is_own

    def load(self, *, may_scan: bool = True) -> bool:
        """Load the index, unless it is loaded, and return True.

        Without `may_scan`, return False for a remote shard that has no index, and so must be read as a whole.
        """
        if not self.is_loaded:
            if self._index is None and not may_scan:
                self._index = self._read_remote_index(may_scan=False)
                if self._index is None:
                    return False
            self._load()
        return True

    def _load(self) -> None:
        index = self._index or self._read_index()
        columns = index.caches.get(self.name, _NONE)
        if self._count not in (None, len(columns)):
            counted = f"{len(columns)} samples with cache {self.name!r}"
            raise other_count(self.path, counted, self._count)
        check_listed(self.path, self._listed, num_samples=len(index.keys), digest=index.digest)
        # setattr, because using `__dict__` would slow down every later access to an attribute
        loaded = {"index": index, "columns": columns, "checked": np.zeros(len(columns), np.bool_)}
        loaded["_template_numbers"] = np.zeros(len(columns), np.uint8)
        loaded["layout_of_all"] = index.layouts[0] if len(index.layouts) == 1 else None
        for name, value in loaded.items():
            setattr(self, name, value)

    def _read_index(self) -> ShardIndex:
        index = self._read_remote_index(may_scan=True) if self.is_remote else load_index(self.file)
        assert index is not None
        if (unseen := self.find_unseen(index)) is not None:
            warnings.warn(str(unseen), stacklevel=user_level())
        return index

    def find_unseen(self, index: ShardIndex) -> TarFormatError | None:
        """Return the error for members that a scan, with this result, did not see; None if nothing shows any."""
        if index.hidden is not None:
            return hidden_members(index.end, index.hidden).at(self.path)
        # Hazard: if zeros have overwritten members, and the footer with them, only DALI's index lists these members.
        if index.digest is None and not self.is_remote and self.file.nbytes - index.end >= MIN_LOST_NBYTES:
            idx = dali_index_path(self.path)
            with contextlib.suppress(OSError):
                if (listed := listed_after(idx, index.end, self.file.nbytes)) is not None:
                    return lost_members(idx, index.end, listed).at(self.path)
        return None

    def _read_remote_index(self, *, may_scan: bool) -> ShardIndex | None:
        find_index = self._find_index or FindIndex()
        try:
            found = find_index.load(self.path, self.files, self._listed.num_samples, may_scan=may_scan)
        except FormatError as exc:  # the messages of other errors have the url
            raise exc.at(self.path) from exc
        if found is None:
            return None
        self._is_own = found[1]
        return found[0]

    @property
    def is_loaded(self) -> bool:
        """True if the index is loaded, so that `index` and the other attributes cost nothing."""
        return "index" in self.__dict__

    @property
    def file(self) -> ShardFile:
        """The open file of the shard, opened again if needed."""
        return self.files.get(self.path)

    def sample_row(self, row: int) -> int:
        """Return a sample's number among all samples of the shard, including those without this cache."""
        rows = self.columns.rows
        return row if rows is None else rows.item(row)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        return self.index.key(self.sample_row(row))

    def layout(self, row: int) -> Layout:
        """Return the layout of a sample."""
        number = self.columns.layout.item(row)
        layout = self._layouts.get(number)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[number] = self.index.layouts[number]
        return layout

    def layouts_of(self, rows: Array) -> tuple[list[Layout], Array]:
        """Return the distinct layouts of `rows`, and for each row the position of its layout among them."""
        _, some, inverse = np.unique(self.columns.layout[rows], return_index=True, return_inverse=True)
        return [self.layout(row) for row in rows[some].tolist()], inverse

    def sample(self, row: int, stored: bytes | None = None) -> Any:
        """Return a sample with lazy tensors. Cost: one read, of the sample's skeleton, unless `stored` contains it.

        Args:
            stored: The bytes at `skeleton_extent`, if they were read already.

        Raises:
            FormatError: The shard is damaged, or does not match its index.
            UnsafeSkeletonError: The skeleton asks for anything outside the format.
        """
        columns = self.columns
        layout = self._layouts.get(columns.layout.item(row)) or self.layout(row)
        skeleton, begin = self._skeleton(row, layout, stored)
        source = _ShardSource(self, row, columns.tensors_begin.item(row))
        try:
            return decode_body(skeleton, begin, layout, source, True, self._allow)
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def template(self, row: int, stored: bytes | None = None) -> Template | None:
        """Return the template that a sample's skeleton matches; None if it matches none.

        Skeletons that match one template differ only in plain values. This method reads the skeleton, since the index does
        not contain templates, and remembers a match. `stored` is as in `sample`.
        """
        known: int = self._template_numbers.item(row)
        if known:
            return self._templates[known - 1]
        layout = self.layout(row)
        template: Template | None = layout.form.template
        if template is None:
            return None
        skeleton, begin = self._skeleton(row, layout, stored)
        if template.match(skeleton, begin) is MISS:
            return None
        self.note_template(row, template)
        return template

    def note_template(self, rows: int | Array, template: Template) -> None:
        """Record that the skeletons of `rows` match `template`."""
        for number, known in enumerate(self._templates, start=1):
            if known is template:
                self._template_numbers[rows] = number
                return
        if len(self._templates) < _MAX_TEMPLATES:
            # search again: another thread may have appended at the same time
            self._templates.append(template)
            self.note_template(rows, template)

    def skeleton(self, row: int) -> tuple[bytes, int]:
        """Return a sample's skeleton member, and the offset of the body in it.

        Raises:
            FormatError: The shard does not match its index.
        """
        return self._skeleton(row, self.layout(row))

    def knows_template(self, row: int) -> bool:
        """Return whether the template of a sample is known, so that neither `template` nor a structure needs its skeleton."""
        return bool(self._template_numbers.item(row))

    def skeleton_extent(self, row: int) -> tuple[int, int]:
        """Return the range of bytes of a sample's skeleton member, with its tar header."""
        begin = self.columns.skeleton_begin.item(row)
        return begin - BLOCK, begin + self.columns.skeleton_nbytes.item(row)

    def skeleton_extents(self, rows: Array) -> tuple[Array, Array]:
        """Return where `skeleton_extent` begins and ends for many samples, both int64 `[n]`."""
        begins = self.columns.skeleton_begin[rows].astype(np.int64)
        return begins - BLOCK, begins + self.columns.skeleton_nbytes[rows].astype(np.int64)

    def header_extent(self, row: int) -> tuple[int, int]:
        """Return the range of bytes of the headers of a sample's tensors: the tar header, then the safetensors header."""
        begin = self.columns.tensors_begin.item(row)
        return begin - BLOCK, begin + max(self.layout(row).data_begin, DIGITS_END)

    def _skeleton(self, row: int, layout: Layout, stored: bytes | None = None) -> tuple[bytes, int]:
        """Return a sample's skeleton member, and the offset of the body in it.

        One read returns the member and its tar header; the name in the header is compared with the key.
        """
        index, columns = self.index, self.columns
        begin = columns.skeleton_begin.item(row)
        if stored is None:
            stored = self.files.get(self.path).read(begin - BLOCK, begin + columns.skeleton_nbytes.item(row))
        name = index.keys.raw(row if columns.rows is None else columns.rows.item(row)) + self._suffixes[0]
        if not stored.startswith(name) or stored[len(name)]:
            self._check_name(stored, name, begin)
        skeleton = stored[BLOCK:]
        try:
            return skeleton, check_binding(skeleton, layout.nbytes, columns.digest.item(row) or None)[0]
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def _check_name(self, stored: bytes, name: bytes, begin: int) -> None:
        if stored.startswith(name) and not stored[len(name)] and len(name) < _NAME_NBYTES:
            return
        dot = name.find(b".", name.rfind(b"/") + 2)
        # other writers may store the name in extended headers, or write suffixes in capitals
        for found in names_of(self.file.read, begin, self.file.nbytes):
            if found[:dot] == name[:dot] and _lower(found[dot:]) == name[dot:]:
                return
        there = stored[:_NAME_NBYTES].partition(b"\0")[0].decode(errors="replace")
        what = f"the index lists member {name.decode(errors='replace')!r} where the shard has {there!r:.120}"
        raise FormatError(f"{self.path}: {what}: {_CHANGED}")

    def find_members(self, rows: Array, suffix: str) -> Array:
        """Return, for each sample, the position of its member among the members with this suffix; -1 if it has none."""
        members = self.index.members.get(suffix)
        samples = rows if self.columns.rows is None else self.columns.rows[rows]
        return np.full(len(rows), -1) if members is None else members.find(samples)

    def member_extent(self, suffix: str, number: int) -> tuple[int, int]:
        """Return the range of bytes of a member with its tar header; `number` is the position that `find_members` returned."""
        members = self.index.members[suffix]
        begin = members.begin.item(number)
        return begin - BLOCK, begin + members.nbytes.item(number)

    def member(self, row: int, suffix: str, number: int, stored: bytes | None = None) -> bytes:
        """Return the content of a sample's member; `number` is the position that `find_members` returned.

        `stored` are the bytes at `member_extent`, if they were read already.

        Raises:
            FormatError: The shard does not match its index.
        """
        begin, end = self.member_extent(suffix, number)
        stored = self.file.read(begin, end) if stored is None else stored
        begin, nbytes = begin + BLOCK, end - begin - BLOCK
        name = self.index.keys.raw(self.sample_row(row)) + f".{suffix}".encode("utf-8", "surrogateescape")
        self._check_name(stored, name, begin)
        if not _has_size(stored, nbytes):
            what = f"its {suffix!r} differs from the index"
            raise FormatError(f"{self.path}: sample {self.key(row)!r}: {what}: {_CHANGED}")
        return stored[BLOCK:]

    def headers_to_fetch(self, row: int, begin: int, end: int) -> tuple[int, int] | None:
        """Return `header_extent` if the headers must be read together with the bytes `[begin, end)` of a remote shard.

        An index that the shard contains itself needs no comparison with the headers: both were read under one tag. They are
        compared if they cost no further request.
        """
        if self.checked[row]:
            return None
        first, last = self.header_extent(row)
        if self._is_own and not (0 <= begin - last <= _NEAR_NBYTES and end - first <= PART_NBYTES):
            return None
        return first, last

    def skip_checks(self, rows: Array | slice = slice(None)) -> None:
        """Let `check_tensors` accept samples of a remote shard without reading, if the shard contains the index itself.

        `rows` are the numbers of the samples; by default all.
        """
        if self._is_own:
            self.checked[rows] = True

    def check_tensors(self, row: int, stored: bytes | None = None) -> None:
        """Raise FormatError unless the headers of a sample's tensors match the index. Each sample is checked once.

        `stored` are the bytes at `header_extent`, if they were read already.
        """
        index, columns, checked = self.index, self.columns, self.checked
        if checked[row]:
            return
        layout = self.layout(row)
        begin, digest = columns.tensors_begin.item(row), columns.digest.item(row)
        stored = self.file.read(*self.header_extent(row)) if stored is None else stored
        self._check_name(stored, index.keys.raw(self.sample_row(row)) + self._suffixes[1], begin)
        good = _has_size(stored, layout.nbytes)
        number, header = columns.layout.item(row), stored[BLOCK:]
        known = self._confirmed.get(number) if digest else None
        if good and (known is None or header != sign_header(known, digest)):
            try:
                found, declared = parse_header(header, layout.nbytes)
                good = found == layout and (declared or 0) == digest
            except FormatError:
                good = False
            if good and digest:
                if len(self._confirmed) >= _MAX_LAYOUTS:
                    self._confirmed.clear()
                self._confirmed[number] = header
        if not good:
            what = "its tensors differ from the index"
            raise FormatError(f"{self.path}: sample {self.key(row)!r}: {what}: {_CHANGED}")
        checked[row] = True

    def skeletons(self, rows: Array, io: str, fetched: Iterable[bytes] | None = None) -> tuple[list[bytes], list[int]]:
        """Return the skeleton members of many samples, and the offsets of their bodies; `io` is as in `tc.open`.

        `fetched` contains the bytes at each sample's `skeleton_extent`, if they were read already.

        Raises:
            FormatError: The shard does not match its index.
        """
        if fetched is None:
            fetched = read_ranges(self.file, *self.skeleton_extents(rows), io)
        bound = self._bound(rows).tobytes()
        key_begins, key_ends = self._key_extents(rows)
        text, suffix = self.index.keys.text.data, self._suffixes[0] + b"\0"
        skeletons, bodies = [], []
        # One slice or read per sample. `_skeleton` checks headers and preambles that differ from those of our writer.
        extents = zip(fetched, key_begins.tolist(), key_ends.tolist(), strict=True)
        for i, (stored, key_begin, key_end) in enumerate(extents):
            skeleton, body = stored[BLOCK:], PREAMBLE_NBYTES
            name = text[key_begin:key_end].tobytes() + suffix
            if not (stored.startswith(name) and is_preamble(skeleton, bound[16 * i : 16 * i + 16])):
                row = rows.item(i)
                skeleton, body = self._skeleton(row, self.layout(row), stored)
            skeletons.append(skeleton)
            bodies.append(body)
        return skeletons, bodies

    def _bound(self, rows: Array) -> Array:
        """Return the lengths and digests of the tensors of samples, as preambles store them, uint64 `[n, 2]`."""
        nbytes = self.index.layouts.nbytes[self.columns.layout[rows]].astype("<u8")
        return np.stack([nbytes, self.columns.digest[rows].astype("<u8")], 1)

    def _key_extents(self, rows: Array) -> tuple[Array, Array]:
        columns = self.columns
        samples = rows if columns.rows is None else columns.rows[rows].astype(np.int64)
        ends = self.index.keys.ends
        return np.where(samples > 0, ends[samples - 1], 0).astype(np.int64), ends[samples].astype(np.int64)

    def check_mapped(self, rows: Array, maps: Maps, base: int) -> None:
        """Check many samples at once as `check_tensors` does, through the shard's map; it starts at offset `base` of `maps`."""
        index, columns, checked = self.index, self.columns, self.checked
        known = checked[rows]
        if known.all():
            return
        rows = rows[~known]
        numbers = columns.layout[rows]
        begins = columns.tensors_begin[rows].astype(np.int64) + base
        digests = columns.digest[rows]
        digits = _HEX[digests.astype(">u8").view(np.uint8)].reshape(-1, 16)
        good = digests != 0  # `check_tensors` parses samples without a digest
        for number in np.unique(numbers).tolist():
            which = slice(None) if bool((numbers == number).all()) else np.flatnonzero(numbers == number)
            header = self._confirmed.get(number)
            if header is None:
                self.check_tensors(rows[which][0].item())
                header = self._confirmed.get(number)
            if header is None:
                good[which] = False
                continue
            found = maps.gather(begins[which], len(header))
            same = found == np.frombuffer(header, np.uint8)
            same[:, DIGITS_BEGIN:DIGITS_END] = found[:, DIGITS_BEGIN:DIGITS_END] == digits[which]
            good[which] &= same.all(1)
        headers = maps.gather(begins - BLOCK, _SIZE_BEGIN + 12)
        nbytes = index.layouts.nbytes[numbers]
        octal = (nbytes[:, None] >> _OCTAL_SHIFTS & 7) + ord("0")
        good &= (headers[:, _SIZE_BEGIN : _SIZE_BEGIN + 11] == octal).all(1) | (nbytes >= 1 << 33)
        good &= self._have_names(headers, rows, self._suffixes[1])
        checked[rows[good]] = True
        for row in rows[~good].tolist():
            self.check_tensors(row)  # raises, unless only the quick comparison failed

    def are_skeletons(self, rows: Array, stored: Array, at: Array, maps: Maps, begins: Array) -> Array:
        """Return whether the skeletons of samples have the names and preambles that this package writes, bool `[n]`.

        `_skeleton` checks all other skeletons.

        Args:
            rows: Rows of the samples, int64 `[n]`.
            stored, at: Bytes, 1-D uint8, and the offset in them at which each skeleton starts.
            maps, begins: Maps of shards, and the offset in them at which each skeleton starts.
        """
        good = are_preambles(stored, at, self._bound(rows).view("V16")[:, 0])
        new = np.flatnonzero(self._template_numbers[rows] == 0)  # all other names were checked before
        if len(new):
            headers = maps.gather(begins[new] - BLOCK, _NAME_NBYTES)
            good[new] &= self._have_names(headers, rows[new], self._suffixes[0])
        return good

    def _have_names(self, headers: Array, rows: Array, suffix: bytes) -> Array:
        """Return whether tar headers, uint8 `[n, width]`, name the members with this suffix of samples, bool `[n]`."""
        begins, ends = self._key_extents(rows)
        lengths, suffix = ends - begins, suffix + b"\0"
        text, found = view_bytes(self.index.keys.text.data), np.ascontiguousarray(headers).reshape(-1)
        at = np.arange(len(rows)) * headers.shape[1]
        good: Array = (lengths > 0) & (lengths + len(suffix) <= _NAME_NBYTES)
        good &= are_equal_at(found, at + lengths, suffix)
        for length in np.unique(lengths[good]).tolist():
            which = np.flatnonzero(lengths == length)
            good[which] &= read_windows(found, at[which], length) == read_windows(text, begins[which], length)
        return good


def _lower(suffix: bytes) -> bytes:
    """Return a suffix in lower case, as the index has it: `bytes.lower` leaves capitals beyond ASCII as they are."""
    return suffix.decode("utf-8", "surrogateescape").lower().encode("utf-8", "surrogateescape")


def _has_size(header: bytes, nbytes: int) -> bool:
    """Return whether a tar header declares this length; True from 8 GiB on, where a pax record may declare the length."""
    return nbytes >= 1 << 33 or parse_number(header[_SIZE_BEGIN : _SIZE_BEGIN + 12]) == nbytes


_EMPTY = np.empty(0, np.uint64)
_NONE = CacheColumns(None, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)


class _StoredBytes:
    """Base of sources of tensor bytes that read from a file; implements `codec.reference.ByteSource`."""

    __slots__ = ()

    def _open(self) -> tuple[ShardFile, int]:
        """Return the file, and the offset at which the source starts in the file."""
        raise NotImplementedError

    def _pool(self) -> Pool:
        """Return the memory for large buffers."""
        raise NotImplementedError

    def _is_remote(self) -> bool:
        """Return whether the file is at a url."""
        raise NotImplementedError

    def read(self, begin: int, end: int) -> bytearray | Array:
        nbytes, pool = end - begin, self._pool()
        buffer = pool.lease(nbytes) if nbytes >= _LEASED_NBYTES else bytearray(nbytes)
        self.read_into(buffer, begin)
        return buffer

    hold = read

    def read_into(self, buffer: Any, begin: int) -> None:
        file, first = self._open()
        file.read_into([buffer], first + begin)
        file.check_unchanged()

    def view(self, begin: int, end: int) -> Array:
        if self._is_remote():
            return np.frombuffer(self.read(begin, end), np.uint8)
        file, first = self._open()
        file.check_unchanged()
        return file.array()[first + begin : first + end]


class FileSource(_StoredBytes):
    """Source of an unpickled lazy tensor. Its offsets count from the start of the shard's file.

    Each read checks that the file is still the same one.
    """

    __slots__ = ("_identity", "_path")

    def __init__(self, path: str, identity: Identity | RemoteIdentity) -> None:
        self._path = path
        self._identity = identity

    def _pool(self) -> Pool:
        return _POOL

    def _is_remote(self) -> bool:
        return is_url(self._path)

    def _open(self) -> tuple[ShardFile, int]:
        if self._is_remote():
            nbytes, tag = cast(RemoteIdentity, self._identity)
            return cast(ShardFile, RemoteFile(self._path, nbytes, tag)), 0
        file = _FILES.get(self._path)
        if file.identity != self._identity:
            file = _FILES.reopen(self._path)  # the open file may have been replaced on disk
        if file.identity != self._identity:
            raise FormatError("the shard was changed since this lazy tensor was made; read it again").at(self._path)
        return file, 0

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        return self, begin

    def __reduce__(self) -> Any:
        return FileSource, (self._path, self._identity)


# files and memory for lazy tensors that were unpickled, which belong to no open cache
_FILES = Files(64, fixed=False)
_POOL = Pool(1 << 28)


class _ShardSource(_StoredBytes):
    """Source of the tensors of one sample of a shard. Lazy tensors are pickled with the FileSource that `cut` returns."""

    __slots__ = ("_begin", "_row", "_shard")

    def __init__(self, shard: Shard, row: int, begin: int) -> None:
        self._shard = shard
        self._row = row
        self._begin = begin

    def _pool(self) -> Pool:
        return self._shard.pool

    def _is_remote(self) -> bool:
        return self._shard.is_remote

    def _open(self) -> tuple[ShardFile, int]:
        shard = self._shard
        if not shard.checked[self._row] and not shard._is_own:
            shard.check_tensors(self._row)
        return shard.files.get(shard.path), self._begin

    def read_into(self, buffer: Any, begin: int) -> None:
        if self._shard.is_remote:
            self._fetch_into(buffer, begin)
            return
        file, first = self._open()
        file.read_into([buffer], first + begin)
        file.check_unchanged()

    def _fetch_into(self, buffer: Any, begin: int) -> None:
        """Fill `buffer` from a remote shard, with the headers in the same requests if they were not checked."""
        shard, row = self._shard, self._row
        file = shard.files.remote(shard.path)
        ranges: list[tuple[RemoteFile, int, list[Any]]] = [(file, self._begin + begin, [buffer])]
        header = bytearray()
        begin += self._begin
        extent = shard.headers_to_fetch(row, begin, begin + len(buffer))
        if extent is not None:
            header = bytearray(extent[1] - extent[0])
            ranges.append((file, extent[0], [header]))
        read_remote(ranges)
        if header:
            shard.check_tensors(row, bytes(header))

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        file, first = self._open()
        return FileSource(self._shard.path, file.identity), first + begin
