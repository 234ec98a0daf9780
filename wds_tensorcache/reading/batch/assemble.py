"""Read many samples at once: each tensor into one array, and all arrays of a batch into one block of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.codec.lazy import Lazy, check_device
from wds_tensorcache.codec.skeleton.template import assemble
from wds_tensorcache.codec.tree import flatten, map_leaves, rebuild
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import BatchError, FormatError, list_names
from wds_tensorcache.reading.batch.batch_memory import Memory, to_device
from wds_tensorcache.reading.batch.collate import TENSOR_WAYS, WAYS, Pad, PadValue, as_collate
from wds_tensorcache.reading.batch.columns import Columns, Layouts, lacks_any
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.batch.padding import Padding, fill_paddings, filler_of, padded_shape
from wds_tensorcache.reading.batch.placement import Placement, nbytes_of, place_equal, place_in_turn
from wds_tensorcache.reading.batch.read import read_rows
from wds_tensorcache.reading.batch.request import NewNames, Request, columns_of
from wds_tensorcache.reading.batch.values import Decoded

Array = np.ndarray[Any, Any]


def read_batch(
    request: Request, device: Any = None, pin: bool = False, collate: Any = "stack", pad_value: PadValue = 0
) -> Any:
    """Return a batch; see `Cache.read_batch`."""
    if callable(collate):
        return collate(_read_samples(request, pin, device))
    try:
        return _nest(request, *_read_tensors(request, device, pin, collate, pad_value, WAYS))
    except (NewNames, BatchError) as exc:
        if isinstance(exc, BatchError) and not request.find_names():
            raise
        return read_batch(request.again(), device, pin, collate, pad_value)


def read_tensors(
    request: Request, device: Any = None, pin: bool = False, collate: Any = "stack", pad_value: PadValue = 0
) -> dict[str, Any]:
    """Return the tensors of a batch by name; see `Cache.read_tensors`."""
    try:
        return _read_tensors(request, device, pin, collate, pad_value, TENSOR_WAYS)[0]
    except (NewNames, BatchError) as exc:
        if isinstance(exc, BatchError) and not request.find_names():
            raise
        return read_tensors(request.again(), device, pin, collate, pad_value)


def nest_tensors(request: Request, tensors: Mapping[str, Any]) -> Any:
    """Return a batch with `tensors` by name, and without its other tensors; see `Cache.nest`."""
    kept = request.keeping(tuple(sorted(tensors)))
    layouts = kept.layouts()
    others = [name for name in tensors if not layouts.chosen or name not in layouts.chosen[0]]
    present = {name for layout in layouts.items for name in layout.named}
    missing = [name for name in others if name not in present and name in request.schema()]
    kept = replace(kept, fixed=tuple(dict.fromkeys([*missing, *kept.fixed])))
    structure = kept.structures.structure_for(layouts, kept.fixed)
    for name in others:
        if name not in structure.names:
            has = list_names(flatten(request.sample(0)), name)
            raise KeyError(f"sample {request.key(0)!r} has no tensor {name!r:.100}; it has {has}")
    return _nest(kept, tensors, layouts)


def _nest(request: Request, tensors: Mapping[str, Any], layouts: Layouts) -> Any:
    """Return a batch with the structure of its samples, and with `tensors`, by name."""
    structure = request.structures.structure_for(layouts, request.fixed)
    decoded = Decoded(request, layouts, structure)
    may_lack = layouts.is_mixed or structure.has_missing
    if not structure.is_plain or get_worker_info() is not None or (may_lack and lacks_any(layouts, structure.names)):
        # In a worker, an error during pickling of the batch would not reach the caller. If a sample lacks a tensor, only its
        # skeleton tells whether there is None in its place.
        decoded.check()
    if structure.visits is not None:
        names, paths, containers = structure.visits
        batch = assemble(containers, [*map(tensors.__getitem__, names), *map(partial(Leaves, decoded), paths)])
    else:
        wanted = request.structures.wanted
        batch = map_leaves(
            structure.sample, lambda lazy: tensors[lazy.name], lambda path: Leaves(decoded, path), wanted
        )
    if layouts.chosen:
        request.place_chosen(batch, tensors)
    return batch


def _read_tensors(
    request: Request, device: Any, pin: bool, collate: Any, pad_value: PadValue, allowed_ways: tuple[str, ...]
) -> tuple[dict[str, Any], Layouts]:
    """Return the tensors of a batch by name, and the layouts of its samples.

    Strings in `collate` must be in `allowed_ways`.
    """
    is_stacked = collate == "stack" or (collate == "auto" and allowed_ways is TENSOR_WAYS)
    is_plain_stack = isinstance(collate, str) and is_stacked
    ways = None if is_plain_stack else as_collate(collate, pad_value, allowed_ways)
    if device is not None:
        check_device(device)
    layouts = request.layouts()
    columns = columns_of(request, layouts)
    count = len(request.rows.row)
    paddings: list[Padding] = []
    if ways is None and count <= columns.limit:  # fast path for most batches: no work per tensor
        shapes: Sequence[Any] = columns.shapes
        placement = place_equal(columns.sizes or (), count)
    else:
        ways = ways or as_collate(collate, 0, allowed_ways)
        if ways is not collate:
            ways.check_names(columns.names)
        shapes, placement, paddings = _place(layouts, columns, ways.ways_for(columns.names))
    memory = Memory(request.store.pool, placement.nbytes, pin, device)
    ahead = request.skeletons_ahead() if request.store.has_remote and allowed_ways is WAYS else ()
    read_rows(request.store, layouts, columns, placement, memory.array, ahead)
    if columns.bools:
        _check_bools(layouts, columns, placement, memory.array)
    if paddings:
        fill_paddings(paddings, layouts, columns, placement, memory.array)
    if device is not None:
        memory.move(device)
    tensors: dict[str, Any] = {}
    for number, name in enumerate(columns.names):
        shape = shapes[number]
        if shape is not None:
            tensors[name] = memory.view(columns.first[number], placement.begins[number], (count, *shape))
        else:
            rows = zip(layouts.which.tolist(), placement.rows[number], strict=True)
            pairs = ((columns.references[number][at], begin) for at, begin in rows)
            tensors[name] = [one and memory.view(one, begin, one.shape) for one, begin in pairs]
    return tensors, layouts


def _place(
    layouts: Layouts, columns: Columns, ways: Sequence[str | Pad]
) -> tuple[list[tuple[int, ...] | None], Placement, list[Padding]]:
    """Choose where each row of a batch is placed in memory; a row is one sample's part of a tensor.

    Returns:
        For each tensor, the shape of its rows, or None if they are returned as a list; the placement of all rows; and the
        paddings to fill.

    Raises:
        BatchError: Shapes do not match, or a tensor's dtype cannot represent the fill value.
    """
    count = len(layouts.rows)
    sizes = columns.nbytes[:, layouts.which]
    shapes: list[tuple[int, ...] | None] = []
    paddings = []
    for number, way in enumerate(ways):
        first, can_stack = columns.first[number], count <= columns.limits[number]
        if isinstance(way, Pad):
            shapes.append(padded_shape(columns, layouts, number, way))
            row_nbytes = nbytes_of(first, shapes[-1] or ())
            if (sizes[number] < row_nbytes).any():
                paddings.append(Padding(number, row_nbytes, *filler_of(first, way.value)))
                sizes[number] = row_nbytes
        elif way == "list" or (way == "auto" and not can_stack):
            shapes.append(None)
        else:
            if not can_stack:
                columns.check_stackable(layouts, number)
            shapes.append(first.shape)
    if (sizes == sizes[:, :1]).all():
        return shapes, place_equal(tuple(sizes[:, 0].tolist()), count), paddings
    return shapes, place_in_turn(sizes), paddings


def _check_bools(layouts: Layouts, columns: Columns, placement: Placement, memory: Array) -> None:
    """Raise FormatError if a row of bools contains bytes other than 0 and 1.

    Torch and numpy accept any byte as a bool, and then compute wrong results.
    """
    for tensor, layout in columns.bools:
        begins, nbytes = placement.rows[tensor], columns.nbytes.item(tensor, layout)
        rows: list[int] = np.flatnonzero(layouts.which == layout).tolist()
        if len(layouts.items) == 1 and placement.row_nbytes == columns.sizes:  # rows are contiguous: check them at once
            nbytes, rows = nbytes * len(rows), [0]
        for i in rows if nbytes else ():
            try:
                check_array(memory[begins[i] : begins[i] + nbytes].view(np.bool_))
            except FormatError as exc:
                where = f"tensor {columns.names[tensor]!r} of a batch with sample {layouts.rows.key(i)!r}"
                raise exc.at(where) from exc


def _read_samples(request: Request, pin: bool, device: Any) -> list[Any]:
    """Return the samples of a batch with loaded tensors. Tensors that occur in all samples are read together."""
    if device is not None:
        check_device(device)
    layouts = request.layouts()
    wanted = request.structures.wanted or (lambda name: True)
    names = [
        name for name in filter(wanted, layouts.items[0].named) if all(name in layout.named for layout in layouts.items)
    ]
    columns = Columns(names, layouts)
    if columns.sizes is not None:
        placement = place_equal(columns.sizes, len(request.rows))
    else:
        placement = place_in_turn(columns.nbytes[:, layouts.which])
    memory = Memory(request.store.pool, placement.nbytes, pin, device)
    ahead = range(len(request)) if request.store.has_remote else ()
    read_rows(request.store, layouts, columns, placement, memory.array, ahead)
    _check_bools(layouts, columns, placement, memory.array)
    if device is not None:
        memory.move(device)

    def load(i: int, lazy: Any) -> Any:
        """Load a lazy tensor of sample `i`, and return it; return any other value unchanged."""
        if not isinstance(lazy, Lazy):
            return lazy
        reference, number = lazy._reference, columns.numbers.get(lazy.name)
        begin = placement.rows[number][i] if number is not None else 0
        # the offset may be unaligned if samples differ in a tensor's dtype
        if number is not None and begin % reference.dtype.itemsize == 0:
            return memory.view(reference, begin, reference.shape)
        loaded = lazy.load()
        return loaded if reference.kind == "ndarray" else to_device(loaded, pin, device)

    return [rebuild(request.sample(i), partial(load, i)) for i in range(len(request.rows))]
