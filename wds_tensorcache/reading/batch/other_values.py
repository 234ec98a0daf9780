"""The values of a batch that are not tensors: one list per value, decoded from the skeletons on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import NoneType
from typing import Any

import numpy as np

from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.codec.tree import Path
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Layouts
from wds_tensorcache.reading.batch.request import NewNames, Request, Structure, Variant, keep_known
from wds_tensorcache.reading.structure import difference, value_at

__all__ = ["Decoded"]

Array = np.ndarray[Any, Any]


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
        # for each value of the first sample's template, its list of objects, with None for samples that do not match
        self._columns: list[Any] = []
        # samples that match the template of a variant, with their values
        self._variants: list[tuple[int, Variant, list[Any]]] = []
        # samples that match no known template; None until the skeletons are read
        self._others: list[int] | None = None
        self._samples: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._request)

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample.

        Raises:
            BatchError: A sample's structure differs from that of the first sample.
        """
        try:
            return self._column(path)
        except NewNames as exc:
            raise BatchError("the index lacks names that samples of the batch have; read the batch again") from exc

    def _column(self, path: Path) -> list[Any]:
        with self._lock:
            others, slot = self._match(), self._slot(path)
            if slot is not None and not others:
                column = list(self._columns[slot]) if slot >= 0 else [None] * len(self)
                for i, variant, values in self._variants:
                    at = _slot_of(variant.template, variant.slots, path)
                    if at is None:
                        break
                    column[i] = values[at] if at >= 0 else None
                else:
                    return column
            if self._samples is None:
                self._samples = self._build_all(others)
        return [value_at(sample, path) for sample in self._samples]

    def check(self) -> None:
        """Raise BatchError unless every sample has the structure of the batch."""
        with self._lock:
            others = self._match()
            for i in others:
                self._build_other(i)
            for path in self._structure.nones:
                slot = self._slot(path)
                if slot is not None and slot >= 0 and any(value is not None for value in self._columns[slot]):
                    i = next(i for i, value in enumerate(self._columns[slot]) if value is not None)
                    raise self._unlike(i, f"at {'.'.join(map(str, path))!r}", "None", "a value")

    def _match(self) -> list[int]:
        """Return the samples that do not match the template; the first call reads the skeletons."""
        if self._others is None:
            self._others = self._read()
        return self._others

    def _read(self) -> list[int]:
        self._request.structures.note_values()
        template, rows = self._structure.template, self._request.rows
        if template is None:
            return list(range(len(self)))
        values_by_sample = self._find_kept(template)
        kept = self._request.store.values
        numbers, row = rows.number.tolist(), rows.row.tolist()
        other_templates = [layout.form.template for layout in self._layouts.items]
        variants, unlike = [], []
        # cost per sample in Python: one step for its bytes, one for its values
        for i, skeleton, begin in rows.skeletons(np.array([values is not None for values in values_by_sample])):
            values = template.match(skeleton, begin)
            if values is not MISS:
                values_by_sample[i] = values
                if rows.shards is self._request.store.shards:
                    kept.keep(numbers[i], row[i], template, values, len(skeleton))
                continue
            unlike.append(i)
            other = other_templates[self._layouts.which.item(i)]
            if other is not None and other is not template:
                values = other.match(skeleton, begin)
                if values is not MISS:
                    variants.append((i, other, values))
        blank = [None] * (len(template.segments) - 1)
        columns = list(
            zip(*([values or blank for values in values_by_sample] if unlike else values_by_sample), strict=True)
        )
        if not unlike:
            for number, _, shard_rows in rows.by_shard:
                rows.shards[number].note_template(shard_rows, template)
        self._columns = columns
        self._variants = [
            (i, variant, values) for i, other, values in variants if (variant := self._variant(i, other, values))
        ]
        in_variants = {i for i, *_ in self._variants}
        return [i for i in unlike if i not in in_variants]

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

    def _slot(self, path: Path) -> int | None:
        """Return the index of the template's value at `path`; None if there is a container; -1 for a tensor, or for nothing."""
        template = self._structure.template
        return None if template is None else _slot_of(template, self._structure.slots, path)

    def _variant(self, i: int, template: Template, values: list[Any]) -> Variant | None:
        """Return the variant with the template and the values of sample `i`; None if only the sample itself tells.

        Raises:
            BatchError: The structure of the sample differs from that of the batch.
        """
        known = self._structure.variants
        variant = known.get(id(template))
        if variant is None:
            self._build_other(i)
            # Other samples of the template differ only in plain values, and only None may stand in place of a tensor.
            nones = [
                slot
                for path, slot in _all_slots(_numbered(template), ())
                if values[slot] is None
                and isinstance(value_at(self._structure.sample, path), (NoneType, dict, list, tuple))
            ]
            variant = Variant(template, tuple(nones))
            keep_known(known, id(template), variant)
        return variant if all(values[slot] is None for slot in variant.nones) else None

    def _build_all(self, others: list[int]) -> list[Any]:
        """Return all samples, without tensors."""
        template = self._structure.template
        samples: list[Any] = [None] * len(self)
        for i in others:
            samples[i] = self._build_other(i)
        for i, variant, values in self._variants:
            samples[i] = variant.template.build([*values, *(None for _ in variant.template.references)])
        left = set(range(len(self))).difference(others, (i for i, *_ in self._variants))
        for i in left:
            assert template is not None
            samples[i] = template.build(
                [*(column[i] for column in self._columns), *(None for _ in template.references)]
            )
        return samples

    def _build_other(self, i: int) -> Any:
        """Return sample `i`, which does not match the template; raise BatchError if its structure differs."""
        sample = self._request.whole_sample(i)
        found = difference(self._structure.sample, sample, self._request.structures.wanted)
        if found is not None:
            raise self._unlike(i, *found)
        return sample

    def _unlike(self, i: int, where: str, first: str, other: str) -> BatchError:
        key, base = self._request.key, self._request.structures.find_base(self._layouts)
        return BatchError(
            f"sample {key(i)!r} has {other} {where}, but {key(base)!r} has {first}: their structures differ; "
            "collate with a function, or use read_tensors"
        )


def _numbered(template: Template) -> Any:
    """Return a sample with numbers in place of the template's values, and None in place of tensors."""
    return template.build([*range(len(template.segments) - 1), *(None for _ in template.references)])


def _all_slots(numbered: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path of each value of a template, and its number."""
    if isinstance(numbered, int):
        yield path, numbered
    elif numbered is not None:
        for step, item in numbered.items() if type(numbered) is dict else enumerate(numbered):
            yield from _all_slots(item, (*path, step))


def _slot_of(template: Template, slots: dict[Path, int | None], path: Path) -> int | None:
    """Return the index of a template's value at `path`, as in `Structure.slots`, where it is kept."""
    if path not in slots:
        found = value_at(_numbered(template), path)
        slots[path] = -1 if found is None else found if isinstance(found, int) else None
    return slots[path]
