"""The dtype, shape and byte range of each tensor of a batch, for each layout of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wds_tensorcache.codec.header import Form, Layout, StoredTensor
from wds_tensorcache.codec.reference import Reference, reference_text, resolve
from wds_tensorcache.codec.tree import flatten, further_names
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.rows import NO_SAMPLES, Rows

if TYPE_CHECKING:
    from wds_tensorcache.reading.schema import TensorSchema

Array = np.ndarray[Any, Any]
_Item = TypeVar("_Item")
_ABSENT = StoredTensor("", "", (), 0, 0)  # takes the place of a tensor that a layout lacks


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a batch. Samples with equal headers, and so equal names, dtypes and shapes, share a layout.

    Attributes:
        rows: Samples of the batch.
        items: Distinct layouts, starting with the first sample's.
        which: Index into `items` for each sample, int64 `[B]`.
        is_mixed: True if the samples of the batch differ in the names of their tensors, besides alternatives.
        chosen: For each item, the stored name of each chosen tensor by its name in the batch, None if the samples have none of
            its alternatives. Samples of one layout with other choices have another item. Empty without `choose=`.
    """

    rows: Rows
    items: Sequence[Layout]
    which: Array
    is_mixed: bool = False
    chosen: Sequence[Mapping[str, str | None]] = ()

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
    items_by_shard: list[Any] = []  # for each shard: one index, or one index per sample
    lacks_texts = False
    for number, _, shard_rows in rows.by_shard:
        layout = rows.shards[number].layout_of_all
        layouts, inverse = ([layout], 0) if layout is not None else rows.shards[number].layouts_of(shard_rows)
        present = []
        for layout in layouts:
            present.append(numbers.setdefault(id(layout), len(items)))
            if present[-1] == len(items):
                items.append(layout)
                lacks_texts |= layout.texts is None
        items_by_shard.append(np.array(present)[inverse])
    which = np.zeros(len(rows.row), np.int64)
    if len(items) > 1:
        for (_, at, _), part in zip(rows.by_shard, items_by_shard, strict=True):
            which[at] = part
    if lacks_texts:
        items, which = _with_texts(rows, items, which)
    first = which.item(0)
    if first:  # move the first sample's layout to the front
        items.insert(0, items.pop(first))
        which = np.where(which == first, 0, which + (which < first))
    is_mixed = (
        len(items) > 1
        and any(layout.form is not items[0].form or layout.further != items[0].further for layout in items[1:])
        and any(layout.named.keys() != items[0].named.keys() for layout in items[1:])
    )
    # not the result, which refers to the rows
    rows.known_layouts.extend((items, which, is_mixed))
    return Layouts(rows, *rows.known_layouts)


def _with_texts(rows: Rows, items: Sequence[Layout], which: Array) -> tuple[list[Layout], Array]:
    """Take the references that an index lacks from the skeletons; return layouts, and the index of each sample's."""
    numbers: dict[Any, int] = {}
    result: list[Layout] = []
    item_of_sample = np.empty(len(which), np.int64)
    for i, at in enumerate(which.tolist()):
        layout, further = items[at], items[at].further
        key: Any = id(layout)
        if layout.texts is None:
            sample = rows.sample(i)
            references = {lazy.name: lazy._reference for lazy in flatten(sample).values()}
            tensors = {name: tensor for name, tensor in layout.tensors.items() if name in references}
            texts = tuple(reference_text(references[name].kind, name, references[name].attribute) for name in tensors)
            further = further_names(sample)
            key = id(layout), texts, further
        if key not in numbers:
            numbers[key] = len(result)
            if layout.texts is None:
                form = Form(tuple(entry for entry in layout.form.entries if entry[0] in tensors))
                layout = Layout(tensors, layout.data_begin, layout.nbytes, form, texts, further)
            result.append(layout)
        item_of_sample[i] = numbers[key]
    return result, item_of_sample


def lacks_any(layouts: Layouts, names: Iterable[str]) -> bool:
    """Return whether a sample of the batch lacks one of the tensors `names`."""
    return any(name not in layout.named for name in names for layout in layouts.items)


class Columns:
    """The properties of some tensors of a batch, for each layout of its samples.

    Attributes:
        names, numbers: Names of the tensors, and a dict from each name to its index in `names`.
        layouts: The layouts. They are kept alive because `Structures.columns` uses their ids as keys.
        begin, nbytes: Range of each tensor's bytes in the `.safetensors` member, int64 `[tensors, layouts]`; zeros if a layout
            lacks the tensor.
        sizes: Bytes of each tensor, if equal in all layouts; else None.
        has_absent: True if no layout has one of the tensors.
        bools: `(tensor, layout)`, both as indices, of each bool tensor; the bytes of these tensors must be checked.
        references: Reference of each tensor, `[tensors][layouts]`, None if a layout lacks the tensor; set by `resolve`, like
            `first`, `shapes`, `limits` and `limit`.
        first: Reference of each tensor in the first layout that has it; if none has it, as the schema describes the tensor.
        shapes: Shape of each tensor in `first`.
        limits: Largest number of samples for which each tensor can be stacked; 0 if its shapes differ, or a layout lacks it.
        limit: Minimum of `limits`.
    """

    references: list[list[Reference | None]]
    first: list[Reference]
    shapes: list[tuple[int, ...]]
    limits: list[int]
    limit: int

    def __init__(self, names: Sequence[str], layouts: Layouts) -> None:
        # a chosen tensor is a column whose stored tensor differs by sample
        self.names = (*names, *(layouts.chosen[0] if layouts.chosen else ()))
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.layouts = layouts.items
        self.references = []
        named = [layout.named for layout in layouts.items]
        if layouts.chosen:
            named = with_chosen(named, layouts)
        stored = [[tensors.get(name, _ABSENT) for tensors in named] for name in self.names]
        shape = (len(self.names), len(layouts.items))
        self.begin = np.array([[one.begin for one in references] for references in stored], np.int64).reshape(shape)
        self.nbytes = (
            np.array([[one.end for one in references] for references in stored], np.int64).reshape(shape) - self.begin
        )
        is_uniform = bool((self.nbytes == self.nbytes[:, :1]).all())
        self.sizes: tuple[int, ...] | None = tuple(self.nbytes[:, 0].tolist()) if is_uniform else None
        self.bools = [
            (tensor, layout)
            for tensor, references in enumerate(stored)
            for layout, one in enumerate(references)
            if one.dtype == "BOOL"
        ]
        self.has_absent = any(all(one is _ABSENT for one in references) for references in stored)

    def resolve(self, layouts: Layouts, schema: Mapping[str, TensorSchema]) -> None:
        """Resolve the reference of each tensor in each layout. `schema` describes tensors that no layout has.

        Raises:
            BatchError: A tensor's kind or dtype differs between layouts.
        """
        texts = [layout.named_texts for layout in layouts.items]
        if layouts.chosen:
            texts = with_chosen(texts, layouts)
        self.first = []
        for name in self.names:
            references = [
                _resolve(layout, name, text[name]) if name in text else None
                for layout, text in zip(layouts.items, texts, strict=True)
            ]
            first = next(filter(None, references), None) or _describe(schema[name])
            for number, other in enumerate(references):
                if other is not None and not _is_alike(other, first):
                    alike = next(n for n, one in enumerate(references) if one is not None)
                    raise BatchError(
                        f"tensor {name!r} is {first.kind} of {first.dtype} in sample {layouts.key(alike)!r}, "
                        f"but {other.kind} of {other.dtype} in {layouts.key(number)!r}" + _remedy_of_texts(first, other)
                    )
            self.references.append(references)
            self.first.append(first)
        self.shapes = [first.shape for first in self.first]
        # cost: one step per tensor and layout, done once for all batches of one layout
        self.limits = [
            _most(first, first.shape)
            if all(one is not None and one.shape == first.shape for one in references_of_tensor)
            else 0
            for first, references_of_tensor in zip(self.first, self.references, strict=True)
        ]
        self.limit = min(self.limits, default=1 << 63)

    def check_stackable(self, layouts: Layouts, tensor: int) -> None:
        """Raise BatchError unless all layouts have a tensor, of one shape, and the stacked array stays within size limits."""
        self.check_present(layouts, tensor)
        (at, first), *others = self.present(tensor)
        unequal = [(number, other) for number, other in others if other.shape != first.shape]
        # name a shape that padding cannot mend, if there is one
        for number, other in sorted(unequal, key=lambda item: is_paddable(first.shape, item[1].shape))[:1]:
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
            raise BatchError(
                f"no sample of the batch has the tensor {self.names[tensor]!r}; use collate='list' or 'pad' for this tensor, "
                "or do not select it"
            )
        if lacking is not None:
            at, first = self.present(tensor)[0]
            remedy = "use collate='list' or 'pad' for this tensor, or do not select it"
            if any(part.isdecimal() for part in first.name.split(".")):
                # the index may lie after the end of a shorter list, and a batch has one structure
                remedy = (
                    "do not select this tensor, use read_tensors(…, collate='list'), or collate with a function; if None "
                    "is in its place, collate='list' and 'pad' work too"
                )
            raise BatchError(
                f"sample {layouts.key(lacking)!r} has no tensor {first.name!r}, but {layouts.key(at)!r} has one; {remedy}"
            )


def with_chosen(by_name: list[dict[str, _Item]], layouts: Layouts) -> list[dict[str, _Item]]:
    """Return the items of each layout's tensors by name, with those of the chosen tensors under their names in the batch."""
    for at, chosen in enumerate(layouts.chosen):
        stored_items, by_name[at] = by_name[at], dict(by_name[at])
        for name, stored in chosen.items():
            if stored is not None:
                by_name[at][name] = stored_items[stored]
            else:
                by_name[at].pop(name, None)
    return by_name


def is_paddable(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal except for the first dimension."""
    return len(one) == len(other) and one[1:] == other[1:]


def remedy_of_shapes(name: str) -> str:
    """Return the remedy for shapes that differ in ways that padding cannot mend, for a message."""
    return f"use collate='list', or batches of one shape: Loader(…, bucket_by={name!r})"


def _remedy_of_texts(one: Reference, other: Reference) -> str:
    """Return the remedy for arrays of texts of different widths, for a message; empty for other dtypes."""
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


def _resolve(layout: Layout, name: str, text: str) -> Reference:
    reference = resolve(layout, text)
    return reference if reference.name == name else replace(reference, name=name)


def _describe(tensor: TensorSchema) -> Reference:
    """Return a reference for a tensor that no sample of the batch has."""
    dtype = tensor.dtype[0] if isinstance(tensor.dtype, tuple) else tensor.dtype
    shape = tuple(size if isinstance(size, int) else size[1] for size in tensor.shape or ())
    return Reference(tensor.name, tensor.kind, dtype, shape, 0, 0, None)
