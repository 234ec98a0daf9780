"""Headers of `.safetensors` files: damage is an error that names the file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from wds_tensorcache.importers.import_cache import import_cache

HEADERS = [
    b"",
    b"\0" * 8,
    struct.pack("<Q", 1 << 62) + b"{}",
    struct.pack("<Q", 90_000_000) + b"{}",
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 26) + b'{"__metadata__":{"a":1}}  ',
    struct.pack("<Q", 34) + b'{"__metadata__":{"a":"\\ud800"}}    ',
    safetensors.torch.save({"x": torch.zeros(9)})[:-1],
]


@pytest.mark.parametrize("content", HEADERS)
@pytest.mark.parametrize(
    ("format", "name"), [("files", "a.safetensors"), ("lightningdit", "latents_rank00_shard000.safetensors")]
)
def test_damaged_headers(tmp_path: Path, content: bytes, format: str, name: str) -> None:
    """Of whole files, and of files that are read in parts."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(tc.FormatError, match=name):
        import_cache(tmp_path / "in", tmp_path / "out", format=format)
