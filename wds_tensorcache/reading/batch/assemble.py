"""Read many samples at once: each tensor of all samples into one array, all arrays of a batch into one arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.reading.batch.columns import Columns, check_same_names, check_stackable, layouts_of
from wds_tensorcache.reading.batch.memory import Memory, filler_of, nbytes_of, no_memory, to_device
from wds_tensorcache.reading.batch.placement import check_collate, fill
from wds_tensorcache.reading.batch.read_plan import Places, Plan
from wds_tensorcache.reading.batch.structure import Structure, structure_of
from wds_tensorcache.reading.batch.values import Decoded, Leaves
from wds_tensorcache.storage.pool import Pool
from wds_tensorcache.storage.threads import ThreadPool

__all__ = ["Reading", "Request", "fill_batch", "read_batch", "read_tensors"]

Array = np.ndarray[Any, Any]
_ALIGN = 64
_MAX_COLUMNS = 64


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
    executor: ThreadPool | None


def read_batch(
    request: Request, device: Any = None, pin: bool = False, collate: Any = "stack", pad_value: Any = 0
) -> Any:
    """Return a batch; see `TensorCache.read_batch`."""
    check_collate(collate)
    reading = Reading(request, pin, device)
    if callable(collate):
        reading.take_common()
        reading.read_rows()
        return collate([reading.fill_sample(request.sample(i), i) for i in range(len(request.places))])
    reading.take_all()
    if collate == "stack":
        made = reading.stacked()
    else:
        made = reading.listed() if collate == "list" else reading.padded(pad_value)
    batch = fill_batch(request, made, reading.io)
    return (batch, reading.columns.shapes(reading.which())) if collate == "pad" else batch


def read_tensors(request: Request, device: Any = None, pin: bool = False, collate: str = "stack") -> dict[str, Any]:
    """Return the tensors of a batch by name; see `TensorCache.read_tensors`."""
    if collate not in ("stack", "list", "auto"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list' or 'auto'")
    reading = Reading(request, pin, device)
    reading.take_all()
    if collate == "stack" or (collate == "auto" and reading.can_stack()):
        return reading.stacked()
    listed = reading.listed()
    return listed if collate == "list" else listed | reading.restacked()


def fill_batch(request: Request, tensors: Mapping[str, Any], io: str = "pread") -> Any:
    """Return the structure of a batch with `tensors` in it; `io` is how its samples were just read."""
    like = request.structure
    decoded = Decoded(request.places, like.template, io, request.sample, request.key, request.wanted, like.sample)
    if (
        not like.is_plain or get_worker_info() is not None
    ):  # in a worker, nobody would hear of an error when it is pickled
        decoded.check()
    if like.recipe is not None:
        return like.recipe.fill(tensors, partial(Leaves, decoded))
    return fill(like.sample, lambda lazy: tensors[lazy.name], lambda path: Leaves(decoded, path))


class Reading:
    """One batch while it is read."""

    columns: Columns
    memory: Memory

    def __init__(self, request: Request, pin: bool, device: Any) -> None:
        check_device(device)
        self._request = request
        self._pin, self._device = pin, device
        self._layouts, self._which = layouts_of(request.places)
        self._count = len(request.places)
        self._offsets: list[Sequence[int]] = []  # [tensors][samples], once rows were read
        self.io = "pread"  # how the samples were read

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
            if self._which is None and structure.template is not None and self._layouts[0].texts is not None:
                if len(kept) >= _MAX_COLUMNS:
                    kept.clear()
                kept[id(self._layouts[0])] = columns  # has the layout: it stays the one with this id
        self.columns = columns

    def _texts(self, number: int) -> dict[str, str]:
        """Return how the skeletons of a layout refer to its tensors, by name."""
        layout: Layout = self._layouts[number]
        if layout.texts is not None:
            return dict(zip(layout.tensors, layout.texts, strict=True))
        # the index could not read these skeletons, so that each may refer to its tensors in its own way
        found: dict[str, str] = {}
        for i in np.flatnonzero(self.which() == number).tolist():
            tensors = structure_of(self._request.sample(i), None).tensors
            references = [lazy._reference for lazy in tensors.values()]
            texts = {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}
            found = found or texts
            if texts != found:
                name = next(name for name in found if texts.get(name) != found[name])
                one, other = self._key(number), self._request.key(i)
                raise BatchError(f"tensor {name!r} is of another kind or dtype in sample {other!r} than in {one!r}")
        return found

    def _read(self, first: list[int], dest: Array | None, nbytes: int, pin: bool, device: Any) -> None:
        """Read every tensor, the first sample's row of each to byte `first` of `nbytes` of memory, all to `dest`."""
        request = self._request
        self.memory = Memory(request.pool, nbytes, pin, device)
        if nbytes:
            plan = Plan(request.places, self.columns.extents, self._which, first, dest)
            self.io = plan.read(self.memory.array, request.io, request.threads, request.executor)

    def _check_bools(self, offsets: list[Sequence[int]]) -> None:
        """Raise FormatError if a row that is to be bools holds anything else."""
        for number, (name, layouts) in enumerate(zip(self.columns.names, self.columns.bools, strict=True)):
            begins = offsets[number]
            for layout in layouts:
                nbytes = self.columns.extents.nbytes.item(number, layout)
                rows: Any = np.flatnonzero(self.which() == layout).tolist()
                if self._which is None and isinstance(begins, range):  # one behind the other
                    nbytes, rows = nbytes * self._count, [0]
                for i in rows if nbytes else ():
                    try:
                        check_array(self.memory.array[begins[i] : begins[i] + nbytes].view(np.bool_))
                    except FormatError as exc:
                        raise exc.at(f"tensor {name!r} of a batch with sample {self._request.key(i)!r}") from exc

    def read_rows(self) -> None:
        """Read every tensor; its rows follow each other."""
        self._read_rows(self._pin, self._device)
        self.memory.move(self._device)

    def _read_rows(self, pin: bool, device: Any) -> None:
        extents = self.columns.extents
        if extents.sizes is not None:
            first, _, total = _in_turn([size * self._count for size in extents.sizes])
            self._read(first, None, total, pin, device)
            self._offsets = [
                range(at, at + size * self._count, size) if size else [at] * self._count
                for at, size in zip(first, extents.sizes, strict=True)
            ]
        else:
            steps = extents.nbytes[:, self.which()]
            first, _, total = _in_turn(steps.sum(1).tolist())
            dest = np.array(first)[:, None] + steps.cumsum(1) - steps
            self._read(first, dest, total, pin, device)
            self._offsets = dest.tolist()
        self._check_bools(self._offsets)

    def can_stack(self) -> bool:
        """Return whether `stacked` gives every tensor."""
        return self.columns.are_equal() and self._count <= min(self.columns.limits, default=self._count)

    def stacked(self) -> dict[str, Any]:
        """Return each tensor as `[B, …]`."""
        self.columns.check_equal(self._count, self._key)
        self.read_rows()
        return self.restacked()

    def restacked(self) -> dict[str, Any]:
        """Return as `[B, …]` what was read, has one shape in all samples and can be stacked."""
        return {
            name: self.memory.view(each[0], offsets[0], (self._count, *each[0].shape))
            for name, each, offsets, limit in zip(
                self.columns.names, self.columns.references, self._offsets, self.columns.limits, strict=True
            )
            if self._count <= limit and all(one.shape == each[0].shape for one in each)
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

        def load(lazy: Any) -> Any:
            if not isinstance(lazy, Lazy):
                return lazy  # bytearrays are the sample's own
            reference, number = lazy._reference, self.columns.numbers.get(lazy.name)
            begin = self._offsets[number][i] if number is not None else 0
            # not always aligned where samples differ in a tensor's dtype
            if number is not None and begin % reference.dtype.itemsize == 0:
                return self.memory.view(reference, begin, reference.shape)
            loaded = lazy.load()
            return loaded if reference.kind == "ndarray" else to_device(loaded, self._pin, self._device)

        return rebuild(sample, load)

    def padded(self, value: Any) -> dict[str, Any]:
        """Return each tensor as `[B, *largest]`, what is not there filled with `value`, or with what it has for the name."""
        columns, which = self.columns, self.which()
        values = value if isinstance(value, Mapping) else dict.fromkeys(columns.names, value)
        if unknown := [name for name in values if name not in columns.names]:
            raise BatchError(f"pad_value has {unknown[0]!r}, but no tensor is called that")
        shapes = columns.largest(self._key)
        if columns.are_equal():
            return self.stacked()
        in_place = all(
            r.shape[1:] == shape[1:] for each, shape in zip(columns.references, shapes, strict=True) for r in each
        )
        for each, shape in zip(columns.references, shapes, strict=True):
            check_stackable(each[0], self._count, shape, self._key(0), with_numpy=not in_place)
        steps = [nbytes_of(each[0], shape) for each, shape in zip(columns.references, shapes, strict=True)]
        fillers = [
            filler_of(each[0], values.get(name, 0) if any(r.shape != shape for r in each) else 0)
            for name, each, shape in zip(columns.names, columns.references, shapes, strict=True)
        ]
        first, ends, total = _in_turn([step * self._count for step in steps])
        if in_place:
            # a row is the beginning of its padded row: read into place
            dest = np.array(first, np.int64)[:, None] + np.array(steps, np.int64)[:, None] * np.arange(self._count)
            self._read(first, dest, total, self._pin, self._device)
            array = self.memory.array
            for (dtype, filler), nbytes, begins, step in zip(
                fillers, columns.extents.nbytes[:, which].tolist(), dest.tolist(), steps, strict=True
            ):
                for begin, length in zip(begins, nbytes, strict=True):
                    if length < step:
                        array[begin + length : begin + step].view(dtype)[...] = filler
            self._check_bools(dest.tolist())
        else:
            self._copy_padded(shapes, fillers, first, ends, total)
        self.memory.move(self._device)
        return {
            name: self.memory.view(each[0], at, (self._count, *shape))
            for name, each, at, shape in zip(columns.names, columns.references, first, shapes, strict=True)
        }

    def _copy_padded(self, shapes: Any, fillers: Any, first: list[int], ends: list[int], total: int) -> None:
        self._read_rows(False, None)
        rows = self.memory.array
        self.memory = Memory(self._request.pool, total, self._pin, self._device)
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
    if edges[-1] >= 1 << 63:
        raise no_memory(edges[-1])
    return edges[:-1], [at + size for at, size in zip(edges[:-1], sizes, strict=True)], edges[-1]
