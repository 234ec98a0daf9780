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
from benchmarks.workloads import Tensors, Workload

_BUFFERS = 3  # batches that are there at a time: one that is used, one that is read, one in between


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    parts = [workload.split(sample) for sample in samples]
    count = [len(parts)]
    like = {name: tensor.expand(*count, *tensor.shape) for name, tensor in parts[0][0].items()}
    stored = TensorDict(like, batch_size=count).memmap_like(folder / "tensors")
    for name in workload.dtypes:
        rows = stored[name]
        for row, (tensors, _) in enumerate(parts):
            rows[row] = tensors[name]
    small = {name: _column([values[name] for _, values in parts]) for name in parts[0][1]}
    TensorDict(small, batch_size=count).memmap(folder / "small")


def _column(values: list[Any]) -> Any:
    """Return numbers, and tuples of them, as a tensor; anything else as the objects that they are."""
    return NonTensorStack(*values) if isinstance(values[0], str) else torch.tensor(values)


def _open(folder: Path, workload: Workload) -> Reader:
    stored, values = TensorDict.load_memmap(folder / "tensors"), TensorDict.load_memmap(folder / "small")
    small_names = list(values.keys())
    stored.update(values)

    def parts(row: Any) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and the small values of a row, or of several."""
        small = {name: row[name] for name in small_names}
        plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in small.items()}
        return {name: row[name] for name in workload.dtypes}, plain

    def batch(indices: Sequence[int]) -> Batch:
        rows = stored[torch.tensor(indices)]
        columns = {name: rows[name] for name in (*small_names, *workload.dtypes)}
        return Batch(len(rows), lambda: _unstacked(workload, *parts(columns)))

    def get(index: int) -> Any:
        return workload.nest(*parts(stored[index]))

    return Reader(
        samples=lambda: map(get, range(len(stored))),
        get=get,
        batches=lambda batches: map(batch, batches),
        ones=lambda batches: (stored[workload.one[0]][torch.tensor(indices)] for indices in batches),
        loaders=lambda: {", rows": lambda: map(stored.__getitem__, _epoch(len(stored), workload))},
    )


def _epoch(count: int, workload: Workload) -> Sequence[torch.Tensor]:
    return torch.randperm(count).split(workload.batch_size)


def _unstacked(workload: Workload, tensors: Tensors, columns: dict[str, Any]) -> list[Any]:
    return unstack(workload, tensors, by_sample(columns))


def _open_tuned(folder: Path, workload: Workload, *, threads: int) -> Reader:
    """Open as plain tensors over the maps, and list the small values once.

    Memory: a batch is overwritten by the third one after it.
    """
    stored, small = TensorDict.load_memmap(folder / "tensors"), TensorDict.load_memmap(folder / "small")
    plain = {name: stored[name].as_subclass(torch.Tensor) for name in workload.dtypes}
    columns = {name: small[name].tolist() for name in list(small.keys())}
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
        return workload.nest({name: tensor[index] for name, tensor in plain.items()}, values)

    def batch(indices: Sequence[int]) -> Batch:
        tensors = gathered(plain, torch.tensor(indices))
        values = {name: [column[index] for index in indices] for name, column in columns.items()}
        return Batch(len(indices), lambda: _unstacked(workload, tensors, values))

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
    tuned = [
        Peer(name=name, open=partial(_open_tuned, threads=threads), store="tensordict")
        for name, threads in (("tensordict, tuned", 1), ("tensordict, tuned, 2 threads", 2))
    ]
    return [Peer(name="tensordict", open=_open, write=_write), *tuned]
