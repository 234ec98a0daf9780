"""The dtype, shape and byte range of each tensor of a batch, for each layout of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.merge_reads import merge_reads
from wds_tensorcache.reading.batch.rows import NO_SAMPLES, Rows

__all__ = ["Columns", "Layouts", "check_same_names", "check_stackable", "layouts_of"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a batch. Samples with equal headers, and so equal names, dtypes and shapes, share a layout.

    Attributes:
        rows: Samples of the batch.
        items: Distinct layouts, starting with the first sample's.
        which: Index into `items` for each sample, int64 `[B]`.
    """

    rows: Rows
    items: Sequence[Layout]
    which: Array

    def key(self, number: int) -> str:
        """Return the key of the first sample with layout `number`."""
        return self.rows.key(int(np.argmax(self.which == number)))


def layouts_of(rows: Rows) -> Layouts:
    """Return the layouts of a batch.

    Raises:
        ValueError: The batch is empty.
    """
    if not rows.by_shard:
        raise ValueError(NO_SAMPLES)
    numbers: dict[int, int] = {}
    items: list[Layout] = []
    found: list[Any] = []  # for each shard: one index, or one index per sample
    for number, _, some in rows.by_shard:
        layout = rows.shards[number].layout_of_all
        layouts, inverse = ([layout], 0) if layout is not None else rows.shards[number].layouts_of(some)
        present = []
        for layout in layouts:
            present.append(numbers.setdefault(id(layout), len(items)))
            if present[-1] == len(items):
                items.append(layout)
        found.append(np.array(present)[inverse])
    which = np.zeros(len(rows.row), np.int64)
    if len(items) == 1:
        return Layouts(rows, items, which)
    for (_, at, _), part in zip(rows.by_shard, found, strict=True):
        which[at] = part
    first = which.item(0)
    if first:  # move the first sample's layout to the front
        items.insert(0, items.pop(first))
        which = np.where(which == first, 0, which + (which < first))
    return Layouts(rows, items, which)


class Columns:
    """The properties of some tensors of a batch, for each layout of its samples.

    Attributes:
        names, numbers: Names of the tensors, and a dict from each name to its index in `names`.
        layouts: The layouts. They are kept alive because `Structures.columns` uses their ids as keys.
        begin, nbytes: Range of each tensor's bytes in the `.safetensors` member, int64 `[tensors, layouts]`.
        sizes: Bytes of each tensor, if equal in all layouts; else None.
        bools: `(tensor, layout)`, both as indices, of each bool tensor; the bytes of these tensors must be checked.
        runs: For each layout, the byte ranges to read for one sample.
        references: Reference of each tensor, `[tensors][layouts]`; set by `resolve`, like `shapes`, `limits` and `limit`.
        shapes: Shape of each tensor in the first layout.
        limits: Largest number of samples for which each tensor can be stacked; 0 if its shapes differ.
        limit: Minimum of `limits`.
    """

    references: list[list[Reference]]
    shapes: list[tuple[int, ...]]
    limits: list[int]
    limit: int

    def __init__(self, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self.names = tuple(names)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.layouts = layouts
        self.references = []
        stored = [[layout.tensors[name] for layout in layouts] for name in names]
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
        self.runs = [merge_reads(*each) for each in zip(self.begin.T.tolist(), self.nbytes.T.tolist(), strict=True)]

    def resolve(self, like: dict[str, Any], texts: Sequence[dict[str, str]], layouts: Layouts) -> None:
        """Resolve the reference of each tensor in each layout.

        Args:
            like: Lazy tensors of the first sample, by name.
            texts: Reference texts in the skeletons of each layout, by tensor name.
            layouts: Layouts of the batch.

        Raises:
            BatchError: A tensor's kind or dtype differs between layouts.
        """
        for name in self.names:
            mine = like[name]._reference
            references = [resolve(layout, text[name]) for layout, text in zip(layouts.items, texts, strict=True)]
            for number, found in enumerate(references):
                if found.kind != mine.kind or found.dtype != mine.dtype:
                    raise BatchError(
                        f"tensor {name!r} is {mine.kind} of {mine.dtype} in sample {layouts.key(0)!r}, "
                        f"but {found.kind} of {found.dtype} in {layouts.key(number)!r}"
                    )
            self.references.append(references)
        self.shapes = [each[0].shape for each in self.references]
        # cost: one step per tensor and layout, done once for all batches of one layout
        equal = [all(one.shape == each[0].shape for one in each) for each in self.references]
        self.limits = [
            _most(each[0], each[0].shape) if is_equal else 0
            for each, is_equal in zip(self.references, equal, strict=True)
        ]
        self.limit = min(self.limits, default=1 << 63)

    def check_stackable(self, layouts: Layouts, tensor: int) -> None:
        """Raise BatchError unless a tensor has one shape in all layouts, and the stacked array stays within size limits."""
        first, *others = self.references[tensor]
        for number, other in enumerate(others, start=1):
            if other.shape != first.shape:
                raise BatchError(
                    f"tensor {first.name!r} is {list(first.shape)} in sample {layouts.key(0)!r}, but "
                    f"{list(other.shape)} in {layouts.key(number)!r}; use collate='pad' or 'list'"
                )
        check_stackable(first, len(layouts.rows), first.shape, layouts.key(0))


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


_LACKING = "select the tensors that all samples have, filter by entry.shapes, or collate with a function"


def check_same_names(layouts: Layouts, names: Sequence[str], wanted: Callable[[str], bool] | None) -> None:
    """Raise BatchError unless all layouts have the tensors `names`, and no other tensor that `wanted` accepts."""
    first = layouts.items[0].tensors.keys()
    for number, layout in enumerate(layouts.items):
        for name in names:
            if name not in layout.tensors:
                raise BatchError(
                    f"sample {layouts.key(number)!r} has no tensor {name!r}, but {layouts.key(0)!r} has one; {_LACKING}"
                )
        more = [name for name in layout.tensors.keys() - first if wanted is None or wanted(name)]
        if more:
            raise BatchError(
                f"sample {layouts.key(number)!r} has tensor {min(more)!r}, but {layouts.key(0)!r} has none; {_LACKING}"
            )
