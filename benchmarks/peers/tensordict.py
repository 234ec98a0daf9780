"""tensordict: one memory-mapped array per tensor, for all samples; rows of it are views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks.peers.base import Batch, Peer, Reader, by_sample, unstack
from benchmarks.workloads import Small, Tensors, Workload

_BUFFERS = 3  # batches that are there at a time: one that is used, one that is read, one in between


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    parts = [workload.split(sample) for sample in samples]
    count = [len(parts)]
    shapes = {name: _longest([tensors[name].shape for tensors, _ in parts]) for name in workload.dtypes}
    like = {name: torch.empty(1, dtype=dtype).expand(*count, *shapes[name]) for name, dtype in workload.dtypes.items()}
    stored = TensorDict(like, batch_size=count).memmap_like(folder / "tensors")
    for name in workload.dtypes:
        rows = stored[name]
        for row, (tensors, _) in enumerate(parts):
            rows[row][: len(tensors[name])] = tensors[name]
    small = {name: _column([values[name] for _, values in parts]) for name in parts[0][1]}
    TensorDict(small, batch_size=count).memmap(folder / "small")


def _column(values: list[Any]) -> Any:
    """Numbers, and tuples of them, as a tensor; anything else as the objects that they are."""
    return NonTensorStack(*values) if isinstance(values[0], str) else torch.tensor(values)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _longest(shapes: list[torch.Size]) -> list[int]:
    return [max(sizes) for sizes in zip(*shapes, strict=True)]


def _open(folder: Path, workload: Workload) -> Reader:
    stored = TensorDict.load_memmap(folder / "tensors")
    stored.update(TensorDict.load_memmap(folder / "small"))
    small_names = [name for name in stored.keys() if name not in workload.dtypes]  # noqa: SIM118

    def get(index: int) -> Any:
        row = stored[index]
        small = {name: _plain(row[name]) for name in small_names}
        return workload.nest(_cut(workload, {name: row[name] for name in workload.dtypes}, small), small)

    def batch(indices: Sequence[int]) -> Batch:
        rows = stored[torch.tensor(indices)]
        columns: Small = {name: rows[name] for name in small_names}
        tensors: Tensors = {name: rows[name] for name in workload.dtypes}
        return Batch(
            len(rows), lambda: unstack(workload, tensors, by_sample({name: _plain(columns[name]) for name in columns}))
        )

    return Reader(
        samples=lambda: map(get, range(len(stored))),
        get=get,
        batches=lambda batches: map(batch, batches),
        ones=lambda batches: (stored[workload.one[0]][torch.tensor(indices)] for indices in batches),
        loaders=lambda: {", rows": lambda: map(stored.__getitem__, _epoch(len(stored), workload))},
    )


def _epoch(count: int, workload: Workload) -> Sequence[torch.Tensor]:
    return torch.randperm(count).split(workload.batch_size)


def _cut(workload: Workload, tensors: Tensors, small: Small) -> Tensors:
    return {name: tensor[: small.get(workload.ragged.get(name))] for name, tensor in tensors.items()}


def _open_tuned(folder: Path, workload: Workload, *, threads: int) -> Reader:
    """Open as plain tensors over the maps, and list the small values once.

    Memory: a batch is overwritten by the third one after it.
    """
    stored, small = TensorDict.load_memmap(folder / "tensors"), TensorDict.load_memmap(folder / "small")
    plain = {name: stored[name].as_subclass(torch.Tensor) for name in workload.dtypes}
    columns: Small = {name: small[name].tolist() for name in list(small.keys())}
    buffers = {
        name: torch.empty(_BUFFERS, workload.batch_size, *t.shape[1:], dtype=t.dtype) for name, t in plain.items()
    }
    turn = cycle(range(_BUFFERS))

    def gathered(names: Iterable[str], indices: torch.Tensor) -> Tensors:
        slot = next(turn)
        torch.set_num_threads(threads)  # 0.2 us
        tensors = {}
        for name in names:
            tensors[name] = buffers[name][slot, : len(indices)]
            torch.index_select(plain[name], 0, indices, out=tensors[name])
        torch.set_num_threads(1)
        return tensors

    def get(index: int) -> Any:
        values = {name: column[index] for name, column in columns.items()}
        return workload.nest(_cut(workload, {name: tensor[index] for name, tensor in plain.items()}, values), values)

    def batch(indices: Sequence[int]) -> Batch:
        tensors = gathered(plain, torch.tensor(indices))
        values = {name: [column[index] for index in indices] for name, column in columns.items()}
        return Batch(len(indices), lambda: unstack(workload, tensors, by_sample(values)))

    def one(indices: Sequence[int]) -> torch.Tensor:
        name, _ = workload.one
        read: torch.Tensor = gathered([name], torch.tensor(indices))[name]
        return read

    def epoch() -> Iterator[Tensors]:
        return (gathered(plain, indices) for indices in _epoch(len(stored), workload))

    reader = Reader(batches=lambda batches: map(batch, batches), loaders=lambda: {", rows": epoch})
    if threads > 1:  # torch has threads for batches alone
        return reader
    return replace(
        reader, samples=lambda: map(get, range(len(stored))), get=get, ones=lambda batches: map(one, batches)
    )


def peers() -> list[Peer]:
    """Return tensordict's rows: one that indexes a TensorDict, two that are tuned for random access."""
    padded = "padded to the longest"
    tuned = [
        Peer(name=name, open=partial(_open_tuned, threads=threads), store="tensordict", ragged=padded)
        for name, threads in (("tensordict, tuned", 1), ("tensordict, tuned, 2 threads", 2))
    ]
    return [Peer(name="tensordict", open=_open, write=_write, ragged=padded), *tuned]
