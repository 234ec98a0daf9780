"""tensordict: one memory-mapped array per tensor, for all samples; rows of it are views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks.peers.base import Batch, Peer, Reader, by_sample, unstack
from benchmarks.workloads import Small, Tensors, Workload

__all__ = ["peers"]


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
    names = list(stored.keys())
    small_names = [name for name in names if name not in workload.dtypes]

    def nested(row: Any) -> Any:
        small = {name: _plain(row[name]) for name in small_names}
        tensors = {name: row[name] for name in workload.dtypes}
        for name, length in workload.ragged.items():
            tensors[name] = tensors[name][: small[length]]
        return workload.nest(tensors, small)

    def get(index: int) -> Any:
        return nested(stored[index])

    def samples() -> Iterator[Any]:
        return map(get, range(len(stored)))

    def batch(indices: Sequence[int]) -> Batch:
        rows = stored[torch.tensor(indices)]
        columns: Small = {name: rows[name] for name in small_names}
        tensors: Tensors = {name: rows[name] for name in workload.dtypes}
        return Batch(
            len(rows), lambda: unstack(workload, tensors, by_sample({name: _plain(columns[name]) for name in columns}))
        )

    def one(indices: Sequence[int]) -> torch.Tensor:
        return stored[workload.one[0]][torch.tensor(indices)]

    def loaders() -> dict[str, Any]:
        return {"rows": _Shuffled(stored, workload.batch_size)}

    return Reader(samples=samples, get=get, batch=batch, one=one, loaders=loaders)


class _Shuffled:
    """An epoch of batches in random order."""

    def __init__(self, stored: Any, batch_size: int) -> None:
        self._stored, self._batch_size = stored, batch_size

    def __iter__(self) -> Iterator[Any]:
        return (self._stored[numbers] for numbers in torch.randperm(len(self._stored)).split(self._batch_size))


def peers() -> list[Peer]:
    """Return tensordict's row."""
    return [Peer(name="tensordict", open=_open, write=_write, ragged="padded to the longest")]
