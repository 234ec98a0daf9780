"""Read many samples at once: each tensor of all samples into one array, all arrays of a batch into one arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from wds_tensorcache.codec.header import Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.realize import realize
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.template import Template
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import FormatError
from wds_tensorcache.loading.collate import Recipe, fill, recipe_of
from wds_tensorcache.loading.columns import Columns, check_same_names, layouts_of
from wds_tensorcache.loading.leaves import Decoded, Leaves
from wds_tensorcache.loading.memory import Memory, filler_of, nbytes_of, to_device
from wds_tensorcache.loading.plan import Places, Plan
from wds_tensorcache.shards.arena import Pool

__all__ = ["Request", "Structure", "fill_batch", "read_batch", "read_tensors", "structure_of"]

Array = np.ndarray[Any, Any]
_ALIGN = 64
_MAX_COLUMNS = 64
_BUILTIN = frozenset({dict, list, tuple, str, bytes, int, float, bool, complex, type(None)})


@dataclass(frozen=True, slots=True)
class Structure:
    """What a batch is like whose first sample is like `sample`.

    Attributes:
        sample: For its containers and keys.
        tensors: Its lazy tensors by name.
        template: That the sample is of, if it is of one.
        recipe: How to make a batch, if it is of a template.
        columns: Of batches whose samples are all of one layout, by that.
    """

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    recipe: Recipe | None
    columns: dict[int, Columns] = field(default_factory=dict)


def structure_of(sample: Any, template: Template | None) -> Structure:
    """Return the structure of `sample`, which is of that template if it is of one."""
    tensors: dict[str, Lazy] = {}
    fill(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None)
    return Structure(sample, tensors, template, recipe_of(sample) if template is not None else None)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be read, and by what means.

    Attributes:
        places: Where the samples lie.
        structure: Of the first sample.
        sample: Returns sample `i` of the batch, lazy.
        key: Returns its key.
        wanted: Whether a tensor is selected; None if all are.
        pool, io, threads, executor: Whose memory, and how files are read.
    """

    places: Places
    structure: Structure
    sample: Callable[[int], Any]
    key: Callable[[int], str]
    wanted: Callable[[str], bool] | None
    pool: Pool
    io: str
    threads: int
    executor: Executor | None


def read_batch(
    request: Request, device: Any = None, pin: bool = False, collate: Any = "stack", pad_value: float = 0
) -> Any:
    """Return a batch; see `TensorCache.read_batch`."""
    if not callable(collate) and collate not in ("stack", "list", "pad"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list', 'pad' or a function of a list of samples")
    reading = _Reading(request, pin, device)
    if callable(collate):
        reading.take_common()
        reading.read_rows()
        return collate([reading.fill_sample(request.sample(i), i) for i in range(len(request.places))])
    reading.take_all()
    if collate == "stack":
        made = reading.stacked()
    else:
        made = reading.listed() if collate == "list" else reading.padded(pad_value)
    batch = fill_batch(request, made, reading.mapped)
    return (batch, reading.columns.shapes(reading.which())) if collate == "pad" else batch


def read_tensors(request: Request, device: Any = None, pin: bool = False, collate: str = "stack") -> dict[str, Any]:
    """Return the tensors of a batch by name; see `TensorCache.read_tensors`."""
    if collate not in ("stack", "list", "auto"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list' or 'auto'")
    reading = _Reading(request, pin, device)
    reading.take_all()
    if collate == "stack" or (collate == "auto" and reading.columns.are_equal()):
        return reading.stacked()
    listed = reading.listed()
    return listed if collate == "list" else listed | reading.restacked()


def fill_batch(request: Request, tensors: Mapping[str, Any], mapped: bool = False) -> Any:
    """Return the structure of a batch with `tensors` in it; `mapped` if its samples were just read through maps."""
    like = request.structure
    decoded = Decoded(request.places, like.template, mapped, request.sample, request.key, request.wanted)
    if like.recipe is not None:
        return like.recipe.fill(tensors, partial(Leaves, decoded))
    return fill(like.sample, lambda lazy: tensors[lazy.name], lambda path: Leaves(decoded, path))


class _Reading:
    """One batch while it is read."""

    columns: Columns
    memory: Memory

    def __init__(self, request: Request, pin: bool, device: Any) -> None:
        self._request = request
        self._pin, self._device = pin, device
        self._layouts, self._which = layouts_of(request.places)
        self._count = len(request.places)
        self._offsets: list[Sequence[int]] = []  # [tensors][samples], once rows were read
        self.mapped = False  # whether the samples were gathered from maps

    def which(self) -> Array:
        """Return which layout each sample has."""
        return np.zeros(self._count, np.int64) if self._which is None else self._which

    def _key(self, layout: int) -> str:
        """Return the key of the first sample with a layout."""
        return self._request.key(self._first(layout))

    def _first(self, layout: int) -> int:
        return int(np.argmax(self.which() == layout))

    def take_common(self) -> None:
        """Read the tensors that all samples have, whatever they are."""
        names = self._request.structure.tensors
        common = [name for name in names if all(name in layout.tensors for layout in self._layouts)]
        self.columns = Columns(common, self._layouts)

    def take_all(self) -> None:
        """Read the tensors of the first sample, which all must have.

        Raises:
            BatchError: One does not have a tensor, or has more, or has one of another kind or dtype.
        """
        structure = self._request.structure
        kept = structure.columns
        columns = kept.get(id(self._layouts[0])) if self._which is None else None
        if columns is None:
            names = list(structure.tensors)
            check_same_names(self._layouts, names, self._request.wanted, self._key)
            columns = Columns(names, self._layouts)
            columns.resolve(structure.tensors, self._texts, self._key)
            if self._which is None and structure.template is not None:
                if len(kept) >= _MAX_COLUMNS:
                    kept.clear()
                kept[id(self._layouts[0])] = columns  # has the layout: it stays the one with this id
        self.columns = columns

    def _texts(self, number: int) -> dict[str, str]:
        """Return how the skeletons of a layout refer to its tensors, by name."""
        layout: Layout = self._layouts[number]
        if layout.texts is not None:
            return dict(zip(layout.tensors, layout.texts, strict=True))
        tensors = structure_of(self._request.sample(self._first(number)), None).tensors
        references = [lazy._reference for lazy in tensors.values()]
        return {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}

    def _read(self, first: list[int], dest: Array | None, nbytes: int) -> None:
        """Read every tensor, the first sample's row of each to byte `first` of `nbytes` of memory, all to `dest`."""
        request = self._request
        self.memory = Memory(request.pool, nbytes, self._pin, self._device)
        if nbytes:
            plan = Plan(request.places, self.columns.extents, self._which, first, dest)
            self.mapped = plan.read(self.memory.array, request.io, request.threads, request.executor)

    def _check_bools(self, first: list[int], ends: list[int]) -> None:
        for name, begin, end, has in zip(self.columns.names, first, ends, self.columns.has_bools, strict=True):
            if has:
                try:
                    check_array(self.memory.array[begin:end].view(np.bool_))
                except FormatError as exc:
                    raise exc.at(f"tensor {name!r} of a batch with sample {self._key(0)!r}") from exc

    def read_rows(self) -> None:
        """Read every tensor; its rows follow each other."""
        extents = self.columns.extents
        if extents.sizes is not None:
            first, ends, total = _in_turn([size * self._count for size in extents.sizes])
            self._read(first, None, total)
            self._offsets = [
                range(at, at + size * self._count, size) if size else [at] * self._count
                for at, size in zip(first, extents.sizes, strict=True)
            ]
        else:
            steps = extents.nbytes[:, self.which()]
            first, ends, total = _in_turn(steps.sum(1).tolist())
            dest = np.array(first)[:, None] + steps.cumsum(1) - steps
            self._read(first, dest, total)
            self._offsets = dest.tolist()
        self._check_bools(first, ends)
        self.memory.move(self._device)

    def stacked(self) -> dict[str, Any]:
        """Return each tensor as `[B, …]`."""
        self.columns.check_equal(self._key)
        self.read_rows()
        return self.restacked()

    def restacked(self) -> dict[str, Any]:
        """Return as `[B, …]` what was read and has one shape in all samples."""
        return {
            name: self.memory.view(each[0], offsets[0], (self._count, *each[0].shape))
            for name, each, offsets in zip(self.columns.names, self.columns.references, self._offsets, strict=True)
            if all(one.shape == each[0].shape for one in each)
        }

    def listed(self) -> dict[str, Any]:
        """Return each tensor as a list of B."""
        self.read_rows()
        which = self.which().tolist()
        return {
            name: [
                self.memory.view(references[number], offset, references[number].shape)
                for number, offset in zip(which, offsets, strict=True)
            ]
            for name, references, offsets in zip(
                self.columns.names, self.columns.references, self._offsets, strict=True
            )
        }

    def fill_sample(self, sample: Any, i: int) -> Any:
        """Return sample `i` with its tensors loaded."""
        names = self.columns.names

        def load(lazy: Lazy) -> Any:
            reference = lazy._reference
            begin = self._offsets[names.index(lazy.name)][i] if lazy.name in names else 1
            if begin % reference.dtype.itemsize == 0:  # not always where samples differ in a tensor's dtype
                return self.memory.view(reference, begin, reference.shape)
            loaded = lazy.load()
            return loaded if reference.kind == "ndarray" else to_device(loaded, self._pin, self._device)

        def leaf(path: Any) -> Any:
            value = sample
            for step in path:
                value = value[step]
            return value if type(value) in _BUILTIN else realize(value, self._device)

        return fill(sample, load, leaf)

    def padded(self, value: float) -> dict[str, Any]:
        """Return each tensor as `[B, *largest]`, what is not there filled with `value`."""
        columns, which = self.columns, self.which()
        shapes = columns.largest(self._key)
        if columns.are_equal():
            return self.stacked()
        steps = [nbytes_of(each[0], shape) for each, shape in zip(columns.references, shapes, strict=True)]
        fillers = [
            filler_of(each[0], value if any(r.shape != shape for r in each) else 0)
            for each, shape in zip(columns.references, shapes, strict=True)
        ]
        first, ends, total = _in_turn([step * self._count for step in steps])
        if all(r.shape[1:] == shape[1:] for each, shape in zip(columns.references, shapes, strict=True) for r in each):
            # a row is the beginning of its padded row: read into place
            dest = np.array(first, np.int64)[:, None] + np.array(steps, np.int64)[:, None] * np.arange(self._count)
            self._read(first, dest, total)
            array = self.memory.array
            for (dtype, filler), nbytes, begins, step in zip(
                fillers, columns.extents.nbytes[:, which].tolist(), dest.tolist(), steps, strict=True
            ):
                for begin, length in zip(begins, nbytes, strict=True):
                    if length < step:
                        array[begin + length : begin + step].view(dtype)[...] = filler
        else:
            self._copy_padded(shapes, fillers, first, ends, total)
        self._check_bools(first, ends)
        self.memory.move(self._device)
        return {
            name: self.memory.view(each[0], at, (self._count, *shape))
            for name, each, at, shape in zip(columns.names, columns.references, first, shapes, strict=True)
        }

    def _copy_padded(self, shapes: Any, fillers: Any, first: list[int], ends: list[int], total: int) -> None:
        pin, device = self._pin, self._device
        self._pin, self._device = False, None
        self.read_rows()
        rows = self.memory.array
        self._pin, self._device = pin, device
        self.memory = Memory(self._request.pool, total, pin, device)
        which = self.which().tolist()
        for number, (dtype, filler) in enumerate(fillers):
            # as numpy sees them, in one thread: OpenMP's do not survive a fork
            out = self.memory.array[first[number] : ends[number]].view(dtype).reshape(self._count, *shapes[number])
            out[...] = filler
            for i, (layout, begin) in enumerate(zip(which, self._offsets[number], strict=True)):
                one = self.columns.references[number][layout]
                place: Any = (i, *map(slice, one.shape))
                out[place] = rows[begin : begin + one.end - one.begin].view(dtype).reshape(one.shape)


def _in_turn(sizes: list[int]) -> tuple[list[int], list[int], int]:
    """Return where arrays of so many bytes begin and end in one memory, each aligned, and how large that is."""
    edges = list(accumulate((size + -size % _ALIGN for size in sizes), initial=0))
    return edges[:-1], [at + size for at, size in zip(edges[:-1], sizes, strict=True)], edges[-1]
