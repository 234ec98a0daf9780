"""Read many samples at once: each tensor of all samples into one array, all arrays of a batch into one memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_stackable, layouts_of
from wds_tensorcache.reading.batch.memory import Memory, to_device
from wds_tensorcache.reading.batch.nest import fill
from wds_tensorcache.reading.batch.placement import Placement, fillers_of, nbytes_of, place_equal, place_in_turn
from wds_tensorcache.reading.batch.read_plan import read
from wds_tensorcache.reading.batch.request import Request, columns_of
from wds_tensorcache.reading.batch.values import Decoded, Leaves

__all__ = ["check_collate", "fill_batch", "read_batch", "read_tensors"]

Array = np.ndarray[Any, Any]


def check_collate(collate: Any) -> None:
    """Raise ValueError unless `read_batch` knows this way to make a batch of samples."""
    if not callable(collate) and collate not in ("stack", "list", "pad"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list', 'pad' or a function of a list of samples")


def read_batch(
    request: Request, device: Any = None, pin: bool = False, collate: Any = "stack", pad_value: Any = 0
) -> Any:
    """Return a batch; see `TensorCache.read_batch`."""
    if collate != "stack":
        check_collate(collate)
    if device is not None:
        check_device(device)
    layouts = layouts_of(request.rows)
    if callable(collate):
        return collate(_read_samples(request, layouts, pin, device))
    columns = columns_of(request, layouts)
    if collate == "pad":
        tensors, io = _read_padded(request, layouts, columns, pin, device, pad_value)
        return fill_batch(request, tensors, io), columns.shapes(layouts.which)
    if collate == "stack" and len(request.rows.row) > columns.limit:
        columns.check_stackable(layouts)
    found = _read_rows(request, layouts, columns, pin, device)
    return fill_batch(request, found.stacked(device) if collate == "stack" else found.listed(device), found.io)


def read_tensors(request: Request, device: Any = None, pin: bool = False, collate: str = "stack") -> dict[str, Any]:
    """Return the tensors of a batch by name; see `TensorCache.read_tensors`."""
    if collate not in ("stack", "list", "auto"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list' or 'auto'")
    if device is not None:
        check_device(device)
    layouts = layouts_of(request.rows)
    columns = columns_of(request, layouts)
    can_stack = len(request.rows.row) <= columns.limit
    if collate == "stack" and not can_stack:
        columns.check_stackable(layouts)
    found = _read_rows(request, layouts, columns, pin, device)
    if can_stack and collate != "list":
        return found.stacked(device)
    listed = found.listed(device)
    return listed if collate == "list" else listed | found.stacked()


def fill_batch(request: Request, tensors: Mapping[str, Any], io: str = "pread") -> Any:
    """Return the structure of a batch with `tensors` in it; `io` is how its samples were just read."""
    structure = request.structures.of(request.rows)
    decoded = Decoded(request, structure, io)
    if not structure.is_plain or get_worker_info() is not None:
        decoded.check()  # in a worker, an error that came when the batch is pickled would reach no caller
    if structure.recipe is not None:
        return structure.recipe.fill(tensors, partial(Leaves, decoded))
    return fill(structure.sample, lambda lazy: tensors[lazy.name], lambda path: Leaves(decoded, path))


@dataclass(frozen=True, slots=True)
class _Found:
    """The rows of a batch in memory; `io` is how they were read."""

    layouts: Layouts
    columns: Columns
    placement: Placement
    memory: Memory
    io: str

    def stacked(self, device: Any = None) -> dict[str, Any]:
        """Return each tensor that can be stacked as `[B, …]`; what was read is moved to `device`."""
        if device is not None:
            self.memory.move(device)
        columns, count = self.columns, len(self.layouts.rows.row)
        tensors = {}
        for name, each, begin, limit in zip(
            columns.names, columns.references, self.placement.first, columns.limits, strict=True
        ):
            if count <= limit:
                tensors[name] = self.memory.view(each[0], begin, (count, *each[0].shape))
        return tensors

    def listed(self, device: Any = None) -> dict[str, Any]:
        """Return each tensor as a list of B; what was read is moved to `device`."""
        if device is not None:
            self.memory.move(device)
        which, view = self.layouts.which.tolist(), self.memory.view
        return {
            name: [view(each[number], begin, each[number].shape) for number, begin in zip(which, begins, strict=True)]
            for name, each, begins in zip(self.columns.names, self.columns.references, self.placement.rows, strict=True)
        }

    def check_bools(self) -> None:
        """Raise FormatError if a row that is to be bools has anything else."""
        for tensor, layout in self.columns.bools:
            begins, nbytes = self.placement.rows[tensor], self.columns.nbytes.item(tensor, layout)
            rows: Any = np.flatnonzero(self.layouts.which == layout).tolist()
            if len(self.layouts.items) == 1:  # one after the other
                nbytes, rows = nbytes * len(rows), [0]
            for i in rows if nbytes else ():
                try:
                    check_array(self.memory.array[begins[i] : begins[i] + nbytes].view(np.bool_))
                except FormatError as exc:
                    where = f"tensor {self.columns.names[tensor]!r} of a batch with sample {self.layouts.rows.key(i)!r}"
                    raise exc.at(where) from exc

    def load(self, i: int, pin: bool, device: Any, lazy: Any) -> Any:
        """Return a lazy tensor of sample `i` loaded; anything else, as bytearrays, is the sample's own."""
        if not isinstance(lazy, Lazy):
            return lazy
        reference, number = lazy._reference, self.columns.numbers.get(lazy.name)
        begin = self.placement.rows[number][i] if number is not None else 0
        # not always aligned where samples differ in a tensor's dtype
        if number is not None and begin % reference.dtype.itemsize == 0:
            return self.memory.view(reference, begin, reference.shape)
        loaded = lazy.load()
        return loaded if reference.kind == "ndarray" else to_device(loaded, pin, device)


def _read_rows(
    request: Request,
    layouts: Layouts,
    columns: Columns,
    pin: bool = False,
    device: Any = None,
    placement: Placement | None = None,
) -> _Found:
    """Read every tensor into memory that can be moved to `device`; without a placement, rows follow each other."""
    if placement is None and columns.sizes is not None:
        placement = place_equal(columns.sizes, len(request.rows.row))
    elif placement is None:
        placement = place_in_turn(columns.nbytes[:, layouts.which])
    memory = Memory(request.store.pool, placement.nbytes, pin, device)
    io = read(request.store, layouts, columns, placement, memory.array) if placement.nbytes else "pread"
    found = _Found(layouts, columns, placement, memory, io)
    if columns.bools:
        found.check_bools()
    return found


def _read_samples(request: Request, layouts: Layouts, pin: bool, device: Any) -> list[Any]:
    """Return the samples with their tensors loaded: those that all samples have, whatever they are, by one read."""
    names = [
        name for name in request.structures.tensors(layouts) if all(name in layout.tensors for layout in layouts.items)
    ]
    found = _read_rows(request, layouts, Columns(names, layouts.items), pin, device)
    if device is not None:
        found.memory.move(device)
    return [rebuild(request.sample(i), partial(found.load, i, pin, device)) for i in range(len(request.rows))]


def _read_padded(
    request: Request, layouts: Layouts, columns: Columns, pin: bool, device: Any, value: Any
) -> tuple[dict[str, Any], str]:
    """Return each tensor as `[B, *largest]`, the rest filled with `value`, and how the rows were read."""
    if isinstance(value, Mapping) and (unknown := [name for name in value if name not in columns.numbers]):
        raise BatchError(f"pad_value has {unknown[0]!r}, but no tensor is called that")
    shapes = columns.largest(layouts)
    if columns.is_equal:
        columns.check_stackable(layouts)
        found = _read_rows(request, layouts, columns, pin, device)
        return found.stacked(device), found.io
    count, references = len(request.rows), columns.references
    in_place = all(r.shape[1:] == shape[1:] for each, shape in zip(references, shapes, strict=True) for r in each)
    for each, shape in zip(references, shapes, strict=True):
        check_stackable(each[0], count, shape, request.rows.key(0), with_numpy=not in_place)
    steps = tuple(nbytes_of(each[0], shape) for each, shape in zip(references, shapes, strict=True))
    fillers = fillers_of(columns.names, references, shapes, value)
    placement = place_equal(steps, count)
    if in_place:
        # a row is the beginning of its padded row: read into place
        found = _read_rows(request, layouts, columns, pin, device, placement)
        memory = found.memory
        lengths = columns.nbytes[:, layouts.which].tolist()
        for (dtype, filler), nbytes, begins, step in zip(fillers, lengths, placement.rows, steps, strict=True):
            for begin, length in zip(begins, nbytes, strict=True):
                if length < step:
                    memory.array[begin + length : begin + step].view(dtype)[...] = filler
    else:
        found = _read_rows(request, layouts, columns)
        memory = Memory(request.store.pool, placement.nbytes, pin, device)
        which = layouts.which.tolist()
        for number, (dtype, filler) in enumerate(fillers):
            first = placement.first[number]
            # as numpy sees them, in one thread: OpenMP's do not survive a fork
            out = memory.array[first : first + steps[number] * count].view(dtype).reshape(count, *shapes[number])
            out[...] = filler
            for i, (layout, begin) in enumerate(zip(which, found.placement.rows[number], strict=True)):
                one = references[number][layout]
                place: Any = (i, *map(slice, one.shape))
                row = found.memory.array[begin : begin + one.end - one.begin]
                out[place] = row.view(dtype).reshape(one.shape)
    if device is not None:
        memory.move(device)
    views = zip(columns.names, references, placement.first, shapes, strict=True)
    return {name: memory.view(each[0], begin, (count, *shape)) for name, each, begin, shape in views}, found.io
