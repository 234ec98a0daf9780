"""The dtype, shape and byte range of each tensor of a batch, for each layout of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_tensorcache.codec.header import Form, Layout, StoredTensor
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.rows import NO_SAMPLES, Rows

__all__ = ["Columns", "Layouts", "check_same_names", "check_stackable", "lacks_any", "layouts_of"]

Array = np.ndarray[Any, Any]
_ABSENT = StoredTensor("", "", (), 0, 0)  # takes the place of a tensor that a layout lacks


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a batch. Samples with equal headers, and so equal names, dtypes and shapes, share a layout.

    Attributes:
        rows: Samples of the batch.
        items: Distinct layouts, starting with the first sample's.
        which: Index into `items` for each sample, int64 `[B]`.
        exemplars: Samples, of the batch or its shards, with tensors that the first sample lacks, each as `(form, shard
            number, row)`.
        is_mixed: True if the samples of the batch differ in the names of their tensors.
    """

    rows: Rows
    items: Sequence[Layout]
    which: Array
    exemplars: Sequence[tuple[Form, int, int]] = ()
    is_mixed: bool = False

    def key(self, number: int) -> str:
        """Return the key of the first sample with layout `number`."""
        return self.rows.key(int(np.argmax(self.which == number)))


def layouts_of(rows: Rows) -> Layouts:
    """Return the layouts of a batch.

    Raises:
        ValueError: The batch is empty.
    """
    if rows.known_layouts:
        return Layouts(rows, *rows.known_layouts)
    if not rows.by_shard:
        raise ValueError(NO_SAMPLES)
    numbers: dict[int, int] = {}
    items: list[Layout] = []
    found: list[Any] = []  # for each shard: one index, or one index per sample
    varied = list(rows.exemplars)  # and the shards of the batch whose samples differ in the names of their tensors
    for number, _, some in rows.by_shard:
        layout = rows.shards[number].layout_of_all
        layouts, inverse = ([layout], 0) if layout is not None else rows.shards[number].layouts_of(some)
        if len(rows.shards[number].variants) > 1 and number not in varied:
            varied.append(number)
        present = []
        for layout in layouts:
            present.append(numbers.setdefault(id(layout), len(items)))
            if present[-1] == len(items):
                items.append(layout)
        found.append(np.array(present)[inverse])
    which = np.zeros(len(rows.row), np.int64)
    if len(items) == 1:
        # not the result, which refers to the rows
        rows.known_layouts.extend((items, which, _exemplars(rows, items, which, varied) if varied else ()))
        return Layouts(rows, *rows.known_layouts)
    for (_, at, _), part in zip(rows.by_shard, found, strict=True):
        which[at] = part
    first = which.item(0)
    if first:  # move the first sample's layout to the front
        items.insert(0, items.pop(first))
        which = np.where(which == first, 0, which + (which < first))
    is_mixed = any(
        layout.form is not items[0].form and layout.tensors.keys() != items[0].tensors.keys() for layout in items
    )
    exemplars = _exemplars(rows, items, which, varied) if varied or is_mixed else ()
    rows.known_layouts.extend((items, which, exemplars, is_mixed))
    return Layouts(rows, *rows.known_layouts)


def _exemplars(
    rows: Rows, items: Sequence[Layout], which: Array, varied: Sequence[int]
) -> Sequence[tuple[Form, int, int]]:
    """Return `Layouts.exemplars`: samples that together have all names that the first sample lacks, chosen greedily."""
    found: dict[frozenset[str], tuple[Form, int, int]] = {}
    for number, layout in enumerate(items):
        i = int(np.argmax(which == number))
        found.setdefault(frozenset(layout.tensors), (layout.form, rows.number.item(i), rows.row.item(i)))
    for number in varied:
        for names, form, row in rows.shards[number].variants:
            found.setdefault(names, (form, number, row))
    covered, result = set(items[0].tensors), []
    for names in sorted(found, key=len, reverse=True):
        if not names <= covered:
            covered |= names
            result.append(found[names])
    return result


def lacks_any(layouts: Layouts, names: Iterable[str]) -> bool:
    """Return whether a sample of the batch lacks one of the tensors `names`."""
    return any(name not in layout.tensors for name in names for layout in layouts.items)


class Columns:
    """The properties of some tensors of a batch, for each layout of its samples.

    Attributes:
        names, numbers: Names of the tensors, and a dict from each name to its index in `names`.
        layouts: The layouts. They are kept alive because `Structures.columns` uses their ids as keys.
        begin, nbytes: Range of each tensor's bytes in the `.safetensors` member, int64 `[tensors, layouts]`; zeros if a layout
            lacks the tensor.
        sizes: Bytes of each tensor, if equal in all layouts; else None.
        bools: `(tensor, layout)`, both as indices, of each bool tensor; the bytes of these tensors must be checked.
        references: Reference of each tensor, `[tensors][layouts]`, None if a layout lacks the tensor; set by `resolve`, like
            `first`, `shapes`, `limits` and `limit`.
        first: Reference of each tensor in the first layout that has it; if none has it, in another sample of the same shards.
        shapes: Shape of each tensor in `first`.
        limits: Largest number of samples for which each tensor can be stacked; 0 if its shapes differ, or a layout lacks it.
        limit: Minimum of `limits`.
    """

    references: list[list[Reference | None]]
    first: list[Reference]
    shapes: list[tuple[int, ...]]
    limits: list[int]
    limit: int

    def __init__(self, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self.names = tuple(names)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.layouts = layouts
        self.references = []
        stored = [[layout.tensors.get(name, _ABSENT) for layout in layouts] for name in names]
        shape = (len(names), len(layouts))
        self.begin = np.array([[one.begin for one in each] for each in stored], np.int64).reshape(shape)
        self.nbytes = np.array([[one.end for one in each] for each in stored], np.int64).reshape(shape) - self.begin
        is_uniform = bool((self.nbytes == self.nbytes[:, :1]).all())
        self.sizes: tuple[int, ...] | None = tuple(self.nbytes[:, 0].tolist()) if is_uniform else None
        self.bools = [
            (tensor, layout)
            for tensor, each in enumerate(stored)
            for layout, one in enumerate(each)
            if one.dtype == "BOOL"
        ]

    def resolve(self, like: dict[str, Any], texts: Sequence[dict[str, str]], layouts: Layouts) -> None:
        """Resolve the reference of each tensor in each layout.

        Args:
            like: A lazy tensor of one of the samples, by name.
            texts: Reference texts in the skeletons of each layout, by tensor name.
            layouts: Layouts of the batch.

        Raises:
            BatchError: A tensor's kind or dtype differs between layouts.
        """
        for name in self.names:
            references = [
                resolve(layout, text[name]) if name in layout.tensors else None
                for layout, text in zip(layouts.items, texts, strict=True)
            ]
            mine = like[name]._reference
            if name not in layouts.items[0].tensors and not all(
                one is None or _is_alike(one, mine) for one in references
            ):
                mine = _reference_in_batch(layouts, name) or mine  # that one may be of a sample outside the batch
            for number, found in enumerate(references):
                if found is not None and not _is_alike(found, mine):
                    alike = next(n for n, one in enumerate(references) if one is not None)
                    raise BatchError(
                        f"tensor {name!r} is {mine.kind} of {mine.dtype} in sample {layouts.key(alike)!r}, "
                        f"but {found.kind} of {found.dtype} in {layouts.key(number)!r}" + _remedy_of_texts(mine, found)
                    )
            self.references.append(references)
        self.first = [
            next(filter(None, each), like[name]._reference)
            for name, each in zip(self.names, self.references, strict=True)
        ]
        self.shapes = [first.shape for first in self.first]
        # cost: one step per tensor and layout, done once for all batches of one layout
        self.limits = [
            _most(first, first.shape) if all(one is not None and one.shape == first.shape for one in each) else 0
            for first, each in zip(self.first, self.references, strict=True)
        ]
        self.limit = min(self.limits, default=1 << 63)

    def check_stackable(self, layouts: Layouts, tensor: int) -> None:
        """Raise BatchError unless all layouts have a tensor, of one shape, and the stacked array stays within size limits."""
        self.check_present(layouts, tensor)
        (at, first), *others = self.present(tensor)
        unequal = [(number, other) for number, other in others if other.shape != first.shape]
        # name a shape that padding cannot mend, if there is one
        for number, other in sorted(unequal, key=lambda each: is_paddable(first.shape, each[1].shape))[:1]:
            raise BatchError(
                f"tensor {first.name!r} is {list(first.shape)} in sample {layouts.key(at)!r}, but "
                f"{list(other.shape)} in {layouts.key(number)!r}; "
                + (
                    "use collate='pad' or 'list'"
                    if is_paddable(first.shape, other.shape)
                    else remedy_of_shapes(first.name)
                )
            )
        check_stackable(first, len(layouts.rows), first.shape, layouts.key(at))

    def present(self, tensor: int) -> list[tuple[int, Reference]]:
        """Return the index of each layout that has a tensor, and the tensor's reference in that layout."""
        return [(number, one) for number, one in enumerate(self.references[tensor]) if one is not None]

    def check_present(self, layouts: Layouts, tensor: int) -> None:
        """Raise BatchError unless all layouts have a tensor."""
        references = self.references[tensor]
        lacking = next((number for number, one in enumerate(references) if one is None), None)
        if lacking is not None and not self.present(tensor):
            raise BatchError(f"no sample of the batch has the tensor {self.names[tensor]!r}; do not select it")
        if lacking is not None:
            at, first = self.present(tensor)[0]
            raise BatchError(
                f"sample {layouts.key(lacking)!r} has no tensor {first.name!r}, but {layouts.key(at)!r} has one; "
                "use collate='list' or 'pad' for this tensor, or do not select it"
            )


def is_paddable(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal except for the first dimension."""
    return len(one) == len(other) and one[1:] == other[1:]


def remedy_of_shapes(name: str) -> str:
    """Return what helps if a tensor's shapes differ in ways that padding cannot mend, for a message."""
    return f"use collate='list', or batches of one shape: Loader(…, bucket_by={name!r})"


def _remedy_of_texts(one: Reference, other: Reference) -> str:
    """Return what helps if two arrays are texts of different widths, for a message; empty for other dtypes."""
    if (
        one.kind != "ndarray"
        or other.kind != "ndarray"
        or one.dtype.kind != other.dtype.kind
        or one.dtype.kind not in "US"
    ):
        return ""
    return "; numpy's dtype is as wide as the longest text, so write texts as str: array.item(), or array.tolist()"


def check_stackable(reference: Reference, count: int, shape: tuple[int, ...], key: str) -> None:
    """Raise BatchError if a tensor of shape `[count, *shape]` exceeds size limits."""
    if count <= _most(reference, shape):
        return
    ndim = len(shape) + 1
    reason = f"{ndim} dimensions, and numpy allows at most {ARRAY_NDIM}"
    if not _has_too_many_dims(reference, shape):
        reason = f"{count} rows {list(shape)} of {reference.dtype}, in all 2^63 bytes or more"
    raise BatchError(
        f"tensor {reference.name!r} of sample {key!r} cannot be stacked: the batch would have {reason}; use collate='list'"
    )


def _most(reference: Reference, shape: tuple[int, ...]) -> int:
    """Return the largest `count` for which `[count, *shape]` stays within size limits."""
    if _has_too_many_dims(reference, shape):
        return 0
    # dimensions of size 0 count as 1, because torch and numpy compute strides for them
    return ((1 << 63) - 1) // max(1, math.prod(filter(None, shape)) * int(reference.dtype.itemsize))


def _has_too_many_dims(reference: Reference, shape: tuple[int, ...]) -> bool:
    return len(shape) >= ARRAY_NDIM and reference.kind == "ndarray"


def _is_alike(one: Reference, other: Reference) -> bool:
    return one.kind == other.kind and one.dtype == other.dtype


def _reference_in_batch(layouts: Layouts, name: str) -> Reference | None:
    """Return the reference in the skeleton of the first sample that has a tensor of this name; None if it has another name."""
    having = [number for number, layout in enumerate(layouts.items) if name in layout.tensors]
    lazy = flatten(layouts.rows.sample(int(np.argmax(np.isin(layouts.which, having))))).get(name)
    return None if lazy is None else lazy._reference


def check_same_names(layouts: Layouts, names: Collection[str], wanted: Callable[[str], bool] | None) -> None:
    """Raise BatchError if a layout has a tensor that `wanted` accepts, but that is neither in `names` nor in the first layout.

    Such a tensor has no place in the batch, because the first sample has another value at its path.
    """
    first = layouts.items[0].tensors.keys()
    for number, layout in enumerate(layouts.items if layouts.is_mixed else ()):
        more = [name for name in layout.tensors.keys() - first - set(names) if wanted is None or wanted(name)]
        if more:
            raise BatchError(
                f"sample {layouts.key(number)!r} has tensor {min(more)!r}, but {layouts.key(0)!r} has none, and not None in "
                "its place; select the tensors that all samples have, filter by entry.shapes, or collate with a function"
            )
