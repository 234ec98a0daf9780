"""The peers, one file each with `PEERS`: a name, how its users write samples, and how they read an open store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import Small, Tensors, Workload

NAME = "tensorcache"
PYD = "webdataset .pyd"

MODULES = ("ours", "webdataset", "files", "litdata", "mds", "tensordict", "array_record", "dali", "datasets")

SHUFFLED = 8  # batches in the buffer that shuffles a stream
Batches = Sequence[Sequence[int]]  # the sample indices of each batch


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, and its samples one by one for the untimed check."""

    count: int
    samples: Callable[[], list[Any]]


@dataclass(frozen=True, slots=True)
class Reader:
    """One open store. Operations that the peer lacks are None; all other operations are measured."""

    samples: Callable[[], Iterator[Any]] | None = None  # in the order in which they were written
    get: Callable[[int], Any] | None = None
    batches: Callable[[Batches], Iterator[Batch]] | None = None
    ones: Callable[[Batches], Iterator[torch.Tensor]] | None = None  # Workload.one of the samples, stacked
    is_stream: bool = False  # `batches` are as many samples shuffled as its users do, `ones` those in order
    loaders: Callable[[], dict[str, Callable[[], Iterable[Tensors]]]] | None = None  # epochs, by the row's ending
    rewind: Callable[[], None] = lambda: None  # before each pass over a stream, not timed
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the tables."""

    name: str
    open: Callable[[Path, Workload], Reader] = lambda *_: Reader()
    write: Callable[[Path, Workload, Sequence[Any]], None] | None = None  # into a new folder
    write_synced: Callable[[Path, Workload, Sequence[Any]], None] | None = None  # where it can fsync by itself
    # yields one tensor of each sample, with its index, in any order; gets the url of the folder of all stores, this peer's
    # store, and an empty folder for its cache
    over_http: Callable[[str, Path, Path, Workload], Iterator[tuple[int, torch.Tensor]]] | None = None
    store: str | None = None  # the peer whose store this one reads; its own by default


def by_index(
    workload: Workload,
    count: int,
    get: Callable[[int], Any],
    *,
    several: Callable[[Sequence[int]], list[Any]] | None = None,
    one: Callable[[int], torch.Tensor] | None = None,
    **operations: Any,
) -> Reader:
    """Return the reader of a store that reads single samples, and stacks them."""
    read = several or (lambda indices: [get(index) for index in indices])

    def stacked(indices: Sequence[int]) -> torch.Tensor:
        return torch.stack(list(map(one, indices)) if one else [_one(workload, sample) for sample in read(indices)])

    operations = {"samples": lambda: map(get, range(count)), "ones": lambda batches: map(stacked, batches)} | operations
    return Reader(get=get, batches=lambda batches: (stack(workload, read(batch)) for batch in batches), **operations)


def by_stream(
    workload: Workload, samples: Callable[[], Iterator[Any]], shuffled: Callable[[], Iterable[Any]], **operations: Any
) -> Reader:
    """Return the reader of a stream, which shuffles in its own way, and stacks the samples in batches."""

    def batches(sizes: Batches) -> Iterator[Batch]:
        stream = iter(shuffled())
        return (stack(workload, list(islice(stream, len(batch)))) for batch in sizes)

    def ones(sizes: Batches) -> Iterator[torch.Tensor]:
        stream = (_one(workload, sample) for sample in samples())
        return (torch.stack(list(islice(stream, len(batch)))) for batch in sizes)

    return Reader(samples=samples, batches=batches, ones=ones, is_stream=True, **operations)


def _one(workload: Workload, sample: Any) -> torch.Tensor:
    return workload.split(sample)[0][workload.one[0]]


def as_tensors(arrays: Mapping[str, Any]) -> Tensors:
    """Return tensors that share the arrays' memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_arrays(tensors: Tensors) -> dict[str, Any]:
    """Return arrays that share the tensors' memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def stack(workload: Workload, samples: Sequence[Any]) -> Batch:
    """Return a batch of samples: tensors stacked, small values in lists."""
    parts = [workload.split(sample) for sample in samples]
    tensors = {name: torch.stack([row[name] for row, _ in parts]) for name in workload.names}

    def unstacked() -> list[Any]:
        return unstack(workload, tensors, {name: [small[name] for _, small in parts] for name in parts[0][1]})

    return Batch(len(samples), unstacked)


def unstack(workload: Workload, tensors: Tensors, columns: Small) -> list[Any]:
    """Return the samples of a batch with small values in list-likes; ragged tensors are cut to their lengths."""
    samples = []
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        small = dict(zip(columns, values, strict=True))
        cut = {name: small[length] for name, length in workload.ragged.items()}
        samples.append(workload.nest({name: tensor[row][: cut.get(name)] for name, tensor in tensors.items()}, small))
    return samples


def load(modules: list[str]) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers of some modules, and the import error of each missing module, which is never dropped silently."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for name in modules:
        try:
            peers += import_module(f"benchmarks.peers.{name}").PEERS
        except Exception as error:  # a package that is there but broken raises anything
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return peers, missing
