"""Batches as they must be, computed from the samples that were written, and shards to read batches from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same

COUNT = 23


def nested(i: int, width: int = 8) -> dict[str, Any]:
    return {
        "x": torch.full((width,), float(i)),
        "cond": [(torch.full((2, width), i, dtype=torch.int16), {"prompt": f"p{i}", "size": (i, 2)}), 3],
        "a": np.full((3,), f"é{i}", "U4"),
        "id": i,
    }


SMALL = [nested(i) for i in range(COUNT)]
LARGE = [nested(i, 8000) for i in range(COUNT)]


def write(path: Path | str, samples: list[Any] | dict[str, Any], members: Any = lambda i: {}, **writer: Any) -> str:
    """Write samples into a folder or a tar, under the keys "000", "001", … or those of a dict; return the path.

    `members` returns the other members of the sample with a number.
    """
    named = samples if isinstance(samples, dict) else {f"{i:03d}": sample for i, sample in enumerate(samples)}
    options = {"fsync": False} if str(path).endswith(".tar") else {"fsync": False, "max_samples": 5}
    pattern = path if str(path).endswith(".tar") else f"{path}/%03d.tar"
    with tc.ShardWriter(pattern, **options | writer) as sink:
        for i, (key, sample) in enumerate(named.items()):
            sink.write(key, sample, **members(i))
    return str(path)


def folder_of(samples: list[Any] | dict[str, Any], **options: Any) -> Any:
    """Return a fixture of a module: a folder of these samples, which is written once."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
        return write(tmp_path_factory.mktemp("folder"), samples, **options)

    return folder


def assert_all_same(left: list[Any], right: list[Any]) -> None:
    """Assert that two lists hold the same samples, whatever samples share among them."""
    for sample, read in zip(left, right, strict=True):
        assert_same(sample, read)


def assert_batch(samples: list[Any], batch: Any, collate: str = "stack", path: str = "$") -> None:
    """Assert that `batch` is the batch of `samples`, bit for bit."""
    first = samples[0]
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if collate != "stack":
            assert len(batch) == len(samples), path
            for i, (expected, row) in enumerate(zip(samples, batch, strict=True)):
                assert_same(expected, row, path=f"{path}, sample {i}")
        elif isinstance(first, np.ndarray):
            assert_same(np.stack(samples), batch, path=path)
        else:  # torch cannot stack every dtype
            bits = [s.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for s in samples]
            stacked = torch.stack(bits).reshape(-1).view(first.dtype).view(len(samples), *first.shape)
            assert_same(stacked, batch, path=path)
            assert batch.device.type == "cpu"
    elif isinstance(first, dict):
        assert type(batch) is dict, path
        assert list(batch) == list(first), path
        for key in first:
            assert_batch([sample[key] for sample in samples], batch[key], collate, f"{path}[{key!r}]")
    elif isinstance(first, (list, tuple)) and _holds_tensor(first):
        assert type(batch) is type(first), path
        assert len(batch) == len(first), path
        for i in range(len(first)):
            assert_batch([sample[i] for sample in samples], batch[i], collate, f"{path}[{i}]")
    else:
        assert type(batch).__name__ == "Leaves", path
        assert len(batch) == len(samples), path
        assert repr(batch) == repr(samples), path


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_holds_tensor, parts))


def damage(path: str, at: int, content: bytes) -> bytes:
    """Put bytes into an open shard as a disk may, without the time of a change; return what was there."""
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(len(content))
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return before
