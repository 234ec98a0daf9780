"""Shards that MosaicML streaming has written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.importers.chunked_samples import COUNT, JPEG, PNG, WRITTEN, mds_sample, write_mds
from tests.importers.damaged import load_damaged
from tests.importers.folders import imported
from tests.same import assert_same
from wds_tensorcache.importers.generic.chunk_files import expand
from wds_tensorcache.importers.import_cache import import_cache

CODECS = ["plain", "gz", "bz2", "zstd", "br", "snappy"]


def assert_samples(found: dict[str, Any], out: Path) -> None:
    assert list(found) == [f"{number:08d}" for number in range(COUNT)]
    for number, value in enumerate(found.values()):
        expected = {**mds_sample(number), "pixels": torch.full((2, 3, 3), number, dtype=torch.uint8)}
        assert_same({name: expected[name] for name in sorted(expected)}, value)  # streaming sorts its columns
    with tc.open(out) as cache:
        for suffix in ("photo.jpg", "frames.0.jpg", "frames.1.jpg", "views.1.jpg"):
            assert [bytes(each) for each in cache.read_members(range(COUNT), suffix)] == [JPEG] * COUNT
        assert bytes(cache.read_members([0], "mask.png")[0]) == PNG


@pytest.mark.parametrize("codec", CODECS)
def test_files_of_streaming(tmp_path: Path, codec: str) -> None:
    """As they are in `written/`, with each column and compression."""
    found, report = imported(WRITTEN / f"mds_{codec}", tmp_path / "out")
    assert (report.format, report.unused) == ("mds", [])
    assert report.fingerprint["columns"]["half"] == "ndarray:float16"
    assert_samples(found, tmp_path / "out")


def test_the_installed_library(tmp_path: Path) -> None:
    pytest.importorskip("streaming", reason="pip install mosaicml-streaming, which needs numpy < 2.2")
    write_mds(tmp_path / "in", "zstd", 2500)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples(found, tmp_path / "out")


def test_several_folders_and_a_merged_index(tmp_path: Path) -> None:
    """streaming merges the indexes of several writers into one, and leaves the old ones in place."""
    shards = []
    for name in ("0", "1"):
        shutil.copytree(WRITTEN / "mds_plain", tmp_path / "in" / name)
        for shard in json.loads((tmp_path / "in" / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    found, report = imported(tmp_path / "in", tmp_path / "apart")
    assert list(found) == [f"{folder}/{number:08d}" for folder in "01" for number in range(COUNT)]
    (tmp_path / "in" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    found, report = imported(tmp_path / "in", tmp_path / "merged")
    assert list(found) == [f"{number:08d}" for number in range(2 * COUNT)]
    assert report.num_read == 2 * COUNT


def change_index(folder: Path, change: Any) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    for shard in index["shards"]:
        change(shard)
    path.write_text(json.dumps(index))


def write_columns(folder: Path, columns: dict[str, str], samples: list[list[bytes]]) -> None:
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
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def test_latents_as_bytes(tmp_path: Path) -> None:
    """MicroDiffusion stores neither dtype nor shape; mosaicml/diffusion leaves small pictures empty."""
    latent = np.random.default_rng(0).normal(size=(4, 32, 32)).astype(np.float16)
    columns = {"caption": "str", "latents_256": "bytes", "latents_512": "bytes"}
    write_columns(tmp_path / "in", columns, [[b"a cat", latent.tobytes(), b""]])
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    value = found["00000000"]
    assert_same(torch.from_numpy(latent), value["latents_256"].view(torch.float16).reshape(4, 32, 32))
    assert value["latents_512"].shape == (0,)


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


BAD: dict[str, tuple[str, bytes, str]] = {
    "gadget": ("pkl", pickle.dumps(Gadget()), "--trust"),
    "unknown encoding": ("tensor", b"", "encoding is unknown"),
    "encoding that is a function": ("__import__", b"", "encoding is unknown"),
    "dtype that is a function": ("ndarray:object", b"12345678", "unknown dtype"),
    "short array": ("ndarray:float32:3", b"12345678", "cannot be decoded"),
    "unknown number of a dtype": ("ndarray", b"\7", "cannot be decoded"),
    "negative shape": ("ndarray:int8:-1,-2", b"12", "negative"),
    "text": ("str", b"\xff", "cannot be decoded"),
    "long number": ("str_int", b"1" * 5000, "cannot be decoded"),
    "number": ("int", b"123", "cannot be decoded"),
    "decimal": ("str_decimal", b"1.x", "cannot be decoded"),
    "json": ("json", b"{", "cannot be decoded"),
    "deep json": ("json", b"[" * 100_000, "nested too deeply"),
    "list": ("list[jpeg]", b"\0\0\0\0\xff\xff\xff\xff", "exceeds its"),
    "list that is longer": ("jpeg_array", b"\1\0\0\0\1\0\0\0ab", "ends at byte"),
    "mode of a picture": ("pil", b"\1\0\0\0\1\0\0\0\4\0\0\0EVIL\0", "mode 'EVIL'"),
    "size of a picture": ("pil", b"\xff\xff\xff\xff\1\0\0\0\1\0\0\0L\0", "cannot be decoded"),
}


@pytest.mark.parametrize(("encoding", "content", "message"), BAD.values(), ids=BAD)
def test_bad_columns(
    tmp_path: Path, encoding: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_columns(tmp_path / "in", {"x": encoding, "y": "str"}, [[content, b"a cat"]])
    with pytest.raises(tc.FormatError, match=message) as caught:
        import_cache("in", "out")
    assert "00000000" in str(caught.value)
    assert not Path("hacked").exists()


def test_a_trusted_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_columns(tmp_path / "in", {"x": "pkl"}, [[pickle.dumps(Gadget())]])
    import_cache("in", "out", trust=True)
    assert Path("hacked").exists()


def test_bad_indexes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "expected mds": lambda shard: shard.update(format="jsonl"),
        "version 2": lambda shard: shard.update(version=1),
        "is missing": lambda shard: shard["raw_data"].update(basename="../shard.00000.mds"),
        "not described": lambda shard: shard.update(column_sizes=[]),
        "not described as": lambda shard: shard.pop("raw_data"),
        "names, encodings": lambda shard: shard.update(column_names=[1] * len(shard["column_names"])),
    }
    for number, (message, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        shutil.copytree(WRITTEN / "mds_plain", folder)
        change_index(folder, change)
        with pytest.raises(ValueError, match=message):
            import_cache(folder, tmp_path / "out")


def test_one_bad_shard(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "mds_plain", tmp_path / "in")
    (tmp_path / "in" / "shard.00001.mds").write_bytes(b"\xff\xff\xff\xff")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert len(found) == COUNT - 1
    assert [each.name for each in report.skipped] == ["shard.00001.mds"]


def test_damage_anywhere(tmp_path: Path) -> None:
    assert load_damaged(WRITTEN / "mds_plain", tmp_path / "copy", "mds", 150) > 50
    assert load_damaged(WRITTEN / "mds_zstd", tmp_path / "copy", "mds", 50) > 20


def test_a_bomb(tmp_path: Path) -> None:
    import pyarrow

    shutil.copytree(WRITTEN / "mds_zstd", tmp_path / "in")
    raw = pyarrow.Codec("zstd").compress(bytes(300_000_000), asbytes=True)
    (tmp_path / "in" / "shard.00000.mds.zstd").write_bytes(raw)
    with pytest.raises(ValueError, match="expand to more than"):
        import_cache(tmp_path / "in", tmp_path / "out")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    imported(WRITTEN / "mds_plain", tmp_path / "out")
    with pytest.raises(ImportError, match="pip install pyarrow"):
        import_cache(WRITTEN / "mds_gz", tmp_path / "more")


def test_damaged_chunks_leave_no_memory() -> None:
    """pyarrow would keep as much memory for each of them as a chunk may expand to."""
    import pyarrow

    numbers = np.random.default_rng(0).integers(0, 5, 10_000, np.uint8)
    raw = bytearray(pyarrow.Codec("zstd").compress(numbers.tobytes(), asbytes=True))
    raw[9:] = b"\xff" * (len(raw) - 9)

    def reserved_nbytes() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(fields["VmData"].split()[0])

    before = 0
    for _ in range(20):
        with pytest.raises(tc.FormatError):
            expand(bytes(raw), "zstd")
        before = before or reserved_nbytes()  # at first, pyarrow reserves memory for itself
    assert reserved_nbytes() - before < 1 << 28
