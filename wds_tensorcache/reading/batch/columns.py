"""Dtype, shape and byte range of a batch's tensors, by layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wds_tensorcache.codec.header import Form, Layout, StoredTensor
from wds_tensorcache.codec.reference import Reference, reference_text, resolve
from wds_tensorcache.codec.tree import flatten, further_names
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.rows import Rows

if TYPE_CHECKING:
    from wds_tensorcache.reading.schema import TensorSchema

Array = np.ndarray[Any, Any]
_Item = TypeVar("_Item")
_ABOUT_TEXTS = "; the dtype of a text array has its length: select other tensors, or store texts as str"
_ABOUT_DTYPES = "; store one dtype, or pass collate=, a function of the samples that converts dtypes"
_ABSENT = StoredTensor("", "", (), 0, 0)  # takes the place of a tensor that a layout lacks


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a batch. Samples with equal headers, and so equal names, dtypes and shapes, share a layout."""

    rows: Rows  # of the batch's samples
    items: Sequence[Layout]  # distinct layouts, starting with the layout of the first sample
    which: Array  # index into `items` for each sample, int64 `[B]`
    is_mixed: bool = False  # whether samples differ in their tensors' names, apart from alternatives
    # For each item, the stored names of the chosen tensors, by name in the batch; None if the samples have no alternative of
    # that name. Samples with one layout but different choices have different items. Empty without `choose=`.
    chosen: Sequence[Mapping[str, str | None]] = ()

    def key(self, number: int) -> str:
        return self.rows.key(int(np.argmax(self.which == number)))


def layouts_of(rows: Rows) -> Layouts:
    """Return the layouts of a batch; raise ValueError if it is empty."""
    if rows.known_layouts:
        return Layouts(rows, *rows.known_layouts)
    if not rows.by_shard:
        raise ValueError("no indices: a batch has at least one sample")
    numbers: dict[int, int] = {}
    items: list[Layout] = []
    lacks_texts = False
    which = np.zeros(len(rows.row), np.int64)
    for number, at, shard_rows in rows.by_shard:
        layout = rows.shards[number].layout_of_all
        layouts, inverse = ([layout], 0) if layout is not None else rows.shards[number].layouts_of(shard_rows)
        present = []
        for layout in layouts:
            present.append(numbers.setdefault(id(layout), len(items)))
            if present[-1] == len(items):
                items.append(layout)
                lacks_texts |= layout.texts is None
        if present != [0]:
            which[at] = np.array(present)[inverse]
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
    # not the `Layouts`, whose reference to the rows would be a cycle
    rows.known_layouts.extend((items, which, is_mixed))
    return Layouts(rows, *rows.known_layouts)


def _with_texts(rows: Rows, items: Sequence[Layout], which: Array) -> tuple[list[Layout], Array]:
    """Return layouts with references from skeletons, and each sample's layout index."""
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


class Columns:
    """Properties of a batch's tensors, for each layout of its samples.

    Attributes:
        names: Names of the tensors.
        layouts: The layouts. They are kept alive because `Structures.columns` uses their ids as keys.
        begin, nbytes: Range of each tensor's bytes in the `.safetensors` member, int64 `[tensors, layouts]`; zeros if a layout
            lacks the tensor.
        sizes: Length of each tensor in bytes; None if the length of a tensor differs between layouts.
        bools: Tensor index and layout index of each bool tensor, whose bytes must be checked.
        references: Reference of each tensor, `[tensors][layouts]`, None if a layout lacks the tensor. `resolve` sets it and
            the attributes below.
        first: Reference of each tensor in the first layout that has it; if no layout has it, a reference from the schema.
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
        self.layouts = layouts.items
        named = with_chosen([layout.named for layout in layouts.items], layouts)
        stored = [[tensors.get(name, _ABSENT) for tensors in named] for name in self.names]
        shape = (len(self.names), len(layouts.items))
        edges = np.array([[(one.begin, one.end) for one in row] for row in stored], np.int64).reshape(*shape, 2)
        self.begin, self.nbytes = edges[..., 0].copy(), edges[..., 1] - edges[..., 0]
        is_uniform = bool((self.nbytes == self.nbytes[:, :1]).all())
        self.sizes: tuple[int, ...] | None = tuple(self.nbytes[:, 0].tolist()) if is_uniform else None
        self.bools = [(t, n) for t, row in enumerate(stored) for n, one in enumerate(row) if one.dtype == "BOOL"]

    def resolve(self, layouts: Layouts, schema: Callable[[], Mapping[str, TensorSchema]]) -> None:
        """Resolve each tensor's references. Raise BatchError if its kind or dtype differs between layouts.

        `schema` returns the properties of all tensors, including tensors that no layout has.
        """
        texts = with_chosen([layout.named_texts for layout in layouts.items], layouts)
        self.references, self.first = [], []
        for tensor, name in enumerate(self.names):
            self.references.append(
                [
                    _resolve(layout, name, text[name]) if name in text else None
                    for layout, text in zip(layouts.items, texts, strict=True)
                ]
            )
            present = self.present(tensor)
            first = present[0][1] if present else _describe(schema()[name])
            for number, other in present:
                if (other.kind, other.dtype) != (first.kind, first.dtype):
                    are_texts = {getattr(one.dtype, "kind", "") for one in (first, other)} <= {"U", "S"}
                    hint = _ABOUT_TEXTS if are_texts else _ABOUT_DTYPES
                    if layouts.chosen and name in layouts.chosen[0]:
                        both = [layouts.chosen[at][name] for at in (present[0][0], number)]
                        hint = (
                            f": choose= took {both[0]!r} and {both[1]!r}; give all alternatives of {name!r} one dtype"
                        )
                        hint += _ABOUT_TEXTS * are_texts
                    raise BatchError(
                        f"tensor {name!r} is {first.kind} of {first.dtype} in sample {layouts.key(present[0][0])!r}, "
                        f"but {other.kind} of {other.dtype} in {layouts.key(number)!r}"
                        f"{hint}"
                    )
            self.first.append(first)
        self.shapes = [first.shape for first in self.first]
        # cost: one step per tensor and layout, done once for all batches of one layout
        self.limits = [
            _most(first, first.shape) if all(one is not None and one.shape == first.shape for one in references) else 0
            for first, references in zip(self.first, self.references, strict=True)
        ]
        self.limit = min(self.limits, default=1 << 63)

    def check_stackable(self, layouts: Layouts, tensor: int) -> None:
        """Raise BatchError if the rows of a tensor cannot form one array."""
        self.check_present(layouts, tensor)
        (at, first), *following = self.present(tensor)
        for number, other in following:
            if other.shape != first.shape:
                can_pad = all(one.shape and one.shape[1:] == first.shape[1:] for _, one in (*following, (at, first)))
                ways = "'pad' or 'list'" if can_pad else "'list'"
                raise BatchError(
                    f"tensor {first.name!r} is {list(first.shape)} in sample {layouts.key(at)!r}, but "
                    f"{list(other.shape)} in {layouts.key(number)!r}; use collate={ways}, or batches of one shape: "
                    f"Loader(…, bucket_by={first.name!r})"
                )
        check_stackable(first, len(layouts.rows), first.shape, layouts.key(at))

    def present(self, tensor: int) -> list[tuple[int, Reference]]:
        """Return `(layout index, reference)` for each layout that has a tensor."""
        return [(number, one) for number, one in enumerate(self.references[tensor]) if one is not None]

    def check_present(self, layouts: Layouts, tensor: int) -> None:
        references, present = self.references[tensor], self.present(tensor)
        if len(present) < len(references):
            having = f", but {layouts.key(present[0][0])!r} has one" if present else ""
            ways = "'list' or 'pad'" if self.first[tensor].shape else "'list'"
            raise BatchError(
                f"sample {layouts.key(references.index(None))!r} has no tensor {self.names[tensor]!r}{having}; use "
                f"collate={ways} for this tensor, or do not select it"
            )


def with_chosen(by_name: list[dict[str, _Item]], layouts: Layouts) -> list[dict[str, _Item]]:
    """Replace the dicts in `by_name` by dicts with the chosen tensors."""
    for at, chosen in enumerate(layouts.chosen):
        stored_items, by_name[at] = by_name[at], dict(by_name[at])
        for name, stored in chosen.items():
            if stored is not None:
                by_name[at][name] = stored_items[stored]
            else:
                by_name[at].pop(name, None)
    return by_name


def check_stackable(reference: Reference, count: int, shape: tuple[int, ...], key: str) -> None:
    """Raise BatchError if a tensor of shape `[count, *shape]` exceeds size limits."""
    if count > _most(reference, shape):
        raise BatchError(
            f"tensor {reference.name!r} of sample {key!r} cannot be stacked: {count} rows {list(shape)} of {reference.dtype} "
            f"have 2^63 bytes or more, or more than the {ARRAY_NDIM} dimensions of numpy; use collate='list'"
        )


def _most(reference: Reference, shape: tuple[int, ...]) -> int:
    """Return the largest `count` for which `[count, *shape]` stays within size limits."""
    if len(shape) >= ARRAY_NDIM and reference.kind == "ndarray":
        return 0
    # dimensions of size 0 count as 1, because torch and numpy compute strides for them
    return ((1 << 63) - 1) // max(1, math.prod(filter(None, shape)) * int(reference.dtype.itemsize))


def _resolve(layout: Layout, name: str, text: str) -> Reference:
    reference = resolve(layout, text)
    return reference if reference.name == name else replace(reference, name=name)


def _describe(tensor: TensorSchema) -> Reference:
    dtype = tensor.dtype[0] if isinstance(tensor.dtype, tuple) else tensor.dtype
    shape = tuple(size if isinstance(size, int) else size[1] for size in tensor.shape or ())
    return Reference(tensor.name, tensor.kind, dtype, shape, 0, 0, None)
