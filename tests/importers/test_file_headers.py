"""The names in `.npz` and `.safetensors` files are listed without reading the arrays; damaged files raise FormatError."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from wds_tensorcache.importers.safe_files import list_npz, read_safetensors_header
from wds_tensorcache.importers.source_folder import SourceFolder


def test_names_in_an_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", latents_8x8=np.zeros(3), size=np.array(4))
    folder = SourceFolder(str(tmp_path))
    assert list_npz(folder, "a.npz") == ["latents_8x8", "size"]
    raw = (tmp_path / "a.npz").read_bytes()
    for end in range(0, len(raw), 7):  # the list is at the end
        (tmp_path / "a.npz").write_bytes(raw[:end])
        with pytest.raises((tc.FormatError, OSError), match=r"a\.npz|Invalid argument"):
            list_npz(folder, "a.npz")


def test_header_of_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(1000), "a": torch.zeros(2, dtype=torch.int8)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"caption1": "日本 \U0001f600"})
    safetensors.torch.save_file(tensors, tmp_path / "b.safetensors")
    folder = SourceFolder(str(tmp_path))
    names, metadata = read_safetensors_header(folder, "a.safetensors")
    assert (sorted(names), metadata) == (["a", "b"], {"caption1": "日本 \U0001f600"})
    assert read_safetensors_header(folder, "b.safetensors")[1] == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 26) + b'{"__metadata__":{"a":1}}  ',
        struct.pack("<Q", 34) + b'{"__metadata__":{"a":"\\ud800"}}    ',
        safetensors.torch.save({"x": torch.zeros(9)})[:-1],
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(tc.FormatError, match="a.safetensors"):
        read_safetensors_header(SourceFolder(str(tmp_path)), "a.safetensors")
