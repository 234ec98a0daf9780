"""Tensors x layouts: what each tensor of a batch is, and where it lies, in every layout that the samples have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.rows import NO_SAMPLES, Rows

__all__ = ["Columns", "Layouts", "Runs", "check_same_names", "check_stackable", "layouts_of"]

Array = np.ndarray[Any, Any]
Runs = list[tuple[int, int, list[tuple[int, int]]]]  # (begin, end, (tensor or -1 for a gap, bytes) in their order)
SCRATCH_NBYTES = 1 << 14  # a gap up to here is cheaper to read than to begin another call


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a batch.

    Attributes:
        rows: The batch.
        items: The layouts, the first sample's first.
        which: The number of each sample's layout, int64 `[B]`.
    """

    rows: Rows
    items: Sequence[Layout]
    which: Array

    def key(self, number: int) -> str:
        """Return the key of the first sample with a layout."""
        return self.rows.key(int(np.argmax(self.which == number)))


def layouts_of(rows: Rows) -> Layouts:
    """Return the layouts of a batch.

    Raises:
        ValueError: It has no samples.
    """
    if not rows.parts:
        raise ValueError(NO_SAMPLES)
    numbers: dict[int, int] = {}
    items: list[Layout] = []
    found: list[Any] = []  # for each part, one number, or one for each of its samples
    for number, _, some in rows.parts:
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
    for (_, at, _), part in zip(rows.parts, found, strict=True):
        which[at] = part
    first = which.item(0)
    if first:  # move the first sample's to the front
        items.insert(0, items.pop(first))
        which = np.where(which == first, 0, which + (which < first))
    return Layouts(rows, items, which)


class Columns:
    """The tensors called `names` of samples of some layouts.

    Attributes:
        names, numbers: The tensors' names, and the number of each: its place among the names.
        layouts: The layouts, which stay alive: `Structures.columns` knows them by id.
        begin, nbytes: int64 `[tensors, layouts]`, each tensor's bytes in the `.safetensors` member.
        sizes: Bytes of each tensor, if they are the same in all layouts.
        bools: (tensor, layout) of each one that has bools, whose bytes must be looked at.
        runs: The reads that a sample of each layout takes.
        references: [tensors][layouts], what each tensor is; empty until `resolve`, as are the next three.
        is_equal: Whether each tensor has one shape in all layouts.
        limits: The largest number of samples that can be stacked, by tensor; 0 if shapes differ.
        limit: The smallest of these.
    """

    references: list[list[Reference]]
    is_equal: bool
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
        self.runs = [_runs(*each) for each in zip(self.begin.T.tolist(), self.nbytes.T.tolist(), strict=True)]

    def resolve(self, like: dict[str, Any], texts: Sequence[dict[str, str]], layouts: Layouts) -> None:
        """Find what the tensors are in each layout.

        Args:
            like: The first sample's lazy tensors by name.
            texts: How the skeletons of each layout refer to its tensors, by name.
            layouts: The batch's.

        Raises:
            BatchError: A tensor is of another kind or dtype in one of them.
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
        # one step per tensor and layout, once for all batches of one layout
        equal = [all(one.shape == each[0].shape for one in each) for each in self.references]
        self.is_equal = all(equal)
        self.limits = [
            _most(each[0], each[0].shape) if is_equal else 0
            for each, is_equal in zip(self.references, equal, strict=True)
        ]
        self.limit = min(self.limits, default=1 << 63)

    def check_stackable(self, layouts: Layouts) -> None:
        """Raise BatchError unless each tensor has one shape in all layouts, and as many as the batch has can be stacked."""
        for name, references in zip(self.names, self.references, strict=True):
            for number, reference in enumerate(references):
                if reference.shape != references[0].shape:
                    raise BatchError(
                        f"tensor {name!r} is {list(references[0].shape)} in sample {layouts.key(0)!r}, but "
                        f"{list(reference.shape)} in {layouts.key(number)!r}; use collate='pad' or 'list'"
                    )
        for each in self.references:
            check_stackable(each[0], len(layouts.rows), each[0].shape, layouts.key(0))

    def largest(self, layouts: Layouts) -> list[tuple[int, ...]]:
        """Return, for each tensor, the shape that all of its shapes fit into.

        Raises:
            BatchError: A tensor has different numbers of dimensions.
        """
        for name, references in zip(self.names, self.references, strict=True):
            for number, reference in enumerate(references):
                if len(reference.shape) != len(references[0].shape):
                    raise BatchError(
                        f"tensor {name!r} has {len(references[0].shape)} dimensions in sample {layouts.key(0)!r}, "
                        f"but {len(reference.shape)} in {layouts.key(number)!r}; use collate='list'"
                    )
        return [tuple(map(max, zip(*(r.shape for r in references), strict=True))) for references in self.references]

    def shapes(self, which: Array) -> dict[str, torch.Tensor]:
        """Return each tensor's shape in each sample, int64 `[B, ndim]`."""
        return {
            name: torch.from_numpy(
                np.array([r.shape for r in references], np.int64).reshape(len(references), -1)[which]
            )
            for name, references in zip(self.names, self.references, strict=True)
        }


def _runs(begins: list[int], sizes: list[int]) -> Runs:
    runs: Runs = []
    for begin, tensor in sorted(zip(begins, range(len(begins)), strict=True)):
        nbytes = sizes[tensor]
        gap = begin - runs[-1][1] if runs else -1
        if not nbytes:
            continue
        if 0 <= gap <= SCRATCH_NBYTES:
            first, _, parts = runs[-1]
            parts += [(-1, gap), (tensor, nbytes)] if gap else [(tensor, nbytes)]
            runs[-1] = first, begin + nbytes, parts
        else:
            runs.append((begin, begin + nbytes, [(tensor, nbytes)]))
    return runs


def check_stackable(
    reference: Reference, count: int, shape: tuple[int, ...], key: str, with_numpy: bool = False
) -> None:
    """Raise BatchError if there can be no `[count, *shape]` of a tensor; `with_numpy` if it becomes an array on the way."""
    if count <= _most(reference, shape, with_numpy):
        return
    ndim = len(shape) + 1
    reason = f"{ndim} dimensions, of which numpy has at most {ARRAY_NDIM}"
    if not _has_too_many_dims(reference, shape, with_numpy):
        reason = f"{count} times {list(shape)} of {reference.dtype}, and so 2^63 bytes or more"
    raise BatchError(
        f"tensor {reference.name!r} of sample {key!r} cannot be stacked: the batch has {reason}; use collate='list'"
    )


def _most(reference: Reference, shape: tuple[int, ...], with_numpy: bool = False) -> int:
    """Return the largest `count` of which there can be a `[count, *shape]`."""
    if _has_too_many_dims(reference, shape, with_numpy):
        return 0
    # empty ones count as full: torch and numpy compute their strides
    return ((1 << 63) - 1) // max(1, math.prod(filter(None, shape)) * int(reference.dtype.itemsize))


def _has_too_many_dims(reference: Reference, shape: tuple[int, ...], with_numpy: bool) -> bool:
    return len(shape) >= ARRAY_NDIM and (with_numpy or reference.kind == "ndarray")


def check_same_names(layouts: Layouts, names: Sequence[str], wanted: Callable[[str], bool] | None) -> None:
    """Raise BatchError unless the layouts have the same tensors of those that are wanted, as the first sample has them."""
    first = layouts.items[0].tensors.keys()
    for number, layout in enumerate(layouts.items):
        for name in names:
            if name not in layout.tensors:
                raise BatchError(
                    f"sample {layouts.key(number)!r} has no tensor {name!r}, but {layouts.key(0)!r} has; "
                    "collate with a function"
                )
        more = [name for name in layout.tensors.keys() - first if wanted is None or wanted(name)]
        if more:
            raise BatchError(
                f"sample {layouts.key(number)!r} has tensor {min(more)!r}, but {layouts.key(0)!r} has not; "
                "collate with a function"
            )
