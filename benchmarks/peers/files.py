"""One file per sample: `.npz`, and `.safetensors` with the small values in its metadata. A thousand files to a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers.base import Peer, Reader, as_tensors, by_index
from benchmarks.workloads import Workload


def _write(folder: Path, workload: Workload, samples: Sequence[Any], *, suffix: str) -> None:
    for index, sample in enumerate(samples):
        path = folder / f"{index // 1000:05d}" / f"{index:08d}.{suffix}"
        if index % 1000 == 0:
            path.parent.mkdir()
        tensors, small = workload.split(sample)
        if suffix == "npz":
            encoded = np.frombuffer(json.dumps(small).encode(), np.uint8)
            np.savez(path, small=encoded, **{name: tensor.numpy() for name, tensor in tensors.items()})
        else:
            save_file(tensors, path, metadata={"small": json.dumps(small)})


def _listed(folder: Path) -> list[str]:
    return sorted(file.path for part in os.scandir(folder) for file in os.scandir(part.path))


def _open_npz(folder: Path, workload: Workload) -> Reader:
    paths, (name, _) = _listed(folder), workload.one

    def get(index: int) -> Any:
        with np.load(paths[index]) as arrays:
            tensors = as_tensors({name: arrays[name] for name in workload.dtypes})
            return workload.nest(tensors, json.loads(arrays["small"].tobytes()))

    def one(index: int) -> torch.Tensor:
        with np.load(paths[index]) as arrays:
            return torch.from_numpy(arrays[name])

    return by_index(workload, len(paths), get, one=one)


def _open_safetensors(folder: Path, workload: Workload) -> Reader:
    paths, (name, _) = _listed(folder), workload.one

    def get(index: int) -> Any:
        with safe_open(paths[index], "pt") as file:
            small = json.loads(file.metadata()["small"])
            return workload.nest({name: file.get_tensor(name) for name in workload.dtypes}, small)

    def one(index: int) -> torch.Tensor:
        with safe_open(paths[index], "pt") as file:
            return file.get_tensor(name)

    return by_index(workload, len(paths), get, one=one)


def peers() -> list[Peer]:
    """Return a row for each format."""
    return [
        Peer(name="files .npz", open=_open_npz, write=partial(_write, suffix="npz")),
        Peer(name="files .safetensors", open=_open_safetensors, write=partial(_write, suffix="safetensors")),
    ]
