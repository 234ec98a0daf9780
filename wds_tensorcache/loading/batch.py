"""Read many samples at once: each tensor of all samples into one array, all arrays of a batch into one arena."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.header import Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.realize import realize
from wds_tensorcache.codec.reference import Reference, reference_text, resolve
from wds_tensorcache.codec.template import Template
from wds_tensorcache.codec.views import check_array
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.loading.collate import fill
from wds_tensorcache.loading.leaves import Decoded, Leaves
from wds_tensorcache.loading.memory import filler_of, move, nbytes_of, take_memory, view_batch
from wds_tensorcache.loading.plan import Places, Plan
from wds_tensorcache.shards.arena import Pool

__all__ = ["Request", "Structure", "read_batch", "structure_of"]

Array = np.ndarray[Any, Any]
_ALIGN = 64
_BUILTIN = frozenset({dict, list, tuple, str, bytes, int, float, bool, complex, type(None)})


@dataclass(frozen=True, slots=True)
class Structure:
    """A sample, for its containers and keys; its lazy tensors by name; and which of its containers have one in them."""

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    holding: dict[int, bool]


def structure_of(sample: Any, template: Template | None) -> Structure:
    """Return what a batch looks like whose first sample is `sample`, of that template if it is of one."""
    tensors: dict[str, Lazy] = {}
    holding: dict[int, bool] = {}
    fill(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None, holding)
    return Structure(sample, tensors, template, holding)


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
    if callable(collate):
        loaded = _Tensors(request, _common(request))
        loaded.read(pin, device)
        return collate([loaded.fill_sample(request.sample(i), i, pin, device) for i in range(len(request.places))])
    tensors = _Tensors(request, list(request.structure.tensors))
    tensors.resolve()
    if collate == "stack":
        tensors.check_equal()
        tensors.read(pin, device)
        made = tensors.stacked()
    elif collate == "list":
        tensors.read(pin, device)
        made = tensors.listed()
    else:
        made = tensors.padded(pin, device, pad_value)
    decoded = Decoded(
        request.places, request.structure.template, tensors.mapped, request.sample, request.key, request.wanted
    )
    like = request.structure
    batch = fill(like.sample, lambda lazy: made[lazy.name], lambda path: Leaves(decoded, path), like.holding)
    return (batch, tensors.shapes_by_name()) if collate == "pad" else batch


def _common(request: Request) -> list[str]:
    """Return which of the first sample's tensors all samples have."""
    layouts = _layouts(request.places)[0]
    return [name for name in request.structure.tensors if all(name in layout.tensors for layout in layouts)]


class _Tensors:
    """Tensors by name, of all samples of a batch."""

    def __init__(self, request: Request, names: list[str]) -> None:
        self._request = request
        self._layouts, self._which = _layouts(request.places)
        self._names = {name: tensor for tensor, name in enumerate(names)}
        self._references: list[list[Reference]] = []  # [tensors][layouts], what `resolve` finds
        self.mapped = False  # whether the samples were gathered from maps
        self._host = self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._dest = np.zeros((0, len(self._which)), np.int64)

    def _first(self, layout: int) -> int:
        """Return which is the first sample with this layout."""
        return int(np.argmax(self._which == layout))

    def _key(self, layout: int) -> str:
        return self._request.key(self._first(layout))

    def resolve(self) -> None:
        """Find what the tensors are in each layout.

        Raises:
            BatchError: A sample does not have one, or has one of another kind or dtype.
        """
        texts = [self._texts(number, layout) for number, layout in enumerate(self._layouts)]
        for name in self._names:
            references: list[Reference] = []
            mine = self._request.structure.tensors[name]._reference
            for number, layout in enumerate(self._layouts):
                if name not in texts[number]:
                    raise BatchError(self._lacks(name, number))
                references.append(resolve(layout, texts[number][name]))
                found = references[-1]
                if (found.kind, found.dtype) != (mine.kind, mine.dtype):
                    raise BatchError(
                        f"tensor {name!r} is {mine.kind} of {mine.dtype} in sample {self._request.key(0)!r}, "
                        f"but {found.kind} of {found.dtype} in {self._key(number)!r}"
                    )
            self._references.append(references)
        wanted = self._request.wanted or (lambda name: True)
        first = self._layouts[self._which[0]].tensors.keys()
        for number, layout in enumerate(self._layouts):
            more = [name for name in layout.tensors.keys() - first if wanted(name)]
            if more:
                raise BatchError(
                    f"sample {self._key(number)!r} has tensor {min(more)!r}, but {self._request.key(0)!r} has not; "
                    "collate with a function"
                )

    def _texts(self, number: int, layout: Layout) -> dict[str, str]:
        """Return how the skeletons of a layout refer to its tensors, by name."""
        if layout.texts is not None:
            return dict(zip(layout.tensors, layout.texts, strict=True))
        structure = structure_of(self._request.sample(self._first(number)), None)
        references = [lazy._reference for lazy in structure.tensors.values()]
        return {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}

    def _lacks(self, name: str, number: int) -> str:
        lacks, has = self._key(number), self._request.key(0)
        return f"sample {lacks!r} has no tensor {name!r}, but {has!r} has; collate with a function"

    def check_equal(self) -> None:
        """Raise BatchError unless each tensor has one shape in all samples."""
        for name, references in zip(self._names, self._references, strict=True):
            for number, reference in enumerate(references):
                if reference.shape != references[0].shape:
                    raise BatchError(
                        f"tensor {name!r} is {list(references[0].shape)} in sample {self._key(0)!r}, but "
                        f"{list(reference.shape)} in {self._key(number)!r}; use collate='pad' or 'list'"
                    )

    def shapes_by_name(self) -> dict[str, torch.Tensor]:
        """Return each tensor's shape in each sample, int64 `[B, ndim]`."""
        which = self._which.tolist()
        return {
            name: torch.tensor([list(references[n].shape) for n in which], dtype=torch.int64, device="cpu")
            for name, references in zip(self._names, self._references, strict=True)
        }

    def read(self, pin: bool, device: Any) -> None:
        """Read every tensor; its rows follow each other."""
        count = len(self._which)
        shape = (len(self._names), len(self._layouts))
        begin, nbytes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._dest = np.zeros((shape[0], count), np.int64)
        bools = {}
        total = 0
        for name, tensor in self._names.items():
            stored = [layout.tensors[name] for layout in self._layouts]
            begin[tensor] = [one.begin for one in stored]
            nbytes[tensor] = [one.end - one.begin for one in stored]
            step = nbytes[tensor][self._which]
            self._dest[tensor] = total + np.cumsum(step) - step
            if any(one.dtype == "BOOL" for one in stored):
                bools[name] = slice(total, total + int(step.sum()))
            total += int(step.sum())
            total += -total % _ALIGN
        self._host, memory = take_memory(self._request.pool, total, pin, device)
        if total:
            request = self._request
            self.mapped = Plan(begin, nbytes, self._which, self._dest).read(
                request.places, memory, request.io, request.threads, request.executor
            )
        for name, extent in bools.items():
            try:
                check_array(memory[extent].view(np.bool_))
            except FormatError as exc:
                raise exc.at(f"tensor {name!r} of a batch with sample {self._key(0)!r}") from exc
        self._flat = move(self._host, device)

    def _view(self, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
        return view_batch(self._host, self._flat, reference, begin, shape)

    def stacked(self) -> dict[str, Any]:
        """Return each tensor as `[B, …]`."""
        count = len(self._which)
        return {
            name: self._view(references[0], self._dest.item(tensor, 0), (count, *references[0].shape))
            for (name, tensor), references in zip(self._names.items(), self._references, strict=True)
        }

    def listed(self) -> dict[str, Any]:
        """Return each tensor as a list of B."""
        return {
            name: [
                self._view(references[number], self._dest.item(tensor, i), references[number].shape)
                for i, number in enumerate(self._which.tolist())
            ]
            for (name, tensor), references in zip(self._names.items(), self._references, strict=True)
        }

    def fill_sample(self, sample: Any, i: int, pin: bool, device: Any) -> Any:
        """Return sample `i` with its tensors loaded."""

        def load(lazy: Lazy) -> Any:
            reference, tensor = lazy._reference, self._names.get(lazy.name)
            begin = self._dest.item(tensor, i) if tensor is not None else 1
            if begin % reference.dtype.itemsize == 0:  # not always where samples differ in a tensor's dtype
                return self._view(reference, begin, reference.shape)
            if reference.kind == "ndarray":
                return lazy.load()
            return move(lazy.load().pin_memory() if pin else lazy.load(), device)

        def leaf(path: Any) -> Any:
            value = sample
            for step in path:
                value = value[step]
            return value if type(value) in _BUILTIN else realize(value, device)

        return fill(sample, load, leaf)

    def padded(self, pin: bool, device: Any, value: float) -> dict[str, Any]:
        """Return each tensor as `[B, *largest]`, what is not there filled with `value`."""
        shapes: dict[str, tuple[int, ...]] = {}
        dest = [0]
        for name, references in zip(self._names, self._references, strict=True):
            for number, reference in enumerate(references):
                if len(reference.shape) != len(references[0].shape):
                    raise BatchError(
                        f"tensor {name!r} has {len(references[0].shape)} dimensions in sample {self._key(0)!r}, "
                        f"but {len(reference.shape)} in {self._key(number)!r}; use collate='list'"
                    )
            largest = (max(dims) for dims in zip(*(r.shape for r in references), strict=True))
            shapes[name] = (len(self._which), *largest)
            end = dest[-1] + nbytes_of(references[0], shapes[name])
            dest.append(end + -end % _ALIGN)
        self.read(False, None)
        rows = self._host.numpy()
        self._host, memory = take_memory(self._request.pool, dest[-1], pin, device)
        for (name, tensor), references in zip(self._names.items(), self._references, strict=True):
            reference, shape = references[0], shapes[name]
            is_ragged = any(one.shape != reference.shape for one in references)
            # as numpy sees them, in one thread: OpenMP's do not survive a fork
            dtype, filler = filler_of(reference, value if is_ragged else 0)
            out = memory[dest[tensor] : dest[tensor] + nbytes_of(reference, shape)].view(dtype).reshape(shape)
            if is_ragged:
                out[...] = filler
            for i, number in enumerate(self._which.tolist()):
                one = references[number]
                begin = self._dest.item(tensor, i)
                row = rows[begin : begin + one.end - one.begin].view(dtype).reshape(one.shape)
                place: Any = (i, *map(slice, one.shape))
                out[place] = row
        self._flat = move(self._host, device)
        return {
            name: self._view(references[0], dest[tensor], shapes[name])
            for (name, tensor), references in zip(self._names.items(), self._references, strict=True)
        }


def _layouts(places: Places) -> tuple[list[Layout], Array]:
    """Return the layouts that a batch has, and which of them each sample has."""
    layouts: dict[int, tuple[int, Layout]] = {}
    which = np.zeros(len(places), np.int64)
    for number, at in places.parts:
        rows = places.row[at]
        shard = places.shards[number]
        if len(shard.index.layouts) == 1:
            layout = shard.layout(0)
            which[at] = layouts.setdefault(id(layout), (len(layouts), layout))[0]
            continue
        kinds, first, inverse = np.unique(shard.columns.layout[rows], return_index=True, return_inverse=True)
        found = np.empty(len(kinds), np.int64)
        for kind, row in enumerate(rows[first].tolist()):
            layout = shard.layout(row)
            found[kind] = layouts.setdefault(id(layout), (len(layouts), layout))[0]
        which[at] = found[inverse]
    return [layout for _, layout in layouts.values()], which
