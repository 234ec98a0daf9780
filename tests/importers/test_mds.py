"""Shards of MosaicML streaming. The package itself writes and reads them; what is refused before needs no package."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.importers.chunked_samples import COUNT, JPEG, PNG, import_streaming, mds_sample, write_mds
from tests.importers.folders import Gadget, imported
from tests.same import assert_same


@pytest.mark.long
@pytest.mark.parametrize("codec", [None, "gz", "bz2", "zstd:5", "br", "snappy"])
def test_every_column_and_compression(tmp_path: Path, codec: str | None) -> None:
    write_mds(tmp_path / "in", codec, 2500)
    before = sorted(os.listdir(tmp_path / "in"))
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.unused) == ("mds", [])
    assert report.fingerprint["columns"]["half"] == "ndarray:float16"
    assert list(found) == [f"{number:08d}" for number in range(COUNT)]
    for number, value in enumerate(found.values()):
        assert_same(dict(sorted(mds_sample(number).items())), value)  # streaming sorts its columns
    with tc.open(tmp_path / "out") as cache:
        for suffix in ("photo.jpg", "frames.0.jpg", "frames.1.jpg", "views.1.jpg"):
            assert [bytes(each) for each in cache.read_members(range(COUNT), suffix)] == [JPEG] * COUNT
        assert bytes(cache.read_members([0], "mask.png")[0]) == PNG
    assert sorted(os.listdir(tmp_path / "in")) == before


@pytest.mark.long
def test_several_folders_and_a_merged_index(tmp_path: Path) -> None:
    """streaming merges the indexes of several writers into one, and leaves the old ones in place."""
    shards = []
    for name in ("0", "1"):
        write_mds(tmp_path / "in" / name, None, 2500)
        for shard in json.loads((tmp_path / "in" / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    found, report = imported(tmp_path / "in", tmp_path / "apart")
    assert list(found) == [f"{folder}/{number:08d}" for folder in "01" for number in range(COUNT)]
    (tmp_path / "in" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    found, report = imported(tmp_path / "in", tmp_path / "merged")
    assert list(found) == [f"{number:08d}" for number in range(2 * COUNT)]
    assert report.num_read == 2 * COUNT
    # a merged index that is older than some shards: these shards follow, and no sample is read twice
    num_left = shards[-1]["samples"]
    assert num_left < COUNT
    (tmp_path / "in" / "index.json").write_text(json.dumps({"version": 2, "shards": shards[:-1]}))
    older, _ = imported(tmp_path / "in", tmp_path / "older")
    assert list(older)[: 2 * COUNT - num_left] == list(found)[: 2 * COUNT - num_left]
    assert_same(list(found.values()), list(older.values()))


def write_columns(folder: Path, columns: dict[str, str], samples: list[list[bytes]], changes: Any = None) -> Path:
    """Write a shard with columns of no fixed length."""
    folder.mkdir()
    raw = [b"".join(len(each).to_bytes(4, "little") for each in sample) + b"".join(sample) for sample in samples]
    offsets = np.cumsum([4 + 4 * (len(raw) + 1), *map(len, raw)]).astype("<u4").tobytes()
    content = len(raw).to_bytes(4, "little") + offsets + b"".join(raw)
    (folder / "shard.00000.mds").write_bytes(content)
    shard = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "column_sizes": [None] * len(columns),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "samples": len(samples),
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"shards": [{**shard, **(changes or {})}], "version": 2}))
    return folder


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({"x": "pkl:1"}, {}, "column 'x' has the encoding 'pkl:1', which may run code.*--trust"),
        ({"x": "str", "y": "other"}, {}, "column 'y' has the encoding 'other'"),
        ({"x": "str"}, {"format": "jsonl"}, "expected mds"),
        ({"x": "str"}, {"version": 1}, "version 2"),
        ({"x": "str"}, {"raw_data": {"basename": "../shard.00000.mds"}}, "is missing"),
        ({"x": "str"}, {"column_sizes": ["1"]}, "cannot be decoded"),
        ({"x": "str"}, {"samples": "1"}, "cannot be decoded"),
    ],
)
def test_indexes_that_are_refused(
    tmp_path: Path, columns: dict[str, str], changes: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the package, which would run pickles, is imported."""
    for name in ("streaming", "streaming.base.format.mds"):
        monkeypatch.setitem(sys.modules, name, None)
    write_columns(tmp_path / "in", columns, [[pickle.dumps(Gadget())] * len(columns)], changes)
    with pytest.raises(tc.FormatError, match=message):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("streaming", "streaming.base.format.mds"):
        monkeypatch.setitem(sys.modules, name, None)
    write_columns(tmp_path / "in", {"x": "str"}, [[b"a cat"]])
    with pytest.raises(ImportError, match="pip install 'mosaicml-streaming'"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


@pytest.mark.long
def test_a_trusted_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_streaming()
    monkeypatch.chdir(tmp_path)
    write_columns(tmp_path / "in", {"x": "pkl"}, [[pickle.dumps(Gadget())]])
    tc.import_cache("in", "out", trust=True)
    assert Path("hacked").exists()


BAD = {
    "short array": ("ndarray:float32:3", b"12345678"),
    "unknown dtype": ("ndarray", b"\7"),
    "text": ("str", b"\xff"),
    "json": ("json", b"{"),
    "list": ("list[jpeg]", b"\0\0\0\0\xff\xff\xff\xff"),
    "list that is longer": ("jpeg_array", b"\1\0\0\0\1\0\0\0ab"),
    "mode of a picture": ("pil", b"\1\0\0\0\1\0\0\0\4\0\0\0EVIL\0"),
    "size of a picture": ("pil", b"\xff\xff\xff\xff\1\0\0\0\1\0\0\0L\0"),
}


@pytest.mark.long
def test_bad_samples(tmp_path: Path) -> None:
    import_streaming()
    (tmp_path / "in").mkdir()
    for number, (encoding, content) in enumerate(BAD.values()):
        write_columns(tmp_path / "in" / f"{number}", {"x": encoding}, [[content]])
    write_columns(tmp_path / "in" / "good", {"x": "str"}, [[b"a cat"]])
    write_columns(tmp_path / "in" / "count", {"x": "str"}, [[b"a cat"]], {"samples": 2})
    cut = write_columns(tmp_path / "in" / "cut", {"x": "str"}, [[b"a cat"]]) / "shard.00000.mds"
    cut.write_bytes(cut.read_bytes()[:-1])
    longer = write_columns(tmp_path / "in" / "size", {"x": "bytes", "y": "str"}, [[b"a cat", b""]]) / "shard.00000.mds"
    longer.write_bytes(longer.read_bytes().replace(b"\5\0\0\0", b"\4\0\0\0"))
    for name in ("compressed", "declared"):
        write_mds(tmp_path / "in" / name, "zstd")
    (compressed,) = (tmp_path / "in" / "compressed").glob("*.zstd")
    os.truncate(compressed, compressed.stat().st_size - 1)
    (declared,) = (tmp_path / "in" / "declared").glob("*.zstd")
    content = declared.read_bytes()
    declared.write_bytes(content[:4] + b"\xe0" + (1 << 50).to_bytes(8, "little") + content[13:])  # its length
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == ["good/00000000"]
    assert report.num_skipped == len(BAD) + 4 + 2 * COUNT
