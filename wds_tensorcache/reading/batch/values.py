"""Values of a batch other than tensors, decoded on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from wds_tensorcache.codec.header import keep_bounded
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.skeleton.template import MISS, Template, find_match
from wds_tensorcache.codec.tree import Path, rebuild, walk
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Layouts
from wds_tensorcache.reading.batch.request import NewNames, Request, check_names
from wds_tensorcache.reading.structure import difference, value_at
from wds_tensorcache.storage.threads import value_of_process


class _Tensor:
    """The placeholder of a tensor."""


_TENSOR = _Tensor()
# Called with a sample; returns values in it by name.
Find: TypeAlias = "Callable[[Any], dict[str, Any]]"


@dataclass(slots=True)
class _Group:
    """Samples that share a template, or decoded samples without a template."""

    template: Template | None
    positions: list[int]
    values: list[Any]  # for each sample, its values in the template; without a template, the sample
    built: list[Any] | None = None  # result of `samples`

    def column(self, path: Path) -> list[Any]:
        template = self.template
        if template is not None:
            slot = value_at(_number_leaves(template), path)
            if slot is None or slot is _TENSOR:
                return [None] * len(self.values)
            if isinstance(slot, int):
                return list(map(itemgetter(slot), self.values))
            if any(part is _TENSOR for part, _ in walk(slot)):
                return [rebuild(value_at(sample, path), lambda _: None, _Tensor) for sample in self.samples()]
        return [value_at(sample, path) for sample in self.samples()]

    def find(self, find: Find) -> list[Any]:
        slots = find(_number_leaves(self.template)) if self.template is not None else {}
        if slots and all(type(slot) is int for slot in slots.values()):
            rows = [{name: values[slot] for name, slot in slots.items()} for values in self.values]
            if not any(value is None for row in rows for value in row.values()):  # None may be a missing alternative
                return rows
        return list(map(find, self.samples()))

    def samples(self) -> list[Any]:
        """Return the samples, with `_TENSOR` in place of a template's tensors."""
        template = self.template
        if template is None:
            return self.values
        if self.built is None:
            blank = [_TENSOR] * len(template.references)
            self.built = [template.build([*values, *blank]) for values in self.values]
        return self.built


def _in_order(groups: list[_Group], columns: list[list[Any]]) -> list[Any]:
    if len(groups) == 1:
        return columns[0]
    column = [None] * sum(map(len, columns))
    for group, items in zip(groups, columns, strict=True):
        for i, item in zip(group.positions, items, strict=True):
            column[i] = item
    return column


@lru_cache(64)
def _number_leaves(template: Template) -> Any:
    """Return a sample with slot numbers for values, and `_TENSOR` for tensors."""
    return template.build([*range(template.num_values), *(_TENSOR for _ in template.references)])


def is_tensor(value: Any) -> bool:
    return value is _TENSOR or isinstance(value, (LazyTensor, LazyArray))


class Decoded:
    """The decoded samples of a batch. Any thread may use them; the skeletons are read once."""

    def __init__(self, request: Request, layouts: Layouts) -> None:
        self.structure = request.structures.structure_for(layouts, request.fixed)  # of the batch
        self._request = request
        self._layouts = layouts
        self._lock = partial(value_of_process, {}, threading.Lock)  # `per_process` would be another call per batch
        self._groups: list[_Group] = []  # empty until the skeletons are read

    def __len__(self) -> int:
        return len(self._request)

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample. Raise BatchError if structures differ or an index lacks names."""
        with self._lock():
            try:
                groups = self._groups = self._groups or self._read()
            except NewNames as exc:
                raise BatchError("the index lacks names that samples of the batch have; read the batch again") from exc
            return _in_order(groups, [group.column(path) for group in groups])

    def find(self, find: Find) -> list[Any]:
        """Call `find` for each sample without its tensors. Return the results, or [] if a sample matches no template."""
        with self._lock():
            groups = self._groups = self._groups or self._read(may_build=False)
            if not groups or any(group.template is None for group in groups):
                return []
            return _in_order(groups, [group.find(find) for group in groups])

    def check(self) -> None:
        """Read the skeletons. Raise BatchError if structures differ, NewNames if an index lacks names."""
        with self._lock():
            self._groups = self._groups or self._read()

    def _read(self, *, may_build: bool = True) -> list[_Group]:
        self._request.structures.note_values()
        template, rows, store = self.structure.template, self._request.rows, self._request.store
        if template is None:
            return [_Group(None, list(range(len(self))), list(map(self._build, range(len(self)))))] if may_build else []
        values_by_sample = self._find_kept(template)
        numbers, row, which = rows.number.tolist(), rows.row.tolist(), self._layouts.which.tolist()
        # by position in the batch; a sample that matches no template stands for its values
        unlike: dict[int, tuple[Template | None, Any]] = {}
        # cost per sample in Python: one step for its bytes, one for its values
        for i, skeleton, begin in rows.skeletons(np.array([values is not None for values in values_by_sample])):
            values = template.match(skeleton, begin)
            if values is not MISS:
                values_by_sample[i] = values
                if rows.shards is store.shards:
                    store.values.keep(numbers[i], row[i], template, values, len(skeleton))
                continue
            other, values = find_match(self._layouts.items[which[i]].form.templates, skeleton, begin)
            if other is None and not may_build:
                return []
            unlike[i] = (None, self._build(i)) if other is None else self._compare(i, other, values)
        if not unlike:
            for number, _, shard_rows in rows.by_shard:
                rows.shards[number].note_template(shard_rows, template)
        if not self.structure.is_exact:
            for i, values in enumerate(values_by_sample):
                if values is not None:
                    self._compare(i, template, values)
        if not unlike:
            return [_Group(template, list(range(len(self))), values_by_sample)]
        groups: dict[Template | None, _Group] = {}
        for i, values in enumerate(values_by_sample):
            of, values = unlike.get(i, (template, values))
            group = groups.setdefault(of, _Group(of, [], []))
            group.positions.append(i)
            group.values.append(values)
        return list(groups.values())

    def _find_kept(self, template: Template) -> list[Any]:
        """Return the values that the store keeps of each sample, or None."""
        rows, store = self._request.rows, self._request.store
        values_by_sample: list[Any] = [None] * len(self)
        if rows.shards is not store.shards:
            return values_by_sample
        for number, at, shard_rows in rows.by_shard:
            store.shards[number].file.check_unchanged()
            values = list(map(store.values.of(number, template).get, shard_rows.tolist()))
            if isinstance(at, slice):
                return values
            for i, value in zip(at.tolist(), values, strict=True):
                values_by_sample[i] = value
        return values_by_sample

    def _compare(self, i: int, template: Template | None, values: Any) -> tuple[Template | None, Any]:
        """Check the structure of sample `i` like `_build`; return `template` and `values`."""
        # Samples of one template differ only in plain values, of which only None may take the place of a tensor. So one
        # comparison suffices for all samples with None in the same places.
        key = template, *(slot for slot, value in enumerate(values) if value is None)
        if key not in self.structure.checked:
            self._build(i)
            keep_bounded(self.structure.checked, key, True)
        return template, values

    def _build(self, i: int) -> Any:
        """Return sample `i`; raise BatchError if its structure differs."""
        request, structures = self._request, self._request.structures
        raw = request.rows.sample(i)
        check_names(request.rows, i, raw)
        sample = structures.whole(raw)
        first, other = map(structures.comparable, (self.structure.sample, sample))
        mismatch = difference(first, other, structures.wanted)
        if mismatch is not None:
            where, expected, actual = mismatch
            base = request.key(structures.find_base(self._layouts))
            raise BatchError(
                f"sample {request.key(i)!r} has {actual} {where}, but {base!r} has {expected}: their structures differ; "
                "collate with a function, take one of several tensors by choose=, or use read_tensors"
            )
        return sample
