"""Chunks that litdata has written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.importers.chunked_samples import COUNT, JPEG, PNG, WRITTEN, litdata_sample, write_litdata
from tests.importers.damaged import load_damaged
from tests.importers.folders import imported
from tests.same import assert_same
from wds_tensorcache.importers.import_cache import import_cache


def assert_samples(found: dict[str, Any], out: Path) -> None:
    assert list(found) == [f"{number:08d}" for number in range(COUNT)]
    for number, value in enumerate(found.values()):
        expected = {**litdata_sample(number), "pixels": torch.full((2, 3, 3), number, dtype=torch.uint8)}
        assert_same(expected, value)
    with tc.open(out) as cache:
        assert [bytes(each) for each in cache.read_members(range(COUNT), "photo.jpg")] == [JPEG] * COUNT
        assert [bytes(each) for each in cache.read_members(range(COUNT), "mask.png")] == [PNG] * COUNT


@pytest.mark.parametrize("level", ["plain", "chunk", "batch", "sample"])
def test_files_of_litdata(tmp_path: Path, level: str) -> None:
    """As they are in `written/`, with each level of compression."""
    found, report = imported(WRITTEN / f"litdata_{level}", tmp_path / "out")
    assert (report.format, report.unused) == ("litdata", [])
    assert_samples(found, tmp_path / "out")


@pytest.mark.parametrize("version", ["0.2.30", "0.2.51"])
def test_files_of_old_releases(tmp_path: Path, version: str) -> None:
    """Their tensors have little-endian shapes; the older one stores a bool as an int, and a 0-d tensor as a pickle."""
    found, _ = imported(WRITTEN / f"litdata_{version}", tmp_path / "out")
    assert len(found) == COUNT
    for number, value in enumerate(found.values()):
        expected = litdata_sample(number)
        if version == "0.2.30":
            expected["bool"] = int(expected["bool"])
        assert_same(expected, value)


@pytest.mark.parametrize("level", [None, "chunk", "batch", "sample"])
def test_the_installed_library(tmp_path: Path, level: str | None) -> None:
    pytest.importorskip("litdata", reason="pip install litdata")
    write_litdata(tmp_path / "in", **({"compression": "zstd", "compression_level": level} if level else {}))
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples(found, tmp_path / "out")


def test_tokens(tmp_path: Path) -> None:
    found, _ = imported(WRITTEN / "litdata_tokens", tmp_path / "out")
    for number, value in enumerate(found.values()):
        assert_same(torch.arange(number, number + 10, dtype=torch.int32), value)


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def write_leaf(folder: Path, data_format: str, raw: bytes, **config: Any) -> None:
    """Write a chunk with one sample, which is one leaf."""
    folder.mkdir()
    sample = len(raw).to_bytes(4, "little") + raw
    content = b"\1\0\0\0" + np.array([12, 12 + len(sample)], "<u4").tobytes() + sample
    (folder / "chunk-0-0.bin").write_bytes(content)
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = json.dumps([1, leaf])
    base = {"chunk_bytes": None, "chunk_size": 1, "compression": None, "data_format": [data_format], "data_spec": spec}
    chunk = {"chunk_bytes": len(content), "chunk_size": 1, "dim": None, "filename": "chunk-0-0.bin"}
    index = {"chunks": [chunk], "config": {**base, "item_loader": "PyTreeLoader", **config}}
    (folder / "index.json").write_text(json.dumps(index))


def test_a_leaf_alone(tmp_path: Path) -> None:
    write_leaf(tmp_path / "in", "json", b'{"k": [1, 2]}')
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert found == {"00000000": {"k": [1, 2]}}


BAD: dict[str, tuple[str, bytes, str]] = {
    "gadget": ("pickle", pickle.dumps(Gadget()), "--trust"),
    "graph": ("graph", b"LDGR", "this kind of leaf is not read"),
    "compact json": ("json", b"\5\1\0\0\0", "compact form"),
    "dtype of a tensor": ("tensor", b"\0\0\0\xff\0\0\0\0", "cannot be decoded"),
    "shape of a tensor": ("tensor", b"\0\0\0\0\0\0\0\1\0\0\0\7abcd", "cannot be decoded"),
    "dimensions of a tensor": ("tensor", b"\0\0\0\0\xff\xff\xff\xff", "cannot be decoded"),
    "object array": ("no_header_numpy:14", b"12345678", "cannot be decoded"),
    "array": ("numpy", b"\0", "cannot be decoded"),
    "part of a number": ("no_header_tensor:0", b"123", "cannot be decoded"),
    "int": ("int", b"1", "cannot be decoded"),
    "bool": ("bool", b"", "cannot be decoded"),
    "text": ("str", b"\xff", "cannot be decoded"),
}


@pytest.mark.parametrize(("data_format", "content", "message"), BAD.values(), ids=BAD)
def test_bad_leaves(
    tmp_path: Path, data_format: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_leaf(tmp_path / "in", data_format, content)
    with pytest.raises(tc.FormatError, match=message) as caught:
        import_cache("in", "out")
    assert "00000000" in str(caught.value)
    assert not Path("hacked").exists()


def test_a_trusted_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_leaf(tmp_path / "in", "pickle", pickle.dumps(Gadget()))
    import_cache("in", "out", trust=True)
    assert Path("hacked").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"item_loader": "ParquetLoader"}, "ParquetLoader"),
        ({"data_spec": "[2, {}]"}, "version 2"),
        ({"data_spec": "nonsense"}, "is not an index of litdata"),
        ({"data_spec": "[" * 100_000}, "is not an index of litdata"),
        ({"data_spec": json.dumps([1, {"type": "os.system", "context": "", "children_spec": []}])}, "'os.system'"),
        ({"data_spec": json.dumps([1, {"type": "builtins.list", "context": None, "children_spec": []}])}, "too few"),
        ({"compression": "rar"}, "unknown compression"),
    ],
)
def test_bad_indexes(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_leaf(tmp_path / "in", "str", b"a cat", **config)
    with pytest.raises(ValueError, match=message):
        import_cache(tmp_path / "in", tmp_path / "out")


def test_a_missing_chunk(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "litdata_plain", tmp_path / "in")
    (tmp_path / "in" / "chunk-0-0.bin").unlink()
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert len(found) == 1
    assert report.skipped[0].what == "is missing, but the index lists it"


@pytest.mark.parametrize("level", ["plain", "batch", "sample", "chunk"])
def test_damage_anywhere(tmp_path: Path, level: str) -> None:
    assert load_damaged(WRITTEN / f"litdata_{level}", tmp_path / "copy", "litdata", 60) > 20
