"""`TensorCache`: the samples of one or many shards as a sequence."""

from __future__ import annotations

import copy
import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wds_tensorcache.codec.tree import flatten, project
from wds_tensorcache.errors import list_names, unknown_name
from wds_tensorcache.reading.base_cache import Cache, _Sample
from wds_tensorcache.reading.batch.assemble import nest_batch, read_batch, read_tensors
from wds_tensorcache.reading.batch.collate import Collate, Pad
from wds_tensorcache.reading.batch.columns import layouts_of
from wds_tensorcache.reading.batch.request import Request, Structures
from wds_tensorcache.reading.batch.rows import locate
from wds_tensorcache.reading.choose import ChosenRequest, nest_chosen
from wds_tensorcache.reading.description import NUM_EXAMINED, Contents
from wds_tensorcache.reading.lookup.keys import KeysView
from wds_tensorcache.reading.lookup.positions import Inverse, Positions, as_array, numbers_of, spread, take
from wds_tensorcache.reading.remote.fetch_batch import BatchFetch, add_member
from wds_tensorcache.reading.schema import (
    Entry,
    TensorSchema,
    as_patterns,
    entries,
    find_unknown,
    members_of,
    name_matcher,
    schema_of,
    stored_shapes,
    whole_schema,
    with_trees,
)
from wds_tensorcache.reading.store import Store
from wds_tensorcache.storage.remote.urls import is_url

__all__ = ["TensorCache"]

Array = np.ndarray[Any, Any]
_MAX_VIEWS = 16
_NUM_PATHS = 4  # shards that an error about a repeated key lists


class TensorCache(Cache[_Sample]):
    """The samples of one or many shards; opened by `tc.open`.

    Memory: about 22 bytes per sample, plus its key. The first look-up by key adds 8 bytes per sample, unless the keys of
        each shard ascend and the key ranges of shards do not overlap.
    """

    def __init__(
        self,
        store: Store,
        order: Positions | None = None,
        patterns: tuple[str, ...] | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self._store = store
        self._names = names  # of tensors whose places every batch has, selected or not
        everything = range(len(store))
        self._order = None if isinstance(order, range) and order == everything else order  # None for all samples
        self._where: Positions = everything if self._order is None else self._order
        self._inverse: Inverse | None = None
        self._patterns = patterns
        self._narrowed: dict[tuple[str, ...], TensorCache[_Sample]] = {}  # views made by `nest`, by tensor names
        self._wanted = name_matcher(patterns) if patterns is not None else None
        self._structures = Structures(self._wanted)
        # an argument `collate`, and the result of `_fixed_by`
        self._last_fixed: tuple[Any, tuple[str, ...]] | None = None

    def __reduce__(self) -> Any:
        return TensorCache, (self._store, self._order, self._patterns, self._names)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._found(key))

    def keys(self) -> KeysView:
        return KeysView(self)

    @property
    def schema(self) -> dict[str, TensorSchema]:
        found = schema_of(self._store, self._where)
        return found if self._wanted is None else {name: found[name] for name in filter(self._wanted, found)}

    @property
    def fingerprint(self) -> dict[str, object]:
        return dict(self._store.fingerprint)

    @property
    def num_shards(self) -> int:
        return len(self._store.shards)

    def select(self, patterns: str | Iterable[str]) -> TensorCache[_Sample]:
        patterns = as_patterns(patterns)
        if self._store.has_remote and self._patterns is None and len(self):
            # the names of all shards would cost a request for each
            first = list(schema_of(self._store, self._where[:1]))
            if find_unknown(patterns, first) is None:
                return TensorCache(self._store, self._order, with_trees(patterns), tuple(first))
        names = list(self.schema)
        unknown = find_unknown(patterns, names)
        if names and unknown is not None:
            if self._store.find_names():
                return self.select(patterns)
            raise KeyError(unknown_name("tensor", unknown, names))
        patterns = with_trees(patterns)
        if self._patterns is not None:
            patterns = tuple(glob.escape(name) for name in names if name_matcher(patterns)(name))
        return TensorCache(self._store, self._order, patterns, self._names or tuple(names))

    _read_batch, _read_tensors = staticmethod(read_batch), staticmethod(read_tensors)

    def nest(self, indices: Iterable[int | str], tensors: Mapping[str, Any]) -> Any:
        request = self._request(indices)
        if isinstance(request, ChosenRequest):
            return nest_chosen(request, tensors)
        names = tuple(sorted(tensors))
        view = self._narrowed.get(names)
        if view is None:
            if len(self._narrowed) >= _MAX_VIEWS:
                self._narrowed.clear()
            view = TensorCache(self._store, self._order, tuple(map(glob.escape, names)), self._names)
            self._narrowed[names] = view
        request = view._request(request)
        layouts = layouts_of(request.rows)
        present = {name for layout in layouts.items for name in layout.named}
        missing = tuple(name for name in names if name not in present)
        for name in names:
            is_known = (self._wanted is None or self._wanted(name)) and (
                name not in missing or name in self._batch_names()
            )
            if not is_known:
                has = list(flatten(self._request(indices).sample(0)))
                raise KeyError(f"sample {request.key(0)!r} has no tensor {name!r:.100}; it has {list_names(has, name)}")
        structure = request.structures.structure_for(layouts, (*missing, *request.fixed))
        return nest_batch(request, tensors, layouts, structure=structure)

    def close(self) -> None:
        self._store.close()

    def _request(self, indices: Any, *, collate: Any = None) -> Request:
        if isinstance(indices, Request):
            return indices.in_view(self._store, self._structures, self._names)
        numbers = numbers_of(indices, len(self._where), self._find)
        positions = numbers if self._order is None else as_array(take(self._where, numbers))
        return Request(self._store, locate(self._store, positions), self._structures, self._fixed_by(collate))

    def _fixed_by(self, collate: Any) -> tuple[str, ...]:
        """Return the names of tensors whose places every batch has: those of a view, and those that `collate` pads or lists."""
        is_named = isinstance(collate, (Collate, Mapping, Pad)) or (isinstance(collate, str) and collate == "pad")
        if not is_named:
            return self._names
        last = self._last_fixed
        if last is None or last[0] != collate:
            ways = (
                collate
                if isinstance(collate, Collate)
                else Collate(collate if isinstance(collate, Mapping) else {"*": collate})
            )
            fixed = tuple(dict.fromkeys([*self._names, *filter(ways.fixes, self._batch_names())]))
            last = self._last_fixed = copy.copy(collate), fixed
        return last[1]

    def _batch_names(self) -> list[str]:
        return list(filter(self._wanted, whole_schema(self._store)))

    def _take(self, numbers: slice | Array) -> TensorCache[_Sample]:
        return TensorCache(self._store, take(self._where, numbers), self._patterns, self._names)

    def _single_threaded(self) -> TensorCache[_Sample]:
        return TensorCache(self._store.with_threads(1), self._order, self._patterns, self._names)

    def _entries(self, *, selected: bool = False) -> Iterator[Entry]:
        return entries(self._store, self._where, self._wanted if selected else None)

    def _collect(self, contents: Contents, prefix: str = "") -> None:
        for name, reference, shapes, counts in stored_shapes(self._store, self._where):
            if self._wanted is None or self._wanted(name):
                contents.add_tensor(prefix, name, reference, shapes, counts)
        contents.add_values(prefix, self._whole_samples(spread(len(self), NUM_EXAMINED)))

    def _having(self) -> dict[str, Array]:
        return members_of(self._store, self._where)

    def _find_members(self, request: Request, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        rows = request.rows
        suffix = suffix.lower().removeprefix(".")  # the index and webdataset have suffixes in lower case
        numbers = np.empty(len(rows), np.int64)
        for number, at, some in rows.by_shard:
            numbers[at] = self._store.shards[number].find_members(some, suffix)
        fetch, found = BatchFetch(), dict[int, bytes]()
        for i in wanted:
            if (number := numbers.item(i)) >= 0:
                shard = self._store.shards[rows.number.item(i)]
                if shard.is_remote:
                    add_member(fetch, i, shard, suffix, number, found)
                else:
                    found[i] = shard.member(suffix, number)
        fetch.run()
        return found

    @property
    def _left_out(self) -> str | None:
        return self._store.left_out

    def _paths(self) -> Iterator[str]:
        return (shard.path for shard in self._store.shards)

    def _file_nbytes(self, path: str) -> int:
        if not self._store.has_remote or not is_url(path):
            return super()._file_nbytes(path)
        nbytes = self._store.files.expected_nbytes(path)
        if nbytes is None:
            raise OSError(f"{path}: the length is unknown")
        return nbytes

    def _at(self, number: int) -> int:
        return self._where[number] if isinstance(self._where, range) else self._where.item(number)

    def _whole_samples(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield samples with all their tensors. Those of remote shards are fetched together."""
        if not self._store.has_remote:
            located = (self._store.locate(self._at(number)) for number in numbers)
            yield from (shard.sample(row) for shard, row in located)
            return
        rows = locate(self._store, np.array([self._at(number) for number in numbers], np.int64))
        rows.fetch_skeletons()
        yield from map(rows.sample, range(len(rows)))

    def _samples_at(self, numbers: Sequence[int]) -> list[Any]:
        if not self._store.has_remote:
            return super()._samples_at(numbers)
        samples = self._whole_samples(numbers)
        return [sample if self._wanted is None else project(sample, self._wanted) for sample in samples]

    def _sample(self, number: int) -> Any:
        shard, row = self._store.locate(self._at(number))
        sample = shard.sample(row)
        return sample if self._wanted is None else project(sample, self._wanted)

    def _found(self, key: str) -> list[int]:
        """Return the indices of the samples with this key."""
        found = self._store.find(key)
        if self._order is None:
            return found
        if self._inverse is None:
            self._inverse = Inverse(self._order)
        return [number for position in found for number in self._inverse.find(position)]

    def _stored_name(self, number: int) -> str | None:
        shard, row = self._store.locate(self._at(number))
        return shard.index.origin(shard.sample_row(row))[1]

    def _find(self, key: str) -> int:
        found = self._found(key)
        if not found:
            raise KeyError(f"no sample {key!r:.100} among the {len(self)} samples; there are {self._near_keys(key)}")
        if len({self._at(number) for number in found}) > 1:
            paths = [self._store.locate(self._at(number))[0].path for number in found[:_NUM_PATHS]]
            shown = ", ".join(paths) + ", …" * (len(found) > _NUM_PATHS)
            raise KeyError(f"sample {key!r} is in several shards, {shown}; use the sample's index instead")
        return found[0]
