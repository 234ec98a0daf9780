"""Parts of big files are read by position, equal those of whole files, and bad positions are errors."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.importers.file_parts import (
    index_torch,
    list_zip,
    read_parts,
    read_row,
    read_tensor,
    view_zip_file,
)
from wds_tensorcache.importers.safe_files import load_torch, read_safetensors_tensors
from wds_tensorcache.importers.source_folder import SourceFolder


def test_views_of_ranges(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    folder = SourceFolder(str(tmp_path))
    assert bytes(folder.view("a.bin")) == bytes(range(100))
    assert bytes(folder.view("a.bin", 10, 20)) == bytes(range(10, 20))
    assert bytes(folder.view("a.bin", 100, 100)) == b""
    for begin, end in ((90, 101), (-1, 5)):
        with pytest.raises(tc.FormatError, match=r"a.bin: the file has 100 bytes"):
            folder.view("a.bin", begin, end)


def test_a_range_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    folder = SourceFolder(str(tmp_path))
    assert folder.read_range("a.bin", 10, 20) == bytes(range(10, 20))
    assert folder.read_range("a.bin", 100, 100) == b""
    with pytest.raises(tc.FormatError, match=r"a.bin: the file has 100 bytes, but \[90, 101\) is needed"):
        folder.read_range("a.bin", 90, 101)


def test_rows_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "latents": torch.randn(5, 3, 2).bfloat16(),
        "empty": torch.randn(5, 0),
        "labels": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([True, False]),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"made": "by a test"})
    folder = SourceFolder(str(tmp_path))
    stored, metadata = read_safetensors_tensors(folder, "a.safetensors")
    assert metadata == {"made": "by a test"}
    for name, tensor in tensors.items():
        assert_same(tensor, read_tensor(folder, "a.safetensors", stored[name]))
        for row in range(len(tensor) if tensor.ndim else 0):
            assert_same(tensor[row], read_row(folder, "a.safetensors", stored[name], row))
    for name, row in (("latents", 5), ("latents", -1), ("scalar", 0)):
        with pytest.raises(tc.FormatError, match=rf"a.safetensors: tensor '{name}' .* has no row"):
            read_row(folder, "a.safetensors", stored[name], row)
    (tmp_path / "a.safetensors").write_bytes(b"short")
    with pytest.raises(tc.FormatError, match="a.safetensors: the file has 5 bytes"):
        read_row(folder, "a.safetensors", stored["latents"], 0)


def test_files_in_zips(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/y.bin", b"stored" * 100)
        archive.writestr("z.bin", b"deflated" * 100, zipfile.ZIP_DEFLATED)
        archive.writestr("empty", b"")
    raw = b"before the zip" + (tmp_path / "a.zip").read_bytes()
    (tmp_path / "later.zip").write_bytes(raw)
    (tmp_path / "damaged.zip").write_bytes(raw.replace(b"storedstored", b"storedSTORED", 1))
    (tmp_path / "none.zip").write_bytes(b"hello")
    folder = SourceFolder(str(tmp_path))
    for name in ("a.zip", "later.zip"):
        stored, deflated, empty = list_zip(folder, name)
        assert bytes(view_zip_file(folder, name, stored)) == b"stored" * 100
        assert bytes(view_zip_file(folder, name, empty)) == b""
        with pytest.raises(tc.FormatError, match=rf"{name}: 'z.bin': is compressed"):
            view_zip_file(folder, name, deflated)
    with pytest.raises(tc.FormatError, match="damaged.zip: 'x/y.bin': is damaged"):
        view_zip_file(folder, "damaged.zip", list_zip(folder, "damaged.zip")[0])
    with pytest.raises(tc.FormatError, match="none.zip: cannot be decoded"):
        list_zip(folder, "none.zip")


def test_tensors_of_torch_files_equal_those_of_the_whole_file(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    shared = torch.arange(4)
    value: Any = {
        "views": [base[2:4], base.t(), base[:, ::3], base[1, 2], torch.randn(1, 3).expand(5, 3), base[0:0]],
        "dtypes": [base.bfloat16(), base > 0, base.to(torch.float8_e4m3fn), base.to(torch.complex64)],
        "shared": (shared, shared, [shared]),
        "grad": torch.ones(2, requires_grad=True),
        "more": {1: "x", None: 2.5},
    }
    torch.save(value, tmp_path / "a.pt")
    folder = SourceFolder(str(tmp_path))
    index = index_torch(folder, "a.pt")
    assert not any(isinstance(part, torch.Tensor) for part in (*index["views"], *index["dtypes"]))
    found = read_parts(folder, "a.pt", index)
    expected = load_torch(folder, "a.pt")
    assert found["shared"][0] is found["shared"][1] is found["shared"][2][0]
    assert_same(expected, found)
    for view in found["views"]:  # `base[:, ::3]` would keep the elements between its own
        assert view.untyped_storage().nbytes() <= max(view.numel() * view.itemsize, 1)
    assert_same(expected["views"][1], read_parts(folder, "a.pt", index["views"][1]))
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:700])
    with pytest.raises(tc.FormatError, match="a.pt"):
        read_parts(folder, "a.pt", index)


def test_a_bool_of_two_is_found_when_it_is_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save([torch.tensor([True] * 64)], out)
    (tmp_path / "a.pt").write_bytes(out.getvalue().replace(b"\1" * 64, b"\2" * 64))
    folder = SourceFolder(str(tmp_path))
    with pytest.raises(tc.FormatError, match="a.pt: a bool tensor"):
        read_parts(folder, "a.pt", index_torch(folder, "a.pt"))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello, world", b"PK\x05\x06" + bytes(18)])
def test_bad_torch_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(tc.FormatError, match="a.pt"):
        index_torch(SourceFolder(str(tmp_path)), "a.pt")
