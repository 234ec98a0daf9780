"""Builder of a shard's index, for its writer and for scans."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import MAX_HEADER_NBYTES, Further, Layout, form_of, is_bound, parse_header
from wds_tensorcache.codec.sample import check_binding, list_references
from wds_tensorcache.errors import FormatError, TensorCacheError, list_names
from wds_tensorcache.shards.index import CacheColumns, LayoutTable, MemberColumns, Origins, ShardIndex, narrow
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.names import APART, find_half, split_member
from wds_tensorcache.shards.tar import Scanner, find_header


@dataclass(slots=True)
class CacheEntry:
    """One cache of one sample, with byte offsets of its two members."""

    name: str
    skeleton_begin: int
    skeleton_nbytes: int
    tensors_begin: int
    layout: Layout
    digest: int | None
    references: tuple[str, ...] | None  # the skeleton's references to the tensors; None if they cannot be read
    further: Further = ()  # further names of tensors that occur several times, each with the tensor's name


class IndexBuilder:
    """Builder of an index. Samples are added in the order of the shard; equal samples result in equal indexes."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("Q")
        # tables by cache name or suffix, flattened: 6 numbers per cache of a sample, 3 per other member
        self._caches: dict[str, array[int]] = {}
        self._members: dict[str, array[int]] = {}
        self._origins: list[tuple[int, str | None]] = []
        # layout numbers by id(layout), references and further names; `_layouts` keeps these layouts, so no id is used twice
        self._numbers_by_id: dict[tuple[int, tuple[str, ...] | None, Further], int] = {}
        self._layouts: list[Layout] = []
        # Layout numbers by form, offset of the first tensor, and shapes. A hostile shard could contain shapes whose hashes
        # collide if they were tuples of int; Python salts the hash of bytes.
        self._numbers_by_content: dict[tuple[int, int, bytes], int] = {}
        self._form_numbers: dict[tuple[Any, tuple[str, ...] | None, Further], int] = {}  # by entries and names
        self._form, self._data_begin, self._dims = array("Q"), array("Q"), array("Q")

    def add(
        self,
        key: str,
        caches: list[CacheEntry],
        members: list[tuple[str, int, int]],
        position: int = 0,
        origin: tuple[int, str | None] = (0, None),
    ) -> None:
        """Add a sample to the index.

        `members` contains (suffix, offset, length) for each member outside caches. All offsets are relative to `position`.
        `origin` is as `ShardIndex.origin` returns it.
        """
        row = len(self._ends)
        self._text += key.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._text))
        for cache in caches:
            number = self._numbers_by_id.get((id(cache.layout), cache.references, cache.further))
            if number is None:
                number = self._number(cache.layout, cache.references, cache.further)
            begins = position + cache.skeleton_begin, position + cache.tensors_begin
            numbers = (row, begins[0], cache.skeleton_nbytes, begins[1], number, cache.digest or 0)
            self._caches.setdefault(cache.name, array("Q")).extend(numbers)
        self._origins.append(origin)
        for suffix, begin, nbytes in members:
            self._members.setdefault(suffix, array("Q")).extend((row, position + begin, nbytes))

    def _number(self, layout: Layout, references: tuple[str, ...] | None, further: Further) -> int:
        forms = self._form_numbers
        form_number = forms.setdefault((layout.form.entries, references, further), len(forms))
        shape = array("Q", (dim for tensor in layout.tensors.values() for dim in tensor.shape))
        content = (form_number, layout.data_begin, shape.tobytes())
        if content not in self._numbers_by_content:
            self._numbers_by_content[content] = len(self._form)
            self._form.append(form_number)
            self._data_begin.append(layout.data_begin)
            self._dims.extend(shape)
        if len(self._layouts) < 1024:
            self._layouts.append(layout)
            self._numbers_by_id[id(layout), references, further] = self._numbers_by_content[content]
        return self._numbers_by_content[content]

    def finish(self, end: int) -> ShardIndex:
        """Return the index; `end` is the byte offset of the end-of-archive marker."""
        forms, count = self._form_numbers, len(self._ends)

        def columns(table: array[int], width: int) -> Any:
            first, *columns = np.array(table, np.uint64).reshape(-1, width).T
            return None if len(first) == count else narrow(first), *columns

        caches, members = {}, {}
        for name, table in self._caches.items():
            rows, a, b, c, layout, digest = columns(table, 6)
            caches[name] = CacheColumns(rows, narrow(a), narrow(b), narrow(c), narrow(layout), digest.copy())
        for suffix, table in self._members.items():
            rows, begin, nbytes = columns(table, 3)
            members[suffix] = MemberColumns(rows, narrow(begin), narrow(nbytes))
        return ShardIndex(
            Keys(np.frombuffer(bytes(self._text), np.uint8), narrow(self._ends)),
            caches,
            members,
            LayoutTable(
                tuple(form_of(entries) for entries, *_ in forms),
                tuple(references for _, references, _ in forms),
                narrow(self._form),
                narrow(self._data_begin),
                narrow(self._dims),
                tuple(further for *_, further in forms),
            ),
            end,
            origins=Origins.of(self._origins),
        )


def scan_shard(read: Callable[[int, int], bytes], nbytes: int, path: str = "") -> ShardIndex:
    """Build the index of a tar of `nbytes` bytes in one pass.

    The pass reads tar headers, skeletons and safetensors headers, and looks for a tar header after the archive. With `path`,
    links in the tar cause a warning. Raises FormatError for damage, missing members, and keys or members that occur twice.
    """
    scanner = Scanner(read, nbytes)
    builder = IndexBuilder()
    seen: set[str] = set()
    key: str | None = None
    members: dict[str, tuple[int, int]] = {}
    for name, begin, size in scanner:
        split = split_member(name)
        if split is None:
            continue
        suffix = split[1].lower()
        if split[0] != key:
            if key is not None:
                _add(builder, scanner, key, members)
            key, members = split[0], {}
            if key in seen:
                raise FormatError(f"key {key!r:.100} occurs twice{APART}", offset=begin - 512, kind="duplicate")
            seen.add(key)
        if suffix in members:
            raise FormatError(f"member {name!r:.100} occurs twice", offset=begin - 512, kind="duplicate")
        members[suffix] = begin, size
    if key is not None:
        _add(builder, scanner, key, members)
    if path and (links := list(filter(split_member, scanner.links))):
        fault = f"{path}: links to other files are not followed: {list_names(links)}"
        warnings.warn(f"{fault}; make the tar anew with `tar -h --hard-dereference`", stacklevel=user_level())
    return replace(builder.finish(scanner.end), hidden=find_header(read, scanner.end, nbytes))


def _add(builder: IndexBuilder, scanner: Scanner, key: str, members: dict[str, tuple[int, int]]) -> None:
    caches: list[CacheEntry] = []
    other_members: list[tuple[str, int, int]] = []

    def is_bound_at(begin: int, nbytes: int) -> bool:
        return is_bound(scanner.peek(begin, begin + min(64, nbytes)))

    try:
        for suffix, extent in members.items():
            half = find_half(suffix, members, partial(is_bound_at, *extent))
            if half is None:
                other_members.append((suffix, *extent))
            elif half.is_skeleton:
                caches.append(_entry(scanner, half.name, extent, members[half.other]))
    except TensorCacheError as exc:
        raise exc.at(f"sample {key!r:.100}") from exc
    builder.add(key, caches, other_members)


def _entry(scanner: Scanner, name: str, skeleton: tuple[int, int], tensors: tuple[int, int]) -> CacheEntry:
    begin, nbytes = tensors
    length = int.from_bytes(scanner.peek(begin, begin + min(8, nbytes)), "little")
    layout, digest = parse_header(scanner.peek(begin, begin + min(8 + length, nbytes, 8 + MAX_HEADER_NBYTES)), nbytes)
    text = scanner.peek(skeleton[0], skeleton[0] + skeleton[1])
    body, _ = check_binding(text, nbytes, digest)
    names: tuple[tuple[str, ...] | None, Further]
    try:
        names = list_references(text, body, layout)
    except TensorCacheError:
        names = None, ()  # the skeleton needs allow=, or is damaged; reading the sample raises the error
    return CacheEntry(name, *skeleton, begin, layout, digest, *names)
