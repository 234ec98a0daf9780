"""Read one cache of one shard: its index, the skeletons of its samples, and the bytes of their tensors."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.layout import Form, Layout
from wds_tensorcache.codec.preamble import PREAMBLE_NBYTES, is_preamble
from wds_tensorcache.codec.sample import check_binding, decode_body
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.errors import FormatError, TarFormatError, TensorCacheError
from wds_tensorcache.shards.dali_index import MIN_LOST_NBYTES, listed_after
from wds_tensorcache.shards.footer import parse_footer, read_footer
from wds_tensorcache.shards.index import CacheColumns, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.manifest import ListedCounts, check_listed, other_count
from wds_tensorcache.shards.remote.find_index import FindIndex
from wds_tensorcache.shards.sidecar import check_sidecar, open_sidecar
from wds_tensorcache.shards.tar.hidden import hidden_members, lost_members
from wds_tensorcache.storage.files import Files, Identity, ShardFile
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.remote.remote_file import RemoteFile, RemoteIdentity
from wds_tensorcache.storage.remote.urls import is_url

__all__ = ["FileSource", "Shard", "Variant", "load_index"]

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
_MAX_TEMPLATES = 255
_LEASED_NBYTES = 1 << 16  # from this size on, recycled memory is faster than new memory
_MAX_LAYOUTS = 4096  # the most layouts of one shard in memory
_MAX_VARIANTS = 64
Variant: TypeAlias = "tuple[frozenset[str], Form, int]"


def load_index(file: ShardFile) -> ShardIndex:
    """Return the index of a shard from its footer, otherwise from its sidecar, otherwise from a scan. All three are equal.

    Raises:
        FormatError: The file is not a shard, or is damaged.
    """
    try:
        index = read_footer(file.read, file.nbytes)
        if index is None and (sidecar := open_sidecar(file.path)) is not None:
            index = parse_footer(sidecar.read(0, sidecar.nbytes), file.nbytes)
            if index is not None:
                check_sidecar(index, file.read, file.nbytes)
        return scan_shard(file.read, file.nbytes) if index is None else index
    except TensorCacheError as exc:
        raise exc.at(file.path) from exc


def _variants_of(index: ShardIndex, columns: CacheColumns) -> tuple[Variant, ...]:
    """Return `Shard.variants`. Cost: one pass over the rows if the shard has several forms."""
    table = index.layouts
    if len(table.forms) == 1:
        return ((frozenset(name for name, *_ in table.forms[0].entries), table.forms[0], 0),)
    numbers, rows = np.unique(table.form[columns.layout], return_index=True)
    used = [(table.forms[number], row) for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]
    found: list[Variant] = []
    other: list[Variant] = []  # one without further names, which shows that samples differ
    covered = set[str]()
    for form, row in sorted(used, key=lambda each: -len(each[0].entries)):
        names = frozenset(name for name, *_ in form.entries)
        if (not found or not names <= covered) and len(found) < _MAX_VARIANTS:  # a hostile file could have any number
            covered |= names
            found.append((names, form, row))
        elif not other and names != found[0][0]:
            other = [(names, form, row)]
    return tuple(found + other if len(found) == 1 else found)


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
        layout_of_all: Layout of all samples; None unless the shard has exactly one.
        variants: Samples that together have all tensors: names of the sample's tensors, its form, and its row. Several if
            samples differ in the names of their tensors. At most 64.

    Threads/fork/pickle: safe everywhere; pickles as its path, so a copy loads the index again.
    """

    index = _Loaded[ShardIndex]()
    columns = _Loaded[CacheColumns]()
    layout_of_all = _Loaded["Layout | None"]()
    variants = _Loaded["tuple[Variant, ...]"]()
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
        self._find_index = find_index
        self._layouts: dict[int, Layout] = {}
        self._templates: list[Template] = []

    def __reduce__(self) -> Any:
        known = (self.path, self.name, self.files, self.pool, self._allow, len(self), None, self._listed)
        return partial(Shard, find_index=self._find_index), known

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self.columns)
        return self._count

    def take_index(self, other: Shard) -> None:
        """Use the index that is loaded in `other`, another cache of the same shard."""
        self._index = other.index

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
        loaded = {"index": index, "columns": columns}
        loaded["_template_numbers"] = np.zeros(len(columns), np.uint8)
        loaded["layout_of_all"] = index.layouts[0] if len(index.layouts) == 1 else None
        loaded["variants"] = _variants_of(index, columns)
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
            return find_index.load(self.path, self.files, self._listed.num_samples, may_scan=may_scan)
        except FormatError as exc:  # the messages of other errors have the url
            raise exc.at(self.path) from exc

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
        source = _ShardSource(self, columns.tensors_begin.item(row))
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
        """Return the range of bytes of a sample's skeleton member."""
        begin = self.columns.skeleton_begin.item(row)
        return begin, begin + self.columns.skeleton_nbytes.item(row)

    def skeleton_extents(self, rows: Array) -> tuple[Array, Array]:
        """Return where `skeleton_extent` begins and ends for many samples, both int64 `[n]`."""
        begins = self.columns.skeleton_begin[rows].astype(np.int64)
        return begins, begins + self.columns.skeleton_nbytes[rows].astype(np.int64)

    def _skeleton(self, row: int, layout: Layout, stored: bytes | None = None) -> tuple[bytes, int]:
        """Return a sample's skeleton member, and the offset of the body in it. Its preamble is compared with the index."""
        columns = self.columns
        if stored is None:
            begin = columns.skeleton_begin.item(row)
            file = self.files.get(self.path)
            stored = file.read(begin, begin + columns.skeleton_nbytes.item(row))
            file.check_unchanged()
        try:
            return stored, check_binding(stored, layout.nbytes, columns.digest.item(row) or None)[0]
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def find_members(self, rows: Array, suffix: str) -> Array:
        """Return, for each sample, the position of its member among the members with this suffix; -1 if it has none."""
        members = self.index.members.get(suffix)
        samples = rows if self.columns.rows is None else self.columns.rows[rows]
        return np.full(len(rows), -1) if members is None else members.find(samples)

    def member_extent(self, suffix: str, number: int) -> tuple[int, int]:
        """Return the range of bytes of a member; `number` is the position that `find_members` returned."""
        members = self.index.members[suffix]
        begin = members.begin.item(number)
        return begin, begin + members.nbytes.item(number)

    def member(self, suffix: str, number: int) -> bytes:
        """Return the content of a member; `number` is the position that `find_members` returned."""
        file = self.file
        content = file.read(*self.member_extent(suffix, number))
        file.check_unchanged()
        return content

    def skeletons(self, rows: Array, fetched: Iterable[bytes] | None = None) -> tuple[list[bytes], list[int]]:
        """Return the skeleton members of many samples, and the offsets of their bodies.

        `fetched` contains the bytes at each sample's `skeleton_extent`, if they were read already.

        Raises:
            FormatError: The shard does not match its index.
        """
        file = self.file
        if fetched is None:
            fetched = file.read_many(*self.skeleton_extents(rows))
        nbytes = self.index.layouts.nbytes[self.columns.layout[rows]].astype("<u8")
        # lengths and digests of the tensors, as preambles store them
        bound = np.stack([nbytes, self.columns.digest[rows].astype("<u8")], 1).tobytes()
        skeletons, bodies = [], []
        # One slice or read per sample. `_skeleton` checks preambles that differ from those of our writer.
        for i, skeleton in enumerate(fetched):
            body = PREAMBLE_NBYTES
            if not is_preamble(skeleton, bound[16 * i : 16 * i + 16]):
                row = rows.item(i)
                skeleton, body = self._skeleton(row, self.layout(row), skeleton)
            skeletons.append(skeleton)
            bodies.append(body)
        file.check_unchanged()
        return skeletons, bodies


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
        view = file.view(first + begin, first + end)
        return np.frombuffer(self.read(begin, end), np.uint8) if view is None else view


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
_FILES = Files(fixed=False)
_POOL = Pool(1 << 28)


class _ShardSource(_StoredBytes):
    """Source of the tensors of one sample of a shard. Lazy tensors are pickled with the FileSource that `cut` returns."""

    __slots__ = ("_begin", "_shard")

    def __init__(self, shard: Shard, begin: int) -> None:
        self._shard = shard
        self._begin = begin

    def _pool(self) -> Pool:
        return self._shard.pool

    def _is_remote(self) -> bool:
        return self._shard.is_remote

    def _open(self) -> tuple[ShardFile, int]:
        return self._shard.file, self._begin

    def cut(self, begin: int, end: int) -> tuple[FileSource, int]:
        file, first = self._open()
        return FileSource(self._shard.path, file.identity), first + begin
