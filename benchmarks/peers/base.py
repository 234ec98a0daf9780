"""The definition of a peer: a name, how its users write samples, and how they read an open store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Small, Tensors, Workload

AS_INTEGERS = "as two-byte integers"  # what users of formats without bf16 do to keep its size


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
    batch: Callable[[Sequence[int]], Batch] | None = None
    batches: Callable[[int], Iterator[Batch]] | None = None  # so many samples of a stream, shuffled as its users do
    one: Callable[[Sequence[int]], torch.Tensor] | None = None  # Workload.one of some samples, stacked
    ones: Callable[[int], Iterator[torch.Tensor]] | None = None  # of so many samples of a stream, in order
    touch: Callable[[Any], None] | None = None  # instead of Workload.touch, where samples come as bytes
    decode: Callable[[Any], Any] = lambda sample: sample  # for the check, where samples come as bytes
    loaders: Callable[[], dict[str, Iterable[Any]]] = (
        dict  # what its users train from, by number of workers: see `in_rows`
    )
    rewind: Callable[[], None] = lambda: None  # before each pass over a stream, not timed
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the tables."""

    name: str
    open: Callable[[Path, Workload], Reader]
    write: Callable[[Path, Workload, Sequence[Any]], None] | None = None  # into a new folder
    write_synced: Callable[[Path, Workload, Sequence[Any]], None] | None = None  # where it can fsync by itself
    store: str | None = None  # the peer whose store this one reads; its own by default
    bf16: str | None = None  # what its users do to bf16, if it has none
    ragged: str | None = None  # and to shapes that vary


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; bf16, which numpy lacks, as two-byte integers. Memory: the tensor's."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that `as_array` converted. Memory: the array's."""
    return torch.from_numpy(array).view(dtype)


def stack(workload: Workload, samples: Sequence[Any]) -> Batch:
    """Return the batch of some samples: tensors stacked, ragged tensors padded, small values in lists."""
    parts = [workload.split(sample) for sample in samples]
    tensors: Tensors = {}
    for name in workload.dtypes:
        rows = [tensors_of_one[name] for tensors_of_one, _ in parts]
        if name in workload.ragged:
            tensors[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        else:
            tensors[name] = torch.stack(rows)
    return Batch(len(samples), lambda: unstack(workload, tensors, [small for _, small in parts]))


def unstack(workload: Workload, tensors: Tensors, small: Iterable[Small]) -> list[Any]:
    """Return the samples of a stacked and padded batch."""
    samples = []
    for row, values in enumerate(small):
        cut = {name: values[length] for name, length in workload.ragged.items()}
        parts = {name: tensor[row][: cut.get(name)] for name, tensor in tensors.items()}
        samples.append(workload.nest(parts, values))
    return samples


def by_sample(columns: Small) -> list[Small]:
    """Return the small values of each sample in a batch of list-likes."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def collect(workload: Workload, get: Callable[[int], Any]) -> Callable[[Sequence[int]], Batch]:
    """Return `Reader.batch` for a peer that reads single samples."""
    return lambda indices: stack(workload, [get(index) for index in indices])


def in_batches(workload: Workload, samples: Iterable[Any], count: int) -> Iterator[Batch]:
    """Yield the first `count` samples of a shuffled stream, in batches."""
    stream = iter(samples)
    for _ in range(count // workload.batch_size):
        yield stack(workload, list(islice(stream, workload.batch_size)))


def one_in_batches(workload: Workload, samples: Iterable[Any], count: int) -> Iterator[torch.Tensor]:
    """Yield one tensor of the first `count` samples of a stream, stacked in batches, for `Reader.ones`."""
    name, _ = workload.one
    selected = (workload.split(sample)[0][name] for sample in samples)
    for _ in range(count // workload.batch_size):
        yield torch.stack(list(islice(selected, workload.batch_size)))


def collect_one(workload: Workload, get: Callable[[int], Any]) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return `Reader.one` for a peer that reads whole samples alone."""
    name, _ = workload.one
    return lambda indices: torch.stack([workload.split(get(index))[0][name] for index in indices])
