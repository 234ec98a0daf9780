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

from benchmarks.peers import Peer, Reader, as_arrays, by_index
from benchmarks.workloads import Workload

# of each format: how a file is opened, and how a tensor and the small values are read from it
_FORMATS: dict[str, tuple[Any, Any, Any]] = {
    "npz": (np.load, lambda file, name: torch.from_numpy(file[name]), lambda file: file["small"].tobytes()),
    "safetensors": (
        partial(safe_open, framework="pt"),
        lambda file, name: file.get_tensor(name),
        lambda file: file.metadata()["small"],
    ),
}


def _write(folder: Path, workload: Workload, samples: Sequence[Any], *, suffix: str) -> None:
    for index, sample in enumerate(samples):
        path = folder / f"{index // 1000:05d}" / f"{index:08d}.{suffix}"
        if index % 1000 == 0:
            path.parent.mkdir()
        tensors, small = workload.split(sample)
        if suffix == "npz":
            np.savez(path, small=np.frombuffer(json.dumps(small).encode(), np.uint8), **as_arrays(tensors))
        else:
            save_file(tensors, path, metadata={"small": json.dumps(small)})


def _open(folder: Path, workload: Workload, *, suffix: str) -> Reader:
    paths = sorted(file.path for part in os.scandir(folder) for file in os.scandir(part.path))
    load, tensor_of, small_of = _FORMATS[suffix]

    def get(index: int) -> Any:
        with load(paths[index]) as file:
            tensors = {name: tensor_of(file, name) for name in workload.names}
            return workload.nest(tensors, json.loads(small_of(file)))

    def one(index: int) -> torch.Tensor:
        with load(paths[index]) as file:
            return tensor_of(file, workload.one[0])

    return by_index(workload, len(paths), get, one=one)


PEERS = [Peer(f"files .{x}", partial(_open, suffix=x), partial(_write, suffix=x)) for x in _FORMATS]
