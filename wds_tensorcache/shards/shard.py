"""One cache of one shard: index, skeletons, and bytes of tensors."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.binding import PREAMBLE_NBYTES, is_preamble
from wds_tensorcache.codec.header import Form, Layout
from wds_tensorcache.codec.sample import check_binding, decode_body
from wds_tensorcache.codec.skeleton.template import Template, find_match
from wds_tensorcache.errors import FormatError, TarFormatError, TensorCacheError
from wds_tensorcache.shards.manifest import ShardEntry, check_listed, other_count
from wds_tensorcache.shards.tar import hidden_members
from wds_tensorcache.storage.files import File, Files
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.urls import is_url

if TYPE_CHECKING:
    from wds_tensorcache.shards.index import CacheColumns, ShardIndex
    from wds_tensorcache.shards.remote_indexes import RemoteIndexes

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
_MAX_TEMPLATES = 255
_LEASED_NBYTES = 1 << 16  # from this size on, recycled memory is faster than new memory
_MAX_LAYOUTS = 4096  # the most layouts of one shard in memory
_BOUND = Struct("<QQ").pack  # length and digest of the `.safetensors` member, as in a preamble


class _Loaded(Generic[_T]):
    """An attribute whose first use loads the shard's index."""

    # `__getattr__` would slow down all attributes of the shard

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, shard: Any, owner: Any = None) -> _T:
        # called only before the index is loaded: instance attributes take precedence over this descriptor
        shard.load()
        return getattr(shard, self._name)  # type: ignore[no-any-return]


class Shard:
    """One cache of one shard. A `row` is a sample's number among the samples that have this cache.

    Threads/fork/pickle: safe everywhere; a pickle leaves out the index, so a copy loads it again.
    """

    has_cache = True
    index = _Loaded["ShardIndex"]()
    columns = _Loaded["CacheColumns"]()  # of this cache in the index
    layout_of_all = _Loaded["Layout | None"]()  # None unless the shard has exactly one layout
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
        entry: ShardEntry | None = None,
        *,
        remote_indexes: RemoteIndexes | None = None,
    ) -> None:
        self.is_remote = is_url(path)
        # also valid in other processes and after os.chdir; pickled once
        self.path = path if self.is_remote else sys.intern(os.path.abspath(path))
        self.name = name
        self.files = files
        self.pool = pool
        self._entry = entry  # in the manifest; its numbers include samples without this cache
        self._allow = allow
        self._count = count
        self._index = index
        self._remote_indexes = remote_indexes
        self._layouts: dict[int, Layout] = {}
        self._templates: list[Template] = []

    def __reduce__(self) -> Any:
        # the path is enough, and some caches have 100,000 shards
        entry = self._entry and replace(self._entry, url="")
        state = (self.path, self.name, self.files, self.pool, self._allow, len(self), None, entry)
        return partial(type(self), remote_indexes=self._remote_indexes), state

    def __len__(self) -> int:
        if self._count is None:
            self._count = len(self.columns)
        return self._count

    def forms(self) -> list[tuple[Form, int]]:
        """Return the forms of the samples, each with a sample's row."""
        numbers, rows = np.unique(self.index.layouts.form[self.columns.layout], return_index=True)
        return [(self.index.layouts.forms[at], row) for at, row in zip(numbers.tolist(), rows.tolist(), strict=True)]

    def with_names(self) -> Shard:
        """Return a copy of this shard, with further names in its index.

        The shard is scanned, because old indexes lack these names of tensors. Raises FormatError if the index does not match.
        """
        from wds_tensorcache.shards.load_index import scan

        scanned = scan(self.file)
        names = _columns_in(scanned, self.name)
        if not np.array_equal(names.digest, self.columns.digest):
            problem = "the index does not match the shard; `tensorcache verify` (tc.verify) reports what was changed or damaged"
            raise FormatError(f"{self.path}: {problem}")
        caches = {**self.index.caches, self.name: replace(self.columns, layout=names.layout)}
        shard = copy.copy(self)  # without the index
        shard._index = replace(self.index, caches=caches, layouts=scanned.layouts)
        return shard

    def load(self, *, may_scan: bool = True) -> None:
        """Load the index. If `may_scan` is False, do nothing for a remote shard that has no index."""
        if not self.is_loaded and (index := self._index or self._read_index(may_scan)) is not None:
            self._set_index(index)

    def _set_index(self, index: ShardIndex) -> None:
        columns = _columns_in(index, self.name)
        if self._count not in (None, len(columns)):
            counted = f"{len(columns)} samples with cache {self.name!r}"
            raise other_count(self.path, counted, self._count)
        if self._entry is not None:
            manifest = self.files.manifest_of(self.path)
            check_listed(self.path, self._entry, manifest, num_samples=len(index.keys), digest=index.digest)
        # setattr, because using `__dict__` would slow down every later access to an attribute
        loaded = {"columns": columns, "_template_numbers": np.zeros(len(columns), np.uint8)}
        loaded["layout_of_all"] = index.layouts[0] if len(index.layouts) == 1 else None
        loaded["index"] = index  # set last: other threads look for it
        for name, value in loaded.items():
            setattr(self, name, value)

    def _read_index(self, may_scan: bool) -> ShardIndex | None:
        index: ShardIndex | None
        if not self.is_remote:
            from wds_tensorcache.shards.load_index import load_index

            index = load_index(self.file)
        else:
            from wds_tensorcache.shards.remote_indexes import RemoteIndexes

            places = self._remote_indexes or RemoteIndexes()
            num_samples = None if self._entry is None else self._entry.num_samples
            index = places.load(self.file, num_samples, may_scan=may_scan)
        if index is not None and (unseen := self.find_unseen(index)) is not None:
            warnings.warn(str(unseen), stacklevel=user_level())
        return index

    def find_unseen(self, index: ShardIndex) -> TarFormatError | None:
        """Return an error if the scan for `index` missed members."""
        if index.hidden is not None:
            return hidden_members(index.end, index.hidden).at(self.path)
        # If zeros have overwritten members, and the footer with them, only the manifest lists these members. The numbers of
        # samples of shards that were found through a manifest are compared in any case.
        if index.digest is None and not self.is_remote and self._entry is None:
            from wds_tensorcache.shards.after_end import find_lost

            with suppress(OSError):
                return find_lost(self.path, index.end, self.file.nbytes, len(index.keys))
        return None

    @property
    def is_loaded(self) -> bool:
        return "index" in self.__dict__

    @property
    def file(self) -> File:
        """The open file of the shard, opened again if needed."""
        return self.files.get(self.path)

    def sample_row(self, row: int) -> int:
        """Return a sample's number among all samples, with or without this cache."""
        rows = self.columns.rows
        return row if rows is None else rows.item(row)

    def key(self, row: int) -> str:
        return self.index.key(self.sample_row(row))

    def layout(self, row: int) -> Layout:
        number = self.columns.layout.item(row)
        layout = self._layouts.get(number)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[number] = self.index.layouts[number]
        return layout

    def layouts_of(self, rows: Array) -> tuple[list[Layout], Array]:
        """Return the distinct layouts of `rows`, and each row's position in them."""
        _, first_rows, inverse = np.unique(self.columns.layout[rows], return_index=True, return_inverse=True)
        return [self.layout(row) for row in rows[first_rows].tolist()], inverse

    def sample(self, row: int, stored: bytes | None = None) -> Any:
        """Return a sample with lazy tensors. Raise FormatError if it is damaged, or UnsafeSkeletonError.

        Cost: one read, of the sample's skeleton, unless `stored` contains the bytes at `skeleton_extent`.
        """
        columns = self.columns
        layout = self._layouts.get(columns.layout.item(row)) or self.layout(row)
        skeleton, begin = self.skeleton(row, layout, stored)
        source = FileRange(self, columns.tensors_begin.item(row))
        try:
            return decode_body(skeleton, begin, layout, source, True, self._allow)
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def template(self, row: int, stored: bytes | None = None) -> Template | None:
        """Find and remember the template that matches a sample's skeleton."""
        number: int = self._template_numbers.item(row)
        if number:
            return self._templates[number - 1]
        layout = self.layout(row)
        if not layout.form.templates:
            return None
        template, _ = find_match(layout.form.templates, *self.skeleton(row, layout, stored))
        if template is not None:
            self.note_template(row, template)
        return template

    def note_template(self, rows: int | Array, template: Template) -> None:
        """Record the template of `rows`, up to 255 templates per shard."""
        # two threads may append at once, so the list may be longer, but a number must fit into 8 bits
        for number, noted in enumerate(self._templates[:_MAX_TEMPLATES], start=1):
            if noted is template:
                self._template_numbers[rows] = number
                return
        if len(self._templates) < _MAX_TEMPLATES:
            # search again: another thread may have appended at the same time
            self._templates.append(template)
            self.note_template(rows, template)

    def knows_template(self, row: int) -> bool:
        """Return whether `template` needs no read for this sample."""
        return bool(self._template_numbers.item(row))

    def skeleton_extent(self, row: int) -> tuple[int, int]:
        """Return the range of bytes of a sample's skeleton member."""
        begin = self.columns.skeleton_begin.item(row)
        return begin, begin + self.columns.skeleton_nbytes.item(row)

    def skeleton(self, row: int, layout: Layout | None = None, stored: bytes | None = None) -> tuple[bytes, int]:
        """Return a sample's skeleton member, and the offset of its body. `stored` is as in `sample`."""
        columns, layout = self.columns, layout or self.layout(row)
        digest = columns.digest.item(row)
        if stored is None:
            begin = columns.skeleton_begin.item(row)
            file = self.files.get(self.path)
            stored = file.read(begin, begin + columns.skeleton_nbytes.item(row))
            file.check_unchanged()
        if is_preamble(stored, _BOUND(layout.nbytes, digest)):
            return stored, PREAMBLE_NBYTES
        try:
            return stored, check_binding(stored, layout.nbytes, digest or None)[0]
        except TensorCacheError as exc:
            raise exc.at(f"{self.path}: sample {self.key(row)!r}") from exc

    def find_members(self, rows: Array, suffix: str) -> Array:
        """Return each sample's position in `index.members[suffix]`, int64; -1 if it has none."""
        members = self.index.members.get(suffix)
        samples = rows if self.columns.rows is None else self.columns.rows[rows]
        return np.full(len(rows), -1) if members is None else members.find(samples)

    def member_extent(self, suffix: str, number: int) -> tuple[int, int]:
        """Return a member's range of bytes. `number` is a position from `find_members`."""
        members = self.index.members[suffix]
        begin = members.begin.item(number)
        return begin, begin + members.nbytes.item(number)

    def member(self, suffix: str, number: int) -> bytes:
        file = self.file
        content = file.read(*self.member_extent(suffix, number))
        file.check_unchanged()
        return content

    def skeletons(self, rows: Array, fetched: Iterable[bytes] | None = None) -> tuple[list[bytes], list[int]]:
        """Return the skeleton members of samples, and the offsets of their bodies.

        `fetched` contains the members if the caller has read them.
        """
        file = self.file
        if fetched is None:
            begins = self.columns.skeleton_begin[rows].astype(np.int64)
            ends = begins + self.columns.skeleton_nbytes[rows].astype(np.int64)
            fetched = file.read_many(begins.tolist(), ends.tolist())
        nbytes = self.index.layouts.nbytes[self.columns.layout[rows]].astype("<u8")
        # lengths and digests of the tensors, as preambles store them
        bound = np.stack([nbytes, self.columns.digest[rows].astype("<u8")], 1).tobytes()
        skeletons, bodies = [], []
        # One slice or read per sample. `skeleton` checks preambles that differ from our writer's preambles.
        for i, skeleton in enumerate(fetched):
            body = PREAMBLE_NBYTES
            if not is_preamble(skeleton, bound[16 * i : 16 * i + 16]):
                row = rows.item(i)
                skeleton, body = self.skeleton(row, None, skeleton)
            skeletons.append(skeleton)
            bodies.append(body)
        file.check_unchanged()
        return skeletons, bodies


def _columns_in(index: ShardIndex, name: str) -> CacheColumns:
    if name in index.caches:
        return index.caches[name]
    from wds_tensorcache.shards.index import CacheColumns

    return CacheColumns(None, *[np.empty(0, np.uint64)] * 5)


class FileRange:
    """A `codec.reference.ByteSource`: a file from offset `begin` on. Each read checks that the file is unchanged."""

    __slots__ = ("_begin", "_owner")

    def __init__(self, owner: Shard | _UnpickledFile, begin: int) -> None:
        self._owner = owner
        self._begin = begin

    def allocate(self, nbytes: int) -> bytearray | Array:
        return self._owner.pool.lease(nbytes) if nbytes >= _LEASED_NBYTES else bytearray(nbytes)

    def read(self, begin: int, end: int) -> bytearray | Array:
        buffer = self.allocate(end - begin)
        self.read_into([buffer], begin)
        return buffer

    hold = read

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        file = self._owner.file
        file.read_into(buffers, self._begin + begin)
        file.check_unchanged()

    def view(self, begin: int, end: int) -> Array:
        view = self._owner.file.view(self._begin + begin, self._begin + end)
        return np.frombuffer(self.read(begin, end), np.uint8) if view is None else view

    def cut(self, begin: int, end: int) -> tuple[FileRange, int]:
        return self, begin

    def __reduce__(self) -> Any:
        owner = self._owner
        return _reopened, (owner.path, owner.file.identity, self._begin)


class _UnpickledFile:
    """The file of unpickled lazy tensors, which belong to no open cache."""

    __slots__ = ("_files", "path")
    pool = Pool(1 << 28)

    def __init__(self, path: str, identity: Any) -> None:
        # a file that has changed since the tensors were pickled is refused
        self.path, self._files = path, Files(identities={path: identity})

    @property
    def file(self) -> File:
        return self._files.get(self.path)


_unpickled_file = lru_cache(1 << 12)(_UnpickledFile)  # so that the tensors of a shard share its open file


def _reopened(path: str, identity: Any, begin: int) -> FileRange:
    return FileRange(_unpickled_file(path, identity), begin)
