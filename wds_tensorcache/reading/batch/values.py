"""The values of a batch that are not tensors: one list per value, decoded from the skeletons on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, Holding, Path
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Layouts
from wds_tensorcache.reading.batch.request import NewNames, Request, Structure, keep_known
from wds_tensorcache.reading.structure import difference, value_at

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """A template of samples that have the structure of a batch, but may lack tensors.

    Attributes:
        template: The template.
        nones: Indices of the values that must be None, because the batch may have tensors in their places.
        slots: For each path that was looked up, the index of the template's value at that path; None for a container; -1 for a
            tensor, or if there is nothing.
    """

    template: Template
    nones: tuple[int, ...]
    slots: dict[Path, int | None] = field(default_factory=dict)

    def slot(self, path: Path) -> int | None:
        if path not in self.slots:
            leaf = value_at(_number_leaves(self.template), path)
            self.slots[path] = -1 if leaf is None else leaf if isinstance(leaf, int) else None
        return self.slots[path]


@dataclass(slots=True)
class _Group:
    """The samples of a batch that match one template, with their values; or those that match none, as samples."""

    variant: _Variant | None
    positions: Any
    values: list[Any]

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample."""
        if self.variant is not None:
            slot = self.variant.slot(path)
            if slot is not None:
                return list(map(itemgetter(slot), self.values)) if slot >= 0 else [None] * len(self.values)
            template = self.variant.template
            blank = [None] * len(template.references)
            self.variant, self.values = None, [template.build([*values, *blank]) for values in self.values]
        return [value_at(sample, path) for sample in self.values]


class Decoded:
    """The skeletons of a batch, read once. If a skeleton matches a known template, only its values are extracted.

    Args:
        request: The batch.
        layouts: Layouts of the batch.
        structure: Structure of the batch.

    Threads: any number of threads may use it at once.
    """

    def __init__(self, request: Request, layouts: Layouts, structure: Structure) -> None:
        self._request = request
        self._layouts = layouts
        self._structure = structure
        self._lock = threading.Lock()
        self._groups: list[_Group] = []  # empty until the skeletons are read

    def __len__(self) -> int:
        return len(self._request)

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample.

        Raises:
            BatchError: A sample's structure differs from that of the first sample.
        """
        with self._lock:
            try:
                groups = self._groups = self._groups or self._read()
            except NewNames as exc:
                raise BatchError("the index lacks names that samples of the batch have; read the batch again") from exc
            first, *others = groups
            if not others:
                return first.column(path)
            column = [None] * len(self)
            for group in groups:
                for i, value in zip(group.positions, group.column(path), strict=True):
                    column[i] = value
            return column

    def check(self) -> None:
        """Read the skeletons; raise BatchError unless every sample has the structure of the batch."""
        with self._lock:
            self._groups = self._groups or self._read()

    def _read(self) -> list[_Group]:
        self._request.structures.note_values()
        template, rows, store = self._structure.template, self._request.rows, self._request.store
        if template is None:
            return [_Group(None, range(len(self)), list(map(self._build, range(len(self)))))]
        values_by_sample = self._find_kept(template)
        numbers, row = rows.number.tolist(), rows.row.tolist()
        other_templates = [layout.form.template for layout in self._layouts.items]
        others: dict[int, tuple[Template | None, Any]] = {}
        # cost per sample in Python: one step for its bytes, one for its values
        for i, skeleton, begin in rows.skeletons(np.array([values is not None for values in values_by_sample])):
            values = template.match(skeleton, begin)
            if values is not MISS:
                values_by_sample[i] = values
                if rows.shards is store.shards:
                    store.values.keep(numbers[i], row[i], template, values, len(skeleton))
                continue
            other = other_templates[self._layouts.which.item(i)]
            is_known = other is not None and other is not template
            others[i] = (other, other.match(skeleton, begin)) if is_known else (None, MISS)
        if not others:
            for number, _, shard_rows in rows.by_shard:
                rows.shards[number].note_template(shard_rows, template)
        variant = self._structure.variants.get(id(template)) or self._new_variant(template)
        for slot in variant.nones:
            unfit = [i for i, values in enumerate(values_by_sample) if values is not None and values[slot] is not None]
            others.update((i, (None, MISS)) for i in unfit)
        if not others:
            return [_Group(variant, range(len(self)), values_by_sample)]
        positions = [i for i in range(len(self)) if i not in others]
        groups: dict[_Variant | None, _Group] = {
            variant: _Group(variant, positions, [values_by_sample[i] for i in positions])
        }
        for i, (other, values) in others.items():
            other_variant, values = self._match_other(i, other, values)
            if other_variant not in groups:
                groups[other_variant] = _Group(other_variant, [], [])
            groups[other_variant].positions.append(i)
            groups[other_variant].values.append(values)
        return list(groups.values())

    def _find_kept(self, template: Template) -> list[Any]:
        """Return the kept values of each sample that this template gave, or None."""
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

    def _match_other(self, i: int, template: Template | None, values: Any) -> tuple[_Variant | None, Any]:
        """Return the variant and the values of sample `i`, or None and the sample itself.

        Raises:
            BatchError: The structure of the sample differs from that of the batch.
        """
        if template is None or values is MISS:
            return None, self._build(i)
        variant: _Variant | None = self._structure.variants.get(id(template))
        if variant is None:
            # other samples of the template differ only in plain values, and only None may stand in place of a tensor
            self._build(i)
            variant = self._new_variant(template)
        return (variant, values) if all(values[slot] is None for slot in variant.nones) else (None, self._build(i))

    def _new_variant(self, template: Template) -> _Variant:
        holds = Holding()
        slots = _all_slots(_number_leaves(template), ())
        nones = [slot for path, slot in slots if _must_be_none(self._structure.sample, path, holds)]
        variant = _Variant(template, tuple(nones))
        keep_known(self._structure.variants, id(template), variant)
        return variant

    def _build(self, i: int) -> Any:
        """Return sample `i`; raise BatchError if its structure differs from that of the batch."""
        request, structures = self._request, self._request.structures
        sample = request.whole_sample(i)
        mismatch = difference(self._structure.sample, sample, structures.wanted)
        if mismatch is not None:
            where, first, other = mismatch
            base = request.key(structures.find_base(self._layouts))
            raise BatchError(
                f"sample {request.key(i)!r} has {other} {where}, but {base!r} has {first}: their structures differ; "
                "collate with a function, or use read_tensors"
            )
        return sample


def _number_leaves(template: Template) -> Any:
    """Return a sample with numbers in place of the template's values, and None in place of tensors."""
    return template.build([*range(len(template.segments) - 1), *(None for _ in template.references)])


def _all_slots(numbered: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path of each value of a template, and its number."""
    if isinstance(numbered, int):
        yield path, numbered
    elif numbered is not None:
        for step, item in numbered.items() if type(numbered) is dict else enumerate(numbered):
            yield from _all_slots(item, (*path, step))


def _must_be_none(sample: Any, path: Path, holds: Holding) -> bool:
    """Return whether a batch with the structure of `sample` has tensors at `path`, or nothing."""
    for step in path:
        if type(sample) in DICTS:
            if step not in sample:
                return True
        elif type(sample) not in SEQUENCES or not holds(sample):
            return False  # inside of a value
        elif step >= len(sample):
            return True
        sample = sample[step]
    return holds(sample)
