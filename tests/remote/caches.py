"""Caches for tests of remote reading: samples of every kind, written to local folders that a server serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reading.batches import write


def small(i: int) -> dict[str, Any]:
    """A sample whose tensors have every dtype that batches treat in its own way, and ragged and plain values."""
    torch_generator = torch.Generator().manual_seed(i)
    bits = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch_generator)
    return {
        "latent": torch.randn(2, 4, 4, generator=torch_generator).half(),
        "text": torch.randn(3 + i % 3, 4, generator=torch_generator).bfloat16(),
        "bits": {
            "float8": bits[:16].view(torch.float8_e4m3fn),
            "complex": bits[:16].view(torch.complex64),
            "bool": bits[:5] > 99,
            "int": bits[:16].view(torch.int64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(i),
        },
        "array": np.arange(4, dtype="u2") + i,
        "when": np.array([i], "M8[s]"),
        "prompt": f"photo {i}",
        "size": (i, 2),
    }


def big(i: int) -> dict[str, Any]:
    """A sample of 450 KB, with a tensor of 2.5 KB."""
    generator = torch.Generator().manual_seed(i)
    return {
        "latent": torch.randn(16, 70, 200, generator=generator).half(),
        "small": torch.randn(1250, generator=generator).half(),
        "prompt": f"photo {i}",
    }


def write_cache(folder: Path | str, samples: list[Any], **writer: Any) -> Path:
    """Write samples under the keys "000", "001", …, each with a member `json`; return the folder."""
    return Path(write(folder, samples, lambda i: {"json": {"label": i}}, **writer))


def listing(*urls: str, nbytes: int = 100_000, num_samples: int = 10, caches: bool = True) -> bytes:
    """The content of a manifest that lists shards, which need not exist."""
    shards = [{"url": url, "nsamples": num_samples, "filesize": nbytes} for url in urls]
    ours = {"caches": {url: {"": num_samples} for url in urls}} if caches else {}
    return json.dumps({"wids_version": 1, "shardlist": shards, "tensorcache": {"version": 1, **ours}}).encode()


def total_nbytes(folder: Path) -> int:
    """Bytes of all shards of a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.tar"))
