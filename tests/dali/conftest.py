"""Samples with every kind of tensor, and a cache of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reading.batches import write

COUNT = 20
DTYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu"
).split()
ARRAYS = "? u1 i2 u4 i8 f2 f4 f8 c8 c16 U4 S3 M8[ns] m8[s]".split()


def bits(i: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 256, nbytes, np.uint8)


@functools.cache
def sample(i: int) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = bits(i, 6 * dtype.itemsize)
        tensors[name] = torch.from_numpy(raw & 1 if name == "bool" else raw).view(dtype).view(2, 3)
    arrays: dict[str, Any] = {}
    for at, name in enumerate(ARRAYS):
        raw = bits(i, 4 * np.dtype(name).itemsize)
        arrays[str(at)] = np.full(4, f"é{i}", name) if name == "U4" else (raw & 1 if name == "?" else raw).view(name)
    ragged = torch.from_numpy(bits(i, 2 * 5 * (1 + i % 3))).view(torch.bfloat16).view(-1, 5)
    cond = [(ragged, {"prompt": f"photo {i}", "size": (i, 2)})]
    return {"tensors": tensors, "arrays": arrays, "cond": cond, "id": i, "scalar": torch.tensor(i)}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dali")
    write(path / "%d.tar", [sample(i) for i in range(COUNT)], lambda i: {"bin": b"member %d" % i}, max_samples=7)
    return path
