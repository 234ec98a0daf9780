"""One file per sample: `.npz`, and `.safetensors` with the small values in its metadata. A thousand files to a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers.base import AS_INTEGERS, Peer, Reader, as_array, as_tensor, collect
from benchmarks.peers.webdataset import decode_npz
from benchmarks.workloads import Workload


def _path(folder: Path, index: int, suffix: str) -> Path:
    return folder / f"{index // 1000:05d}" / f"{index:08d}.{suffix}"


def _write(folder: Path, workload: Workload, samples: Sequence[Any], *, suffix: str) -> None:
    for index, sample in enumerate(samples):
        path = _path(folder, index, suffix)
        if index % 1000 == 0:
            path.parent.mkdir()
        tensors, small = workload.split(sample)
        if suffix == "npz":
            encoded = np.frombuffer(json.dumps(small).encode(), np.uint8)
            np.savez(path, small=encoded, **{name: as_array(tensor) for name, tensor in tensors.items()})
        else:
            save_file(tensors, path, metadata={"small": json.dumps(small)})


def _listed(folder: Path) -> list[str]:
    return sorted(file.path for part in os.scandir(folder) for file in os.scandir(part.path))


def _reader(count: int, workload: Workload, get: Callable[[int], Any], one: Callable[[int], torch.Tensor]) -> Reader:
    def samples() -> Iterator[Any]:
        return map(get, range(count))

    def stacked(indices: Sequence[int]) -> torch.Tensor:
        return torch.stack([one(index) for index in indices])

    return Reader(samples=samples, get=get, batch=collect(workload, get), one=stacked)


def _open_npz(folder: Path, workload: Workload) -> Reader:
    paths = _listed(folder)

    def one(index: int) -> torch.Tensor:
        with np.load(paths[index]) as arrays:
            return as_tensor(arrays[workload.one[0]], workload.dtypes[workload.one[0]])

    return _reader(len(paths), workload, lambda index: decode_npz(workload, paths[index]), one)


def _open_safetensors(folder: Path, workload: Workload) -> Reader:
    paths = _listed(folder)

    def get(index: int) -> Any:
        with safe_open(paths[index], "pt") as file:
            small = json.loads(file.metadata()["small"])
            return workload.nest({name: file.get_tensor(name) for name in workload.dtypes}, small)

    def one(index: int) -> torch.Tensor:
        with safe_open(paths[index], "pt") as file:
            return file.get_tensor(workload.one[0])

    return _reader(len(paths), workload, get, one)


def peers() -> list[Peer]:
    """Return a row for each format."""
    return [
        Peer(name="files .npz", open=_open_npz, write=partial(_write, suffix="npz"), bf16=AS_INTEGERS),
        Peer(name="files .safetensors", open=_open_safetensors, write=partial(_write, suffix="safetensors")),
    ]
