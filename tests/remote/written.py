"""Samples that a writer writes to a url, and comparisons with those of a local writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc


def sample(i: int) -> dict[str, Any]:
    """A small sample; small enough for one thread, because those of OpenMP hang in a forked child."""
    return {"x": torch.full((20 + 30 * (i % 3), 8), i).bfloat16(), "i": i, "text": "é" * i}


def write(out: str | Path, count: int = 23, begin: int = 0, **options: Any) -> tc.ShardWriter:
    """Write samples in shards of five; return the closed writer."""
    with tc.ShardWriter(out, **{"max_samples": 5, **options}) as sink:
        for i in range(begin, begin + count):
            sink.write(f"{i:03d}", sample(i), json={"i": i})
    return sink


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
