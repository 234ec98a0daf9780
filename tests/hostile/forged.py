"""Shards that lie: put together by hand, with a right digest where one is asked for, and read in every way there is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.shards.tars import build

COUNT = 4


def sample(i: int) -> dict[str, Any]:
    """Return a sample that differs from all other samples in every byte."""
    return {"x": torch.full((6,), i, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.bool), "i": i}


def is_right(value: Any, i: int) -> bool:
    value = tc.realize(value)
    return bool((value["x"] == i).all()) and value["x"].shape == (6,) and value["b"].all() and value["i"] == i


def write(path: Path, *, footer: bool = True, text: bool = False) -> Path:
    """Write a shard of samples k0, k1, …, each with a member `txt` if it is asked for."""
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False, footer=footer) as sink:
        for i in range(COUNT):
            sink.write(f"k{i}", sample(i), **({"txt": b"text %d" % i} if text else {}))
    return path


def header(entries: Any, content: bytes = b"ab", length: int | None = None) -> bytes:
    """Return a `.safetensors` member of any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def put(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar of these members."""
    path.write_bytes(build(list(members.items())))
    return path


def by_stream(path: Path, **options: Any) -> list[Any]:
    """Return the samples as a pipeline gives them, everything loaded."""
    pipeline = wds.DataPipeline(wds.SimpleShardList([str(path)]), tc.tarfile_to_samples(), tc.decode(**options))
    return [tc.realize(found) for found in pipeline]


def by_samples(path: Path) -> list[Any]:
    return [tc.realize(found) for found in tc.open(path)]


def _by_cache(read: Callable[[Any, range], Any]) -> Callable[[Path], Any]:
    def read_all(path: Path) -> Any:
        with tc.open(path) as cache:
            return read(cache, range(len(cache)))

    return read_all


READERS: dict[str, Callable[[Path], Any]] = {
    "samples": by_samples,
    "batch": _by_cache(lambda cache, rows: repr(cache.read_batch(rows, collate="list"))),
    "tensors": _by_cache(lambda cache, rows: cache.read_tensors(rows, collate="list")),
    "members": _by_cache(lambda cache, rows: [cache.read_members(rows, suffix) for suffix in cache.members]),
    "stream": by_stream,
    "index": lambda path: tc.write_index(path, dali_index=False),
}
