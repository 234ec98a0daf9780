"""tensordict: one memory-mapped array per tensor, for all samples; rows of it are views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks.peers import Batch, Peer, Reader, unstack
from benchmarks.workloads import Tensors, Workload

_BUFFERS = 3  # batches that are there at a time: one that is used, one that is read, one in between


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    parts = [workload.split(sample) for sample in samples]
    count = [len(parts)]
    like = {name: tensor.expand(*count, *tensor.shape) for name, tensor in parts[0][0].items()}
    stored = TensorDict(like, batch_size=count).memmap_like(folder / "tensors")
    for name in workload.names:
        rows = stored[name]
        for row, (tensors, _) in enumerate(parts):
            rows[row] = tensors[name]
    columns = {name: [values[name] for _, values in parts] for name in parts[0][1]}
    # numbers, and tuples of them, as a tensor
    small = {n: NonTensorStack(*c) if isinstance(c[0], str) else torch.tensor(c) for n, c in columns.items()}
    TensorDict(small, batch_size=count).memmap(folder / "small")


def _load(folder: Path) -> tuple[Any, Any]:
    return TensorDict.load_memmap(folder / "tensors"), TensorDict.load_memmap(folder / "small")


def _epoch(count: int, workload: Workload) -> Sequence[torch.Tensor]:
    return torch.randperm(count).split(workload.batch_size)


def _open(folder: Path, workload: Workload) -> Reader:
    stored, values = _load(folder)
    small_names = list(values.keys())
    stored.update(values)

    def parts(row: Any) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and the small values of a row, or of several."""
        small = {name: row[name] for name in small_names}
        plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in small.items()}
        return {name: row[name] for name in workload.names}, plain

    def batch(indices: Sequence[int]) -> Batch:
        rows = stored[torch.tensor(indices)]
        columns = {name: rows[name] for name in (*small_names, *workload.names)}
        return Batch(len(rows), lambda: unstack(workload, *parts(columns)))

    def get(index: int) -> Any:
        return workload.nest(*parts(stored[index]))

    return Reader(
        samples=lambda: map(get, range(len(stored))),
        get=get,
        batches=lambda batches: map(batch, batches),
        ones=lambda batches: (stored[workload.one[0]][torch.tensor(indices)] for indices in batches),
        loaders=lambda: {", rows": lambda: map(stored.__getitem__, _epoch(len(stored), workload))},
    )


def _open_tuned(folder: Path, workload: Workload, *, threads: int) -> Reader:
    """Open as plain tensors over the maps, and list the small values once.

    Memory: a batch is overwritten by the third one after it.
    """
    stored, small = _load(folder)
    plain = {name: stored[name].as_subclass(torch.Tensor) for name in workload.names}
    columns = {name: small[name].tolist() for name in list(small.keys())}
    shape = (_BUFFERS, workload.batch_size)
    buffers = {name: torch.empty(*shape, *rows.shape[1:], dtype=rows.dtype) for name, rows in plain.items()}
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
        return Batch(len(indices), lambda: unstack(workload, tensors, values))

    name, _ = workload.one
    operations: dict[str, Any] = {
        "batches": lambda batches: map(batch, batches),
        "loaders": lambda: {", rows": lambda: (gathered(plain, rows) for rows in _epoch(len(stored), workload))},
    }
    if threads == 1:  # torch has threads for batches alone
        operations |= {
            "samples": lambda: map(get, range(len(stored))),
            "get": get,
            "ones": lambda batches: (gathered([name], torch.tensor(indices))[name] for indices in batches),
        }
    return Reader(**operations)


PEERS = [
    Peer("tensordict", _open, _write),
    Peer("tensordict, tuned", partial(_open_tuned, threads=1), store="tensordict"),
    Peer("tensordict, tuned, 2 threads", partial(_open_tuned, threads=2), store="tensordict"),
]
