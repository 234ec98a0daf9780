"""Batches: many samples read at once, into one block of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from wds_tensorcache.reading.batch.columns import Columns, Layouts
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.batch.placement import (
    Padding,
    Placement,
    fill_paddings,
    place,
    place_equal,
    place_in_turn,
)
from wds_tensorcache.reading.batch.request import NewNames, Request, columns_of
from wds_tensorcache.reading.batch.values import Decoded
from wds_tensorcache.reading.collate import WAYS, PadValue, as_collate
from wds_tensorcache.reading.store import Store
from wds_tensorcache.storage.gather import Ranges, gather

Array = np.ndarray[Any, Any]


def read_batch(
    request: Request,
    device: Any = None,
    pin: bool = False,
    collate: Any = "stack",
    pad_value: PadValue = 0,
    ways: tuple[str, ...] = WAYS,
) -> Any:
    """Return a batch; see `Cache.read_batch`. With `TENSOR_WAYS`, return its tensors by name; see `Cache.read_tensors`."""
    if device is not None:
        check_device(device)
    if ways is WAYS and callable(collate):
        return collate(_read_samples(request, pin, device))
    try:
        layouts = request.layouts()
        tensors = _read_tensors(request, layouts, device, pin, collate, pad_value, ways)
        return _nest(request, tensors, layouts) if ways is WAYS else tensors
    except (NewNames, BatchError) as exc:
        if isinstance(exc, BatchError) and not request.find_names():
            raise
        return read_batch(request.again(), device, pin, collate, pad_value, ways)


def nest_tensors(request: Request, tensors: Mapping[str, Any]) -> Any:
    """Return a batch with `tensors`, and without all other tensors; see `Cache.nest`."""
    kept = request.keeping(tuple(sorted(tensors)))
    layouts = kept.layouts()
    stored_names = [name for name in tensors if not layouts.chosen or name not in layouts.chosen[0]]
    present = {name for layout in layouts.items for name in layout.named}
    missing = [name for name in stored_names if name not in present and name in request.schema()]
    kept = replace(kept, fixed=tuple(dict.fromkeys([*missing, *kept.fixed])))
    structure = kept.structures.structure_for(layouts, kept.fixed)
    for name in stored_names:
        if name not in structure.names:
            has = list_names(flatten(request.sample(0)), name)
            raise KeyError(f"sample {request.key(0)!r} has no tensor {name!r:.100}; it has {has}")
    return _nest(kept, tensors, layouts)


def _nest(request: Request, tensors: Mapping[str, Any], layouts: Layouts) -> Any:
    decoded = Decoded(request, layouts)
    structure = decoded.structure
    # In a worker, an error during pickling of the batch would not reach the caller. If a sample lacks a tensor, only its
    # skeleton shows whether there is None in the tensor's place.
    if not structure.is_plain or get_worker_info() is not None:
        decoded.check()
    elif layouts.is_mixed or structure.has_missing:
        if any(name not in layout.named for name in structure.names for layout in layouts.items):
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
        request.place_chosen(batch, tensors, decoded)
    return batch


def _read_tensors(
    request: Request,
    layouts: Layouts,
    device: Any,
    pin: bool,
    collate: Any,
    pad_value: PadValue,
    allowed_ways: tuple[str, ...],
) -> dict[str, Any]:
    columns, count = columns_of(request, layouts), len(request.rows.row)
    shapes: Sequence[Any] = columns.shapes
    paddings: list[Padding] = []
    if isinstance(collate, str) and collate in ("stack", "auto") and collate in allowed_ways and count <= columns.limit:
        placement = place_equal(columns.sizes or (), count)  # most batches: no work per tensor
    else:
        ways = as_collate(collate, pad_value, allowed_ways)
        if ways is not collate:
            try:
                ways.check_names(columns.names)
            except BatchError:  # all samples of the batch may lack a tensor that the argument names
                names_of_view = filter(request.structures.wanted, request.schema())
                ways.check_names(list(dict.fromkeys([*columns.names, *names_of_view])))
        shapes, placement, paddings = place(layouts, columns, list(map(ways.way, columns.names)))
    memory = Memory(request.store.pool, placement.nbytes, pin, device)
    ahead = request.skeletons_ahead() if request.store.has_remote and allowed_ways is WAYS else ()
    if paddings:
        fill_paddings(paddings, layouts, columns, placement, memory.array)
    _read_rows(request.store, layouts, columns, placement, memory.array, ahead)
    if device is not None:
        memory.move(device)
    tensors: dict[str, Any] = {}
    for number, name in enumerate(columns.names):
        if (shape := shapes[number]) is not None:
            tensors[name] = memory.view(columns.first[number], placement.begins[number], (count, *shape))
        else:
            references = map(columns.references[number].__getitem__, layouts.which.tolist())
            rows = zip(references, placement.rows[number].tolist(), strict=True)
            tensors[name] = [one and memory.view(one, begin, one.shape) for one, begin in rows]
    return tensors


def _read_rows(
    store: Store, layouts: Layouts, columns: Columns, placement: Placement, memory: Array, skeletons: Iterable[int] = ()
) -> None:
    """Read all rows into `memory`, and fetch the `skeletons` of remote samples."""
    rows = layouts.rows
    which = layouts.which
    ranges = Ranges(rows.number, rows.begin + columns.begin[:, which], columns.nbytes[:, which], placement.rows)
    if store.has_remote and (is_remote := store.are_remote[rows.number]).any():
        from wds_tensorcache.reading.remote_batches import read_remote_rows

        far = ranges if (is_all := is_remote.all()) else ranges.select(is_remote)
        wanted = [i for i in skeletons if is_remote[i] and i not in rows.fetched]
        extents = {
            i: (number, *store.shards[number].skeleton_extent(rows.row.item(i)))
            for i, number in zip(wanted, rows.number[wanted].tolist(), strict=True)
        }
        rows.fetched.update(read_remote_rows(store, far, extents, memory))
        ranges = ranges if is_all else ranges.select(~is_remote)
    files = {number: rows.shards[number].file for number, *_ in rows.by_shard if not rows.shards[number].is_remote}
    if files and placement.nbytes:
        gather(files, ranges, memory, store.num_threads, store.executor)
    if columns.bools:
        _check_bools(layouts, columns, placement, memory)


def _check_bools(layouts: Layouts, columns: Columns, placement: Placement, memory: Array) -> None:
    """Raise FormatError if a bool is not 0 or 1."""
    # hazard: torch and numpy accept any byte as a bool, and compute wrong results
    for tensor, layout in columns.bools:
        nbytes, samples = columns.nbytes.item(tensor, layout), np.flatnonzero(layouts.which == layout)
        begins: list[int] = placement.rows[tensor, samples].tolist()
        if nbytes * len(begins) == begins[-1] + nbytes - begins[0]:  # rows are contiguous: check them at once
            nbytes, begins = nbytes * len(begins), begins[:1]
        for i, begin in zip(samples.tolist(), begins, strict=False):
            try:
                check_array(memory[begin : begin + nbytes].view(np.bool_))
            except FormatError as exc:
                where = f"tensor {columns.names[tensor]!r} of a batch with sample {layouts.rows.key(i)!r}"
                raise exc.at(where) from exc


def _read_samples(request: Request, pin: bool, device: Any) -> list[Any]:
    """Return the samples of a batch with loaded tensors."""
    layouts = request.layouts()
    # tensors that all samples have are read together; `load` reads the other tensors one by one
    names = filter(request.structures.wanted, layouts.items[0].named)
    columns = Columns([name for name in names if all(name in layout.named for layout in layouts.items)], layouts)
    placement = place_in_turn(columns.nbytes[:, layouts.which])
    memory = Memory(request.store.pool, placement.nbytes, pin, device)
    ahead = range(len(request)) if request.store.has_remote else ()
    _read_rows(request.store, layouts, columns, placement, memory.array, ahead)
    if device is not None:
        memory.move(device)
    numbers = {name: number for number, name in enumerate(columns.names)}

    def load(i: int, lazy: Any) -> Any:
        if not isinstance(lazy, Lazy):
            return lazy
        reference, number = lazy._reference, numbers.get(lazy.name)
        begin = placement.rows.item(number, i) if number is not None else 0
        # the offset may be unaligned if samples differ in a tensor's dtype
        if number is not None and begin % reference.dtype.itemsize == 0:
            return memory.view(reference, begin, reference.shape)
        loaded = lazy.load()
        return loaded if reference.kind == "ndarray" else to_device(loaded, pin, device)

    return [rebuild(request.sample(i), partial(load, i)) for i in range(len(request))]
