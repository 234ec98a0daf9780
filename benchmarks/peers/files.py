"""One file per sample: `.npz`, and `.safetensors` with the small values in its metadata. A thousand files to a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers.base import Peer, Reader, by_index
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


# of each format: how a file is opened, and how a tensor and the small values are read from it
_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any, str], torch.Tensor], Callable[[Any], str | bytes]]] = {
    "npz": (np.load, lambda file, name: torch.from_numpy(file[name]), lambda file: file["small"].tobytes()),
    "safetensors": (
        partial(safe_open, framework="pt"),
        lambda file, name: file.get_tensor(name),
        lambda file: file.metadata()["small"],
    ),
}


def _open(folder: Path, workload: Workload, *, suffix: str) -> Reader:
    paths = sorted(file.path for part in os.scandir(folder) for file in os.scandir(part.path))
    load, tensor_of, small_of = _FORMATS[suffix]

    def get(index: int) -> Any:
        with load(paths[index]) as file:
            tensors = {name: tensor_of(file, name) for name in workload.dtypes}
            return workload.nest(tensors, json.loads(small_of(file)))

    def one(index: int) -> torch.Tensor:
        with load(paths[index]) as file:
            return tensor_of(file, workload.one[0])

    return by_index(workload, len(paths), get, one=one)


def peers() -> list[Peer]:
    """Return a row for each format."""
    return [
        Peer(name=f"files .{suffix}", open=partial(_open, suffix=suffix), write=partial(_write, suffix=suffix))
        for suffix in _FORMATS
    ]
