"""Chunks of litdata. The package itself writes and reads them; what is refused before needs no package."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.importers.chunked_samples import COUNT, JPEG, PNG, litdata_sample, write_litdata
from tests.importers.folders import Gadget, imported
from tests.same import assert_same


@pytest.mark.long
@pytest.mark.parametrize("level", [None, "chunk", "batch", "sample"])
def test_every_leaf_and_compression(tmp_path: Path, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays as it is, though litdata deletes compressed chunks, and nothing is left elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    write_litdata(tmp_path / "in", **({"compression": "zstd", "compression_level": level} if level else {}))
    before = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.unused) == ("litdata", [])
    assert list(found) == [f"{number:08d}" for number in range(COUNT)]
    for number, value in enumerate(found.values()):
        assert_same(litdata_sample(number), value)
    with tc.open(tmp_path / "out") as cache:
        for suffix, content in {"photo.jpg": JPEG, "mask.png": PNG, "views.1.jpg": JPEG}.items():
            assert [bytes(each) for each in cache.read_members(range(COUNT), suffix)] == [content] * COUNT
    assert {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()} == before
    assert os.listdir(tmp_path / "tmp") == []


def write_leaf(folder: Path, kind: str, raw: bytes, chunk: dict[str, Any] | None = None, **config: Any) -> None:
    """Write a chunk with one sample, which is one leaf; `chunk` and `config` are changes of the index."""
    folder.mkdir()
    sample = len(raw).to_bytes(4, "little") + raw
    content = b"\1\0\0\0" + np.array([12, 12 + len(sample)], "<u4").tobytes() + sample
    (folder / "chunk-0-0.bin").write_bytes(content)
    spec = json.dumps([1, {"type": None, "context": None, "children_spec": []}])
    base = {"chunk_bytes": None, "chunk_size": 1, "compression": None, "data_format": [kind], "data_spec": spec}
    listed = {"chunk_bytes": len(content), "chunk_size": 1, "dim": None, "filename": "chunk-0-0.bin", **(chunk or {})}
    index = {"chunks": [listed], "config": {**base, "item_loader": "PyTreeLoader", **config}}
    (folder / "index.json").write_text(json.dumps(index))


def spec_of(kind: str, context: Any = "") -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


FACTORY = {"default_factory_module": "gadget", "default_factory_name": "x", "dict_context": []}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("pickle:1", {}, "the kind 'pickle.*', which may run code.*--trust"),
        ("graph", {}, "the kind 'graph', which may run code"),
        ("str", {"data_spec": spec_of("collections.defaultdict", FACTORY)}, "contain a 'collections.defaultdict'"),
        ("str", {"data_spec": spec_of("os.system")}, "contain a 'os.system'"),
        ("str", {"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ("str", {"item_loader": "ParquetLoader"}, "ParquetLoader"),
        ("str", {"data_spec": "nonsense"}, "cannot be decoded"),
        ("str", {"data_spec": "[" * 100_000}, "nested too deeply"),
        ("str", {"chunk": {"filename": "../chunk-0-0.bin"}}, "is missing, although the index lists it"),
        ("str", {"chunk": {"filename": "a/chunk-0-0.bin"}}, "is in a subfolder"),
        ("str", {"chunk": {"chunk_size": "1"}}, "cannot be decoded"),
        ("str", {"chunk": {"chunk_bytes": 1 << 40}}, "but the index lists 1,099,511,627,776"),
    ],
)
def test_indexes_that_are_refused(
    tmp_path: Path, kind: str, config: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the package, which would run pickles and import modules, is imported."""
    monkeypatch.setitem(sys.modules, "litdata", None)
    write_leaf(tmp_path / "in", kind, pickle.dumps(Gadget()), **config)
    (tmp_path / "in" / "a").mkdir()
    shutil.copy(tmp_path / "in" / "chunk-0-0.bin", tmp_path / "in" / "a")
    with pytest.raises(tc.FormatError, match=message):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    write_leaf(tmp_path / "in", "str", b"a cat")
    with pytest.raises(ImportError, match="pip install 'litdata"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


@pytest.mark.long
def test_a_trusted_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_leaf(tmp_path / "in", "pickle", pickle.dumps(Gadget()))
    tc.import_cache("in", "out", trust=True)
    assert Path("hacked").exists()


@pytest.mark.long
def test_bad_samples_and_chunks(tmp_path: Path) -> None:
    for name, options in {
        "good": {},
        "missing": {},
        "damaged": {"compression": "zstd", "compression_level": "chunk"},
    }.items():
        write_litdata(tmp_path / "in" / name, **options)
    (tmp_path / "in" / "missing" / "chunk-0-0.bin").unlink()
    (tmp_path / "in" / "damaged" / "chunk-0-0.zstd.bin").write_bytes(b"(\xb5/\xfd nonsense")
    for kind, raw in {"tensor": b"\0\0\0\xff\0\0\0\0", "no_header_numpy:14": b"12345678", "str": b"\xff"}.items():
        write_leaf(tmp_path / "in" / kind.partition(":")[0], kind, raw)
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == [f"good/{number:08d}" for number in range(COUNT)]
    skipped = {each.name: each.what for each in report.skipped}
    assert "chunk-0-0.bin: is missing" in skipped.pop("missing/index.json")
    assert "damaged/index.json" in skipped
    assert all("cannot be decoded" in skipped[f"{name}/00000000"] for name in ("tensor", "no_header_numpy", "str"))
