"""Datasets as caches: exact in every format of batches, fused or not, all or nothing, no key twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.data
import torch
from ray.data.expressions import col

import wds_tensorcache as tc
from tests.ray_data.conftest import every_kind
from tests.same import assert_same

pytestmark = pytest.mark.long


def _check(cache: Any, count: int = 40, sample: Callable[[int], Any] = every_kind) -> None:
    assert sorted(cache.keys()) == [f"{i:04d}" for i in range(count)]
    for i in range(count):
        assert_same(sample(i), cache[f"{i:04d}"])


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow", None])
def test_samples_survive_a_function_in_every_format(every_kind_cache: Path, tmp_path: Path, batch_format: str) -> None:
    """Without a function, Ray fuses reading and writing into one operator."""
    dataset = tc.ray.read_ray(every_kind_cache, override_num_blocks=3)
    if batch_format is not None:
        dataset = dataset.map_batches(lambda batch: batch, batch_format=batch_format, batch_size=7)
    cache = tc.ray.write_ray(dataset, tmp_path / "out", fingerprint={"made": "here"}, fsync=False)
    _check(cache)
    assert cache.fingerprint == {"made": "here"}
    assert tc.verify(tmp_path / "out").ok
    hidden = [name for name in _files(tmp_path / "out") if name.startswith(".")]
    assert hidden == []


def test_blocks_are_bundled(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset = tc.ray.read_ray(every_kind_cache, override_num_blocks=10).materialize()
    cache = tc.ray.write_ray(dataset, tmp_path / "out", min_samples=20, max_samples=8)
    assert 5 <= cache.num_shards <= 7
    _check(cache)


def test_changed_columns(every_kind_cache: Path, tmp_path: Path) -> None:
    def change(batch: dict[str, Any]) -> dict[str, Any]:
        batch["latent"] = batch["latent"].astype(np.float32) + 1
        batch["cond.0.1.prompt"] = np.array([text.upper() for text in batch["cond.0.1.prompt"]])
        batch["extra.depth"] = np.ones((len(batch["i"]), 2, 2), np.int16)
        batch["rank"] = batch["i"] * 2
        return batch

    dataset = tc.ray.read_ray(every_kind_cache).drop_columns(["float8", "weight", "mask"]).map_batches(change)
    cache = tc.ray.write_ray(dataset, tmp_path / "out")
    for i in range(40):
        sample, old = tc.realize(cache[f"{i:04d}"]), every_kind(i)
        assert_same(old["latent"].float() + 1, sample["latent"])
        assert_same(old["cond"][0][0], sample["cond"][0][0])
        assert sample["cond"][0][1]["prompt"] == f"PHOTO {i}"
        assert sample["cond"][0][1]["size"] == (64, i)
        assert_same(torch.ones(2, 2, dtype=torch.int16), sample["extra"]["depth"])
        assert sample["rank"] == 2 * i
        assert {"float8", "weight", "mask"}.isdisjoint(sample)


def test_plain_datasets(tmp_path: Path) -> None:
    rows = [
        {"id": i, "x": np.full((2, 3), i, np.float32), "ragged": np.arange(i + 1), "a.b": i, "text": "é", "f": [1.5, i]}
        for i in range(20)
    ]
    cache = tc.ray.write_ray(ray.data.from_items(rows, override_num_blocks=4), tmp_path / "out", key="id")
    assert sorted(map(int, cache.keys())) == list(range(20))
    sample = tc.realize(cache["11"])
    assert_same(torch.full((2, 3), 11.0), sample["x"])
    assert_same(torch.arange(12), sample["ragged"])
    assert (sample["a"], sample["text"], sample["f"]) == ({"b": 11}, "é", [1.5, 11])
    again = tc.ray.write_ray(tc.ray.read_ray(tmp_path / "out"), tmp_path / "again")
    assert_same(sample, again["11"])


def test_tables_of_samples(tmp_path: Path) -> None:
    """Functions return samples of any dtype with `ray_table`."""

    def make(batch: dict[str, Any]) -> Any:
        numbers = batch["id"].tolist()
        samples = [{"h": [torch.full((2, i % 3 + 1), i).bfloat16()], "n": (i,)} for i in numbers]
        return tc.ray.ray_table([f"{i:04d}" for i in numbers], samples)

    dataset = ray.data.range(30, override_num_blocks=3).map_batches(make, batch_size=5)
    cache = tc.ray.write_ray(dataset, tmp_path / "out")
    _check(cache, 30, lambda i: {"h": [torch.full((2, i % 3 + 1), i).bfloat16()], "n": (i,)})
    batch = next(iter(dataset.iter_torch_batches(batch_size=30, collate_fn=tc.ray.ray_collate())))
    assert {tensor.dtype for tensor in batch["h.0"]} == {torch.bfloat16}


def test_nothing_to_write(every_kind_cache: Path, tmp_path: Path) -> None:
    nothing = tc.ray.read_ray(every_kind_cache).filter(expr=col("i") < 0)
    assert len(tc.ray.write_ray(nothing, tmp_path / "a")) == 0
    assert (
        len(tc.ray.write_ray(ray.data.from_arrow(pa.table({"__key__": pa.array([], pa.string())})), tmp_path / "b"))
        == 0
    )
    few = tc.ray.read_ray(every_kind_cache, override_num_blocks=8).filter(expr=col("i") == 7)
    cache = tc.ray.write_ray(few, tmp_path / "c")
    assert list(cache.keys()) == ["0007"]
    assert tc.verify(tmp_path / "c").ok


def test_keys_occur_once(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset = tc.ray.read_ray(every_kind_cache, override_num_blocks=4)
    with pytest.raises(tc.InvalidKeyError, match="0000"):
        tc.ray.write_ray(dataset.union(tc.ray.read_ray(every_kind_cache)), tmp_path / "twice")
    with pytest.raises(tc.InvalidKeyError, match="already"):
        tc.ray.write_ray(dataset.map(lambda row: {**row, "__key__": "same"}), tmp_path / "twice")
    with pytest.raises(KeyError, match="no_such_column"):
        tc.ray.write_ray(dataset, tmp_path / "twice", key="no_such_column")
    with pytest.raises(tc.InvalidKeyError, match="text or integers"):
        tc.ray.write_ray(dataset, tmp_path / "twice", key="weight")
    assert _files(tmp_path / "twice") == []


def test_a_failure_leaves_nothing(every_kind_cache: Path, tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["i"] == 37:
            raise ZeroDivisionError("no sample 37")
        return row

    dataset = tc.ray.read_ray(every_kind_cache, override_num_blocks=5).map(fail)
    with pytest.raises(ray.exceptions.RayTaskError, match="no sample 37"):
        tc.ray.write_ray(dataset, tmp_path / "out", max_samples=2)
    assert _files(tmp_path / "out") == []


def test_a_task_that_is_run_again_doubles_nothing(every_kind_cache: Path, tmp_path: Path) -> None:
    def die_once(row: dict[str, Any]) -> dict[str, Any]:
        if row["i"] in (9, 25):
            try:
                (tmp_path / f"died-{row['i']}").mkdir()
            except FileExistsError:
                return row
            os._exit(1)
        return row

    dataset = tc.ray.read_ray(every_kind_cache, override_num_blocks=4).map(die_once)
    cache = tc.ray.write_ray(dataset, tmp_path / "out", max_samples=2)
    assert sorted(tmp_path.glob("died-*")) == [tmp_path / "died-25", tmp_path / "died-9"]
    _check(cache)
    listed = {os.path.basename(path) for path in cache._paths()}
    assert {name for name in _files(tmp_path / "out") if name.endswith(".tar")} == listed


def test_what_is_in_the_folder(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset, out = tc.ray.read_ray(every_kind_cache, override_num_blocks=2), tmp_path / "out"
    first = dataset.filter(expr=col("i") < 10)
    tc.ray.write_ray(first, out)
    before = _files(out)
    with pytest.raises(FileExistsError, match="append=True"):
        tc.ray.write_ray(dataset, out)
    with pytest.raises(tc.InvalidKeyError, match="0000"):
        tc.ray.write_ray(dataset, out, append=True)
    assert _files(out) == before
    keys = list(tc.open(out).keys())
    cache = tc.ray.write_ray(dataset.filter(expr=col("i") >= 10), out, append=True)
    assert list(cache.keys())[:10] == keys
    _check(cache)
    replaced = tc.ray.write_ray(first, out, overwrite=True)
    assert sorted(replaced.keys()) == sorted(keys)
    assert len([name for name in _files(out) if name.endswith(".tar")]) == replaced.num_shards
    assert tc.verify(out).ok
    with pytest.raises(ValueError, match="overwrite"):
        tc.ray.write_ray(first, out, overwrite=True, append=True)
    with pytest.raises(ValueError, match="%"):
        tc.ray.write_ray(first, tmp_path / "100%")
    assert not (tmp_path / "100%").exists()
    with pytest.raises(TypeError, match="max_sample"):
        tc.ray.write_ray(first, out, overwrite=True, max_sample=3)
