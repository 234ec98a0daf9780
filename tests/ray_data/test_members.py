"""Members outside caches, and the fingerprint, when a cache is read as a dataset of Ray and written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.data
import torch

import wds_tensorcache as tc
from tests.cli.command import run

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a cache of twelve samples with pictures, of which eight have a text, too."""
    with tc.ShardWriter(tmp_path / "in", max_samples=5, fingerprint={"model": "a"}, fsync=False) as sink:
        for i in range(12):
            texts: dict[str, Any] = {"seg.json": {"i": i}} if i % 3 else {}
            sink.write(f"{i:04d}", {"x": torch.full((3,), i), "i": i}, jpg=b"\xff\xd8\xff%d\0" % i, **texts)
    return tmp_path / "in"


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow", None])
def test_a_copy_is_equal(folder: Path, tmp_path: Path, batch_format: str | None) -> None:
    dataset = tc.ray.read_ray(folder, override_num_blocks=2)
    assert dataset.schema().names == ["__key__", "x", "i", ".jpg", ".seg.json", "__tensorcache__"]
    if batch_format is not None:
        dataset = dataset.map_batches(lambda batch: batch, batch_format=batch_format, batch_size=5)
    copy = tc.ray.write_ray(dataset, tmp_path / "out", fingerprint=tc.open(folder).fingerprint, fsync=False)
    assert copy.members == {"jpg": 12, "seg.json": 8}
    assert copy.fingerprint == {"model": "a"}
    assert "12 samples equal, 0 changed, 0 only in the first" in run("diff", folder, tmp_path / "out").stdout


def test_a_fingerprint_is_not_left_out_without_a_word(folder: Path, tmp_path: Path) -> None:
    dataset = tc.ray.read_ray(folder)
    with pytest.raises(tc.StaleCacheError, match=r"has a fingerprint.*fingerprint=tc\.open\(source\)\.fingerprint"):
        tc.ray.write_ray(dataset, tmp_path / "out", fsync=False)
    assert tc.ray.write_ray(dataset, tmp_path / "out", fingerprint={}, fsync=False).fingerprint == {}


def test_members_are_columns(folder: Path, tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        assert tc.ray.ray_sample(row).keys() == {"x", "i"}
        return {**row, ".jpg": row[".jpg"] + b"!", ".txt": f"photo {row['i']}"}

    dataset = tc.ray.read_ray(folder).drop_columns([".seg.json"]).map(change)
    cache = tc.ray.write_ray(dataset, tmp_path / "out", fingerprint={}, fsync=False)
    assert cache.members == {"jpg": 12, "txt": 12}
    assert cache.read_members(["0007"], "jpg") == [b"\xff\xd8\xff7\0!"]
    assert cache.read_members(["0007"], "txt") == [b"photo 7"]
    assert cache["0007"].keys() == {"x", "i"}
    plain = ray.data.from_items([{"__key__": f"{i}", "n": i, ".txt": f"text {i}"} for i in range(3)])
    cache = tc.ray.write_ray(plain, tmp_path / "plain", fsync=False)
    assert (cache["1"], cache.read_members(["1"], "txt")) == ({"n": 1}, [b"text 1"])


def test_members_are_read_only_if_wanted(folder: Path) -> None:
    dataset = tc.ray.read_ray(folder).select_columns(["__key__", ".jpg"])
    assert {row["__key__"]: row[".jpg"] for row in dataset.take_all()}["0003"] == b"\xff\xd8\xff3\0"
    assert tc.ray.read_ray(folder).select_columns(["__key__", "x"]).schema().names == ["__key__", "x"]


def test_names_that_keys_do_not_hold(tmp_path: Path) -> None:
    names = ["a b", "фото " * 20, "写" * 40]
    with tc.ShardWriter(tmp_path / "in", fsync=False) as sink:
        for name in names:
            sink.write(tc.safe_key(name), {"x": torch.ones(2)})
    cache = tc.ray.write_ray(tc.ray.read_ray(tmp_path / "in").map(lambda row: row), tmp_path / "out", fsync=False)
    assert sorted(map(cache.original_name, cache.keys())) == names
    tables = [tc.ray.ray_table([tc.safe_key(name)], [{"x": torch.ones(2)}]) for name in names]
    cache = tc.ray.write_ray(ray.data.from_arrow(tables), tmp_path / "made", fsync=False)
    assert sorted(map(cache.original_name, cache.keys())) == names
