"""What the tensors of a batch are: one column for each tensor, resolved in every layout that the samples have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.views import ARRAY_NDIM
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.read_plan import Extents, Places

__all__ = ["Columns", "check_same_names", "check_stackable", "layouts_of"]

Array = np.ndarray[Any, Any]


def layouts_of(places: Places) -> tuple[list[Layout], Array | None]:
    """Return a batch's layouts, the first sample's first, and which of them each sample has; None if there is one."""
    first = places.shards[places.number.item(0)].layout(places.row.item(0))
    layouts = {id(first): (0, first)}
    found: list[Any] = []  # for each part, one number, or one for each of its samples

    def number_of(layout: Layout) -> int:
        return layouts.setdefault(id(layout), (len(layouts), layout))[0]

    for number, _, rows in places.parts:
        shard = places.shards[number]
        if len(shard.index.layouts) == 1:
            found.append(number_of(shard.layout(0)))
            continue
        _, some, inverse = np.unique(shard.columns.layout[rows], return_index=True, return_inverse=True)
        numbers = [number_of(shard.layout(row)) for row in rows[some].tolist()]
        found.append(np.array(numbers)[inverse])
    if len(layouts) == 1:
        return [first], None
    which = np.empty(len(places), np.int64)
    for (_, at, _), numbers in zip(places.parts, found, strict=True):
        which[at] = numbers
    return [layout for _, layout in layouts.values()], which


class Columns:
    """The tensors called `names` of samples of some layouts.

    Attributes:
        names, numbers: Of the tensors; a tensor's place among the names is its number.
        references: [tensors][layouts], what each is; empty until `resolve`.
        extents: Where each lies in its member.
        bools: By number, in which layouts the tensor is of bools, which must be looked at.
    """

    def __init__(self, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self.names = tuple(names)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.layouts = layouts
        self.references: list[list[Reference]] = []
        stored = [[layout.tensors[name] for layout in layouts] for name in names]
        shape = (len(names), len(layouts))
        begin = np.array([[one.begin for one in each] for each in stored], np.int64).reshape(shape)
        end = np.array([[one.end for one in each] for each in stored], np.int64).reshape(shape)
        self.extents = Extents(begin, end - begin)
        self.bools = [[number for number, one in enumerate(each) if one.dtype == "BOOL"] for each in stored]

    def resolve(self, like: dict[str, Any], texts: Callable[[int], dict[str, str]], key: Callable[[int], str]) -> None:
        """Find what the tensors are in each layout.

        Args:
            like: The first sample's lazy tensors by name.
            texts: Returns how the skeletons of a layout refer to its tensors, by name.
            key: Returns the key of a sample of a layout; the first sample is of layout 0.

        Raises:
            BatchError: A tensor is of another kind or dtype in one of them.
        """
        texts_of = [texts(number) for number in range(len(self.layouts))]
        for name in self.names:
            mine = like[name]._reference
            references = [resolve(layout, text[name]) for layout, text in zip(self.layouts, texts_of, strict=True)]
            for number, found in enumerate(references):
                if found.kind != mine.kind or found.dtype != mine.dtype:
                    raise BatchError(
                        f"tensor {name!r} is {mine.kind} of {mine.dtype} in sample {key(0)!r}, "
                        f"but {found.kind} of {found.dtype} in {key(number)!r}"
                    )
            self.references.append(references)

    def check_equal(self, count: int, key: Callable[[int], str]) -> None:
        """Raise BatchError unless each tensor has one shape in all layouts, and `count` of it can be stacked."""
        for name, references in zip(self.names, self.references, strict=True):
            for number, reference in enumerate(references):
                if reference.shape != references[0].shape:
                    raise BatchError(
                        f"tensor {name!r} is {list(references[0].shape)} in sample {key(0)!r}, but "
                        f"{list(reference.shape)} in {key(number)!r}; use collate='pad' or 'list'"
                    )
        for each, limit in zip(self.references, self.limits, strict=True):
            if count > limit:
                check_stackable(each[0], count, each[0].shape, key(0))

    def are_equal(self) -> bool:
        """Return whether each tensor has one shape in all layouts."""
        return all(one.shape == each[0].shape for each in self.references for one in each)

    @cached_property
    def limits(self) -> list[int]:
        """Largest number of samples that can be stacked, by tensor, if all have the first one's shape."""
        # one step per tensor, once for all batches of a structure
        return [_most(each[0], each[0].shape) for each in self.references]

    def largest(self, key: Callable[[int], str]) -> list[tuple[int, ...]]:
        """Return, for each tensor, the shape that all of its shapes fit into.

        Raises:
            BatchError: A tensor has different numbers of dimensions.
        """
        for name, references in zip(self.names, self.references, strict=True):
            for number, reference in enumerate(references):
                if len(reference.shape) != len(references[0].shape):
                    raise BatchError(
                        f"tensor {name!r} has {len(references[0].shape)} dimensions in sample {key(0)!r}, "
                        f"but {len(reference.shape)} in {key(number)!r}; use collate='list'"
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


def check_same_names(
    layouts: Sequence[Layout], names: Sequence[str], wanted: Callable[[str], bool] | None, key: Callable[[int], str]
) -> None:
    """Raise BatchError unless the layouts have the same tensors of those that are wanted, as the first sample has them."""
    first = layouts[0].tensors.keys()
    for number, layout in enumerate(layouts):
        for name in names:
            if name not in layout.tensors:
                raise BatchError(
                    f"sample {key(number)!r} has no tensor {name!r}, but {key(0)!r} has; collate with a function"
                )
        more = [name for name in layout.tensors.keys() - first if wanted is None or wanted(name)]
        if more:
            raise BatchError(
                f"sample {key(number)!r} has tensor {min(more)!r}, but {key(0)!r} has not; collate with a function"
            )
