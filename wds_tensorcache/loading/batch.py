"""Read many samples at once: each tensor of all samples into one array, all arrays of a batch into one arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.header import Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.template import Template
from wds_tensorcache.codec.views import check_array, check_tensor
from wds_tensorcache.errors import BatchError
from wds_tensorcache.loading.collate import fill
from wds_tensorcache.loading.leaves import Decoded, Leaves
from wds_tensorcache.loading.plan import Places, Plan
from wds_tensorcache.shards.arena import Pool

__all__ = ["Request", "Structure", "read_batch", "structure_of"]

Array = np.ndarray[Any, Any]
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Structure:
    """A sample, for its containers and keys; and its lazy tensors by name."""

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None


def structure_of(sample: Any, template: Template | None) -> Structure:
    """Return what a batch looks like whose first sample is `sample`, of that template if it is of one."""
    tensors: dict[str, Lazy] = {}
    fill(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None)
    return Structure(sample, tensors, template)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be read, and by what means.

    Attributes:
        places: Where the samples lie.
        structure: Of the first sample.
        sample: Returns sample `i` of the batch, lazy.
        key: Returns its key.
        pool, io, threads, executor: Whose memory, and how files are read.
    """

    places: Places
    structure: Structure
    sample: Callable[[int], Any]
    key: Callable[[int], str]
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
    tensors = _Tensors(request)
    if callable(collate):
        tensors.read(pin, device)
        return collate([tensors.fill_sample(request.sample(i), i) for i in range(len(request.places))])
    if collate == "stack":
        tensors.check_equal()
        tensors.read(pin, device)
        made = tensors.stacked()
    elif collate == "list":
        tensors.read(pin, device)
        made = tensors.listed()
    else:
        made = tensors.padded(pin, device, pad_value)
    decoded = Decoded(request.places, request.structure.template, tensors.mapped, request.sample, request.key)
    batch = fill(request.structure.sample, lambda lazy: made[lazy.name], lambda path: Leaves(decoded, path))
    return (batch, tensors.shapes_by_name()) if collate == "pad" else batch


class _Tensors:
    """The tensors that the first sample of a batch has, of all its samples."""

    def __init__(self, request: Request) -> None:
        self._request = request
        places = request.places
        self._layouts, self._which = _layouts(places)
        self._references: dict[str, list[Reference]] = {
            name: [self._resolve(lazy, number) for number in range(len(self._layouts))]
            for name, lazy in request.structure.tensors.items()
        }
        self.mapped = False  # whether the samples were gathered from maps
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._dest = np.zeros((0, len(places)), np.int64)

    def _key(self, layout: int) -> str:
        """Return the key of the first sample with this layout."""
        return self._request.key(int(np.argmax(self._which == layout)))

    def _resolve(self, lazy: Lazy, number: int) -> Reference:
        mine = lazy._reference
        layout = self._layouts[number]
        if mine.name not in layout.tensors:
            raise BatchError(
                f"sample {self._key(number)!r} has no tensor {mine.name!r}, but {self._request.key(0)!r} has"
            )
        text = f"{mine.kind}:{mine.name}" + (f"?dtype={mine.attribute}" if mine.attribute else "")
        found = resolve(layout, text)
        if found.dtype != mine.dtype:
            raise BatchError(
                f"tensor {mine.name!r} is {mine.dtype} in sample {self._request.key(0)!r}, "
                f"but {found.dtype} in {self._key(number)!r}"
            )
        return found

    def check_equal(self) -> None:
        """Raise BatchError unless each tensor has one shape in all samples."""
        for name, references in self._references.items():
            for number, reference in enumerate(references):
                if reference.shape != references[0].shape:
                    raise BatchError(
                        f"tensor {name!r} is {list(references[0].shape)} in sample {self._key(0)!r}, but "
                        f"{list(reference.shape)} in {self._key(number)!r}; use collate='pad' or 'list'"
                    )

    def shapes_by_name(self) -> dict[str, torch.Tensor]:
        """Return each tensor's shape in each sample, int64 `[B, ndim]`."""
        return {
            name: torch.tensor([list(references[number].shape) for number in self._which.tolist()])
            for name, references in self._references.items()
        }

    def _size(self, references: list[Reference]) -> Array:
        return np.array([reference.end - reference.begin for reference in references], np.int64)

    def read(self, pin: bool, device: Any) -> None:
        """Read every tensor; its rows follow each other."""
        count = len(self._which)
        shape = (len(self._references), len(self._layouts))
        begin, nbytes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._dest = np.zeros((shape[0], count), np.int64)
        total = 0
        for tensor, references in enumerate(self._references.values()):
            begin[tensor] = [reference.begin for reference in references]
            nbytes[tensor] = self._size(references)
            step = nbytes[tensor][self._which]
            self._dest[tensor] = total + np.cumsum(step) - step
            total += int(step.sum())
            total += -total % _ALIGN
        request = self._request
        if pin or (device is not None and torch.device(device).type == "cuda"):
            self._flat = torch.empty(total, dtype=torch.uint8, pin_memory=True)  # torch's own pool knows of transfers
            memory = self._flat.numpy()
        else:
            memory = request.pool.lease(total)
            self._flat = torch.frombuffer(memory, dtype=torch.uint8) if total else self._flat
        if total:
            self.mapped = Plan(begin, nbytes, self._which, self._dest).read(
                request.places, memory, request.io, request.threads, request.executor
            )
        for tensor, references in enumerate(self._references.values()):
            if references[0].dtype is torch.bool:
                check_tensor(self._flat[self._slice(tensor, count)].view(torch.bool))
        self._host = self._flat
        self._flat = _moved(self._flat, device)

    def _slice(self, tensor: int, count: int) -> slice:
        references = list(self._references.values())[tensor]
        last = references[self._which[-1]]
        return slice(int(self._dest[tensor, 0]), int(self._dest[tensor, count - 1]) + last.end - last.begin)

    def _view(self, reference: Reference, begin: int, shape: tuple[int, ...]) -> Any:
        """Return what lies at `begin` of the memory; arrays stay in host memory."""
        nbytes = _nbytes(reference, shape)
        if reference.kind == "tensor":
            if not nbytes:
                return torch.empty(0, dtype=torch.uint8, device=self._flat.device).view(reference.dtype).view(shape)
            return self._flat[begin : begin + nbytes].view(reference.dtype).view(shape)
        if not nbytes:
            return np.empty(shape, reference.dtype)
        # of the slice, whose base is a tensor: numpy then keeps the memory leased
        return check_array(self._host[begin : begin + nbytes].numpy().view(reference.dtype).reshape(shape))

    def stacked(self) -> dict[str, Any]:
        count = len(self._which)
        return {
            name: self._view(references[0], self._dest.item(tensor, 0), (count, *references[0].shape))
            for tensor, (name, references) in enumerate(self._references.items())
        }

    def listed(self) -> dict[str, Any]:
        count = len(self._which)
        return {name: [self._row(tensor, i) for i in range(count)] for tensor, name in enumerate(self._references)}

    def _row(self, tensor: int, i: int) -> Any:
        reference = list(self._references.values())[tensor][self._which[i]]
        return self._view(reference, self._dest.item(tensor, i), reference.shape)

    def fill_sample(self, sample: Any, i: int) -> Any:
        """Return sample `i` with its tensors loaded."""
        positions = {name: tensor for tensor, name in enumerate(self._references)}

        def load(lazy: Lazy) -> Any:
            return self._row(positions[lazy.name], i) if lazy.name in positions else lazy.load()

        def leaf(path: Any) -> Any:
            value = sample
            for step in path:
                value = value[step]
            return value

        return fill(sample, load, leaf)

    def padded(self, pin: bool, device: Any, value: float) -> dict[str, Any]:
        """Return each tensor as `[B, *largest]`, what is not there filled with `value`."""
        self.read(pin, None)
        result = {}
        for tensor, (name, references) in enumerate(self._references.items()):
            ndims = {len(reference.shape) for reference in references}
            if len(ndims) > 1:
                other = next(n for n, r in enumerate(references) if len(r.shape) != len(references[0].shape))
                raise BatchError(
                    f"tensor {name!r} has {len(references[0].shape)} dimensions in sample {self._key(0)!r}, "
                    f"but {len(references[other].shape)} in {self._key(other)!r}; use collate='list'"
                )
            shape = (len(self._which), *(max(dims) for dims in zip(*(r.shape for r in references), strict=True)))
            reference = references[0]
            if reference.kind == "tensor":
                out: Any = torch.empty(0, dtype=torch.uint8)
                raw = self._request.pool.lease(_nbytes(reference, shape))
                if len(raw):
                    out = torch.frombuffer(raw, dtype=torch.uint8)
                out = out.view(reference.dtype).view(shape)
                out.fill_(value)
            else:
                out = np.full(shape, value).astype(reference.dtype)
            for i, number in enumerate(self._which.tolist()):
                place = (i, *(slice(size) for size in references[number].shape))
                out[place] = self._row(tensor, i)
            if reference.kind == "tensor":
                out = _moved(out.pin_memory() if pin else out, device)
            result[name] = out
        return result


def _layouts(places: Places) -> tuple[list[Layout], Array]:
    """Return the layouts that a batch has, and which of them each sample has."""
    layouts: dict[int, tuple[int, Layout]] = {}
    which = np.zeros(len(places), np.int64)
    numbers = places.numbers()
    for number in numbers:
        at = slice(None) if len(numbers) == 1 else np.flatnonzero(places.number == number)
        rows = places.row[at]
        shard = places.shards[number]
        if len(shard.index.layouts) == 1:
            layout = shard.layout(0)
            which[at] = layouts.setdefault(id(layout), (len(layouts), layout))[0]
            continue
        kinds, first, inverse = np.unique(
            places.shards[number].columns.layout[rows], return_index=True, return_inverse=True
        )
        found = np.empty(len(kinds), np.int64)
        for kind, row in enumerate(rows[first].tolist()):
            layout = places.shards[number].layout(row)
            found[kind] = layouts.setdefault(id(layout), (len(layouts), layout))[0]
        which[at] = found[inverse]
    return [layout for _, layout in layouts.values()], which


def _nbytes(reference: Reference, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(reference.dtype.itemsize)


_STREAMS: dict[torch.device, Any] = {}


def _moved(host: torch.Tensor, device: Any) -> torch.Tensor:
    """Return `host` on `device`: to a GPU by one transfer on a stream of its own, which the caller's stream waits for."""
    if device is None:
        return host
    device = torch.device(device)
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        # torch keeps a pinned source until the transfer is over; a pageable one is copied before this returns
        moved = host.to(device, non_blocking=True)
    current.wait_stream(stream)
    moved.record_stream(current)  # its memory came from the other stream's pool: do not reuse it under the caller
    return moved
