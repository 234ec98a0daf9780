"""Datasets as caches: exact in every format of batches, fused or not, all or nothing, no key twice."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import ray.data
import torch
from ray.data.expressions import col

import wds_tensorcache as tc
from tests.cli.command import run
from tests.conftest import Seeded
from tests.ray_data.conftest import by_key, every_kind, in_order
from tests.ray_kills import write_and_read
from tests.reading.batches import write as write_samples
from tests.same import assert_same

pytestmark = pytest.mark.long


def check(cache: Any, numbers: range = range(40), sample: Callable[[int], Any] = every_kind) -> None:
    assert sorted(cache.keys()) == [f"{i:04d}" for i in numbers]
    for i in numbers:
        assert_same(sample(i), cache[f"{i:04d}"])


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def members_cache(tmp_path: Path) -> Path:
    """Twelve samples with pictures, of which eight have a text, too."""
    samples = {f"{i:04d}": {"x": torch.full((3,), i), "i": i} for i in range(12)}
    pictures = [{"jpg": b"\xff\xd8\xff%d\0" % i} | ({"seg.json": {"i": i}} if i % 3 else {}) for i in range(12)]
    return Path(write_samples(tmp_path / "in", samples, pictures.__getitem__, fingerprint={"model": "a"}))


@pytest.mark.parametrize(
    ("batch_format", "exact"), [("numpy", False), ("pandas", True), ("pyarrow", False), (None, False), (None, True)]
)
def test_a_copy_is_equal(members_cache: Path, tmp_path: Path, batch_format: str | None, exact: bool) -> None:
    """Without a function, Ray fuses reading and writing into one operator."""
    dataset = tc.ray.read_ray(members_cache, exact=exact, override_num_blocks=2)
    if batch_format is not None:
        dataset = dataset.map_batches(lambda batch: batch, batch_format=batch_format, batch_size=5)
    with pytest.raises(tc.StaleCacheError, match=r"has a fingerprint.*fingerprint=tc\.open\(source\)\.fingerprint"):
        tc.ray.write_ray(dataset, tmp_path / "out", fsync=False)
    copy = tc.ray.write_ray(dataset, tmp_path / "out", fingerprint={"made": "here"}, fsync=False)
    assert copy.members == {"jpg": 12, "seg.json": 8}
    assert copy.fingerprint == {"made": "here"}
    assert "12 samples equal, 0 changed, 0 only in the first" in run("diff", members_cache, tmp_path / "out").stdout
    assert [name for name in files(tmp_path / "out") if name.startswith(".")] == []
    assert tc.verify(tmp_path / "out").ok


def test_members_are_columns(members_cache: Path, tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, ".jpg": row[".jpg"] + b"!", ".txt": f"photo {row['i']}"}

    dataset = tc.ray.read_ray(members_cache).drop_columns([".seg.json"]).map(change)
    cache = tc.ray.write_ray(dataset, tmp_path / "out", fingerprint={}, fsync=False)
    assert cache.members == {"jpg": 12, "txt": 12}
    assert cache.read_members(["0007"], "jpg") == [b"\xff\xd8\xff7\0!"]
    assert cache.read_members(["0007"], "txt") == [b"photo 7"]
    assert cache["0007"].keys() == {"x", "i"}
    pictures = by_key(tc.ray.read_ray(members_cache).select_columns(["__key__", ".jpg"]))
    assert pictures[3] == {"__key__": "0003", ".jpg": b"\xff\xd8\xff3\0"}


def test_names_that_keys_do_not_hold(tmp_path: Path) -> None:
    names = ["a b", "фото " * 20, "写" * 40]
    tables = [tc.ray.ray_table([tc.safe_key(name)], [{"x": torch.ones(2)}]) for name in names]
    cache = tc.ray.write_ray(ray.data.from_arrow(tables), tmp_path / "in", fsync=False)
    assert sorted(map(cache.original_name, cache.keys())) == names
    cache = tc.ray.write_ray(tc.ray.read_ray(tmp_path / "in").map(lambda row: row), tmp_path / "out", fsync=False)
    assert sorted(map(cache.original_name, cache.keys())) == names


DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64)


def nested(i: int) -> dict[str, Any]:
    """A sample that columns hold: dicts of tensors and plain values."""
    sample: dict[str, Any] = {
        "many": {str(dtype)[6:]: torch.arange(6).view(2, 3).add(i).to(dtype) for dtype in DTYPES},
        "ragged": torch.full((i + 1, 2), i).bfloat16(),
        "text": {"prompt": f"photo {i}", "a.b": i},
    }
    return {**sample, "mask": torch.ones(2, 2), "rank": i} if i % 3 else sample


def test_changed_columns(write_cache: Callable[..., Path], tmp_path: Path) -> None:
    def change(batch: dict[str, Any]) -> dict[str, Any]:
        tensors = tc.ray.ray_to_torch(batch)
        columns = {name: value for name, value in tensors.items() if name.startswith("many.")}
        columns["ragged"] = [tensor * 3 for tensor in tensors["ragged"]]
        columns["many.float16"] = tensors["many.float16"].float() + 1
        columns["extra.depth"] = torch.ones(len(batch["ragged"]), 2, dtype=torch.bfloat16)
        prompts = np.array([text.upper() for text in batch["text.prompt"]])
        return {**batch, **tc.ray.ray_from_torch(columns, batch), "text.prompt": prompts}

    dataset = tc.ray.read_ray(write_cache(nested, 12)).drop_columns(["many.bool"]).map_batches(change, batch_size=5)
    cache = tc.ray.write_ray(dataset, tmp_path / "out")
    for i in range(12):
        expected, sample = nested(i), tc.realize(cache[f"{i:04d}"])
        del expected["many"]["bool"]
        expected["many"]["float16"] = expected["many"]["float16"].float() + 1
        expected["ragged"] *= 3
        expected["text"]["prompt"] = f"PHOTO {i}"
        expected["extra"] = {"depth": torch.ones(2, dtype=torch.bfloat16)}
        assert_same(in_order(expected), in_order(sample))


def test_ints_that_became_floats(tmp_path: Path) -> None:
    """numpy makes an int a float if another row lacks it, and so rounds it beyond 2^53."""
    ids = [3, None, (1 << 60) + 1, None]
    samples = [{"x": torch.ones(1)} | ({"id": number} if number else {}) for number in ids]
    rows = tc.ray.read_ray(write_samples(tmp_path / "in", samples)).repartition(1)
    with pytest.raises(tc.EncodeError, match="column 'id' has an int near 1152921504606846976.*batch_format='pyarrow'"):
        tc.ray.write_ray(rows.map_batches(lambda batch: batch, batch_format="numpy"), tmp_path / "numpy")
    for form in ("pandas", "pyarrow"):
        cache = tc.ray.write_ray(rows.map_batches(lambda batch: batch, batch_format=form), tmp_path / form)
        assert [sample.get("id") for sample in cache] == ids


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_unions_of_caches(tmp_path: Path, batch_format: str) -> None:
    """Rows of one cache get no items of the other, though numpy has NaN where a row lacks a number."""
    values = [{"n": 3, "score": 0.5}, {"m": 1 << 40, "weight": float("nan"), "text": "é", "is_old": True}]
    samples = [{"x": torch.full((2,), i).bfloat16(), **value} for i, value in enumerate(values)]
    parts = [tc.ray.read_ray(write_samples(tmp_path / f"{i}", {f"{i}": part})) for i, part in enumerate(samples)]
    rows = parts[0].union(parts[1]).repartition(1).map_batches(lambda batch: batch, batch_format=batch_format)
    cache = tc.ray.write_ray(rows, tmp_path / "out")
    for i, sample in enumerate(samples):
        assert_same(in_order(sample), in_order(tc.realize(cache[f"{i}"])))


@pytest.mark.parametrize("suffixes", [("", "_b"), ("_a", "_b")])
def test_joined_rows(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    """Ray's join adds suffixes to the columns that both datasets have; bfloat16 stays bfloat16."""
    samples = [
        {"x": torch.full((2,), 0.5).bfloat16(), "n": 1},
        {"x": torch.full((2,), 1.5).to(torch.float8_e4m3fn), "y": torch.full((3,), 2.5).bfloat16(), "m": 2},
    ]
    parts = [tc.ray.read_ray(write_samples(tmp_path / f"{i}", {"k": part})) for i, part in enumerate(samples)]
    tables = [part.take_batch(batch_format="pyarrow") for part in parts]
    shared = set.intersection(*(set(table.column_names) for table in tables)) - {"__key__"}
    columns = {
        name + suffix * (name in shared): table[name]
        for table, suffix in zip(tables, suffixes, strict=True)
        for name in table.column_names
    }
    sample = tc.realize(tc.ray.write_ray(ray.data.from_arrow(pa.table(columns)), tmp_path / "out")["k"])
    expected = {"x" + suffixes[0]: samples[0]["x"], "n": 1, "x_b": samples[1]["x"], "y": samples[1]["y"], "m": 2}
    assert_same(in_order(expected), in_order(sample))
    table = tables[0].append_column("x", tables[1]["x"])  # as Ray 2.60 joins columns of tensors
    with pytest.raises(tc.EncodeError, match="two columns have the name 'x'"):
        tc.ray.ray_to_torch(table)


def test_texts_and_bytes_in_one_column(tmp_path: Path) -> None:
    """Arrow makes one type of both, in functions of rows and of batches of numpy."""
    values = [f"é{i}" if i % 2 else b"x%d\0" % i for i in range(6)]
    samples = {f"{i}": {"x": torch.ones(1), "value": value} for i, value in enumerate(values)}
    rows = tc.ray.read_ray(write_samples(tmp_path / "in.tar", samples)).repartition(1)
    for name, same in (
        ("rows", rows.map(lambda row: row)),
        ("batches", rows.map_batches(lambda batch: batch, batch_format="numpy").repartition(6)),
    ):
        cache = tc.ray.write_ray(same, tmp_path / name)
        assert [cache[f"{i}"]["value"] for i in range(len(cache))] == values


def test_dtypes_that_differ_between_samples(tmp_path: Path) -> None:
    """Bits of bfloat16 beside float16 became float32 numbers, 1.5 was 16320. A later filter left only rows that were wrong."""
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e5m2)
    samples = {
        f"{i}": {"x": torch.full((2,), 1.5 + i).to(dtypes[i % 3]), "n": torch.tensor(1.5).to(dtypes[i % 3])}
        for i in range(6)
    }
    rows = tc.ray.read_ray(write_samples(tmp_path / "in.tar", samples), override_num_blocks=1)
    for name, same in (
        ("rows", rows.map(lambda row: row)),
        ("numpy", rows.map_batches(lambda batch: batch, batch_format="numpy").map(lambda row: row)),
        ("pandas", rows.map_batches(lambda batch: batch, batch_format="pandas")),
    ):
        kept = same.filter(expr=(col("__key__") == "0") | (col("__key__") == "3")).materialize()
        cache = tc.ray.write_ray(kept, tmp_path / name)
        assert_same({key: samples[key] for key in ("0", "3")}, {key: tc.realize(cache[key]) for key in ("0", "3")})
        for row in kept.take_all():
            assert_same(in_order(samples[row["__key__"]]), in_order(tc.ray.ray_sample(row)))
        assert_same(torch.tensor([1.5, 1.5]).bfloat16(), tc.ray.ray_to_torch(kept.take_batch())["n"])
    changed = rows.map(lambda row: {**row, "x": tc.ray.ray_sample(row)["x"].half().numpy()})
    cache = tc.ray.write_ray(changed, tmp_path / "changed")
    for key in samples:
        assert_same(samples[key]["x"].half(), cache[key]["x"].load())


@pytest.mark.parametrize("number", [1, 1.0])
def test_numbers_in_place_of_tensors(tmp_path: Path, number: float) -> None:
    """1 became 1e-40, because the numbers of a column of bfloat16 without dimensions were bits."""
    samples = {f"{i}": {"x": torch.tensor(1.5).bfloat16(), "y": torch.tensor(1.5).half()} for i in range(2)}
    rows = tc.ray.read_ray(write_samples(tmp_path / "in.tar", samples), override_num_blocks=1)
    rows = rows.map(lambda row: {**row, "x": number} if row["__key__"] == "0" else row)
    cache = tc.ray.write_ray(rows, tmp_path / "out")
    assert_same(samples | {"0": samples["0"] | {"x": number}}, {key: tc.realize(cache[key]) for key in samples})


def test_times_that_python_cannot_hold(tmp_path: Path) -> None:
    def write(nanoseconds: int, out: Path) -> Any:
        times = pa.array([nanoseconds], pa.time64("ns"))
        return tc.ray.write_ray(ray.data.from_arrow(pa.table({"id": [0], "time": times})), out, key="id")

    assert write(1_000, tmp_path / "exact")["0"] == {"time": datetime.time(microsecond=1)}
    with pytest.raises(tc.EncodeError, match="column 'time' has times more precise than datetime.time"):
        write(1_001, tmp_path / "cut")
    frame = pd.DataFrame({"id": [0], "time": np.array([1_001], "M8[ns]"), "pause": np.array([5], "m8[ns]")})
    sample = tc.ray.write_ray(ray.data.from_pandas(frame), tmp_path / "pandas", key="id")["0"]
    assert_same({"time": np.datetime64(1_001, "ns"), "pause": np.timedelta64(5, "ns")}, sample)


def test_columns_that_are_not_the_sample(every_kind_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(tc.EncodeError, match=r"sample '\d+'.*exact=True"):
        tc.ray.write_ray(tc.ray.read_ray(every_kind_cache), tmp_path / "out")
    assert files(tmp_path / "out") == []

    def score(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "scores.first": tc.ray.ray_sample(row)["i"] * 2}

    rows = tc.ray.read_ray(every_kind_cache, exact=True).map(score)
    check(tc.ray.write_ray(rows, tmp_path / "out"), sample=lambda i: {**every_kind(i), "scores": {"first": i * 2}})
    with pytest.raises(tc.EncodeError, match="'latent' has no place"):
        tc.ray.write_ray(rows.map(lambda row: {**row, "latent": 1}), tmp_path / "other")


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


def test_tables_of_samples(tmp_path: Path) -> None:
    def make(batch: dict[str, Any]) -> Any:
        numbers = batch["id"].tolist()
        return tc.ray.ray_table([f"{i:04d}" for i in numbers], list(map(every_kind, numbers)))

    dataset = ray.data.range(30, override_num_blocks=3).map_batches(make, batch_size=5)
    cache = tc.ray.write_ray(dataset.materialize(), tmp_path / "out", min_samples=15, max_samples=8)
    check(cache, range(30))
    assert 4 <= cache.num_shards <= 5


def test_nothing_to_write(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=8)
    assert len(tc.ray.write_ray(dataset.filter(expr=col("__key__") < ""), tmp_path / "a")) == 0
    nothing = ray.data.from_arrow(pa.table({"__key__": pa.array([], pa.string())}))
    assert len(tc.ray.write_ray(nothing, tmp_path / "b")) == 0
    check(tc.ray.write_ray(dataset.filter(expr=col("__key__") == "0007"), tmp_path / "c"), range(7, 8))


def test_keys_occur_once(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=4)
    with pytest.raises(tc.InvalidKeyError, match="0000"):
        tc.ray.write_ray(dataset.union(dataset), tmp_path / "twice")
    with pytest.raises(tc.InvalidKeyError, match=r"^key 'same' is already in .*, or resume=True to skip it$"):
        tc.ray.write_ray(dataset.map(lambda row: {**row, "__key__": "same"}), tmp_path / "twice")
    with pytest.raises(KeyError, match="no column 'no_such_column' among .*; pass key=…\"$"):
        tc.ray.write_ray(dataset, tmp_path / "twice", key="no_such_column")
    with pytest.raises(
        tc.InvalidKeyError, match=r"^column '__skeleton__' has a bytes as key, expected text or integers: b'.{98}$"
    ) as caught:
        tc.ray.write_ray(dataset, tmp_path / "twice", key="__skeleton__")
    assert caught.value.__cause__ is None  # Python shows no traceback of the task
    assert caught.value.__suppress_context__
    assert files(tmp_path / "twice") == []


def test_a_failure_leaves_nothing(every_kind_cache: Path, tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["__key__"] == "0037":
            raise ZeroDivisionError("no sample 37")
        return row

    dataset = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=5).map(fail)
    with pytest.raises(ray.exceptions.RayTaskError, match="no sample 37"):
        tc.ray.write_ray(dataset, tmp_path / "out", max_samples=2)
    assert files(tmp_path / "out") == []


def test_killed_workers(tmp_path: Path, rng: Seeded) -> None:
    """`python -m tests.ray_kills` does it often."""
    assert min(write_and_read(tmp_path, 1, rng.seed_value)) >= 1


def test_what_is_in_the_folder(every_kind_cache: Path, tmp_path: Path) -> None:
    dataset, out = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=2), tmp_path / "out"
    first = dataset.filter(expr=col("__key__") < "0010")
    tc.ray.write_ray(first, out)
    before = files(out)
    with pytest.raises(FileExistsError, match="append=True"):
        tc.ray.write_ray(dataset, out)
    with pytest.raises(tc.InvalidKeyError, match="0000"):
        tc.ray.write_ray(dataset, out, append=True)
    assert files(out) == before
    keys = list(tc.open(out).keys())
    cache = tc.ray.write_ray(dataset.filter(expr=col("__key__") >= "0010"), out, append=True)
    assert list(cache.keys())[:10] == keys
    check(cache)
    replaced = tc.ray.write_ray(first, out, overwrite=True)
    assert sorted(replaced.keys()) == sorted(keys)
    assert len([name for name in files(out) if name.endswith(".tar")]) == replaced.num_shards
    assert tc.verify(out).ok
    with pytest.raises(ValueError, match="overwrite"):
        tc.ray.write_ray(first, out, overwrite=True, append=True)
    with pytest.raises(ValueError, match="%"):
        tc.ray.write_ray(first, tmp_path / "100%")
    assert not (tmp_path / "100%").exists()
    with pytest.raises(TypeError, match="max_sample"):
        tc.ray.write_ray(first, out, overwrite=True, max_sample=3)
    for limit in ("max_samples", "max_nbytes"):
        with pytest.raises(ValueError, match=f"^{limit}=0, expected at least 1$"):
            tc.ray.write_ray(first, tmp_path / "limits", **{limit: 0})  # type: ignore[arg-type]
    assert not (tmp_path / "limits").exists()


def test_several_writes_at_once(every_kind_cache: Path, tmp_path: Path) -> None:
    """The first one waits in a task, until the others have been refused or have finished."""
    dataset = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=1)
    out, gate = tmp_path / "out", tmp_path / "gate"

    def wait(row: dict[str, Any]) -> dict[str, Any]:
        while not gate.exists():
            time.sleep(0.01)
        return row

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tc.ray.write_ray, dataset.map(wait), out)
        while not (out / "manifest.json").exists():  # from then on, the first one has looked for others
            assert not first.done()
            time.sleep(0.01)
        for options in ({}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match="in progress"):
                tc.ray.write_ray(dataset, out, **options)  # type: ignore[arg-type]
        with pytest.raises(FileExistsError, match="in progress"):
            tc.ray.build_ray(dataset, dict, out, fingerprint={})
        with pytest.raises(FileNotFoundError):
            tc.open(out)  # an empty manifest hides the shards
        appended = tc.ray.write_ray(dataset.filter(expr=col("__key__") < "0004"), out, append=True)
        gate.touch()
        with pytest.raises(FileExistsError, match="meanwhile"):
            first.result()
    check(appended, range(4))
    assert len(list(out.glob("*.tar"))) == appended.num_shards


def test_a_late_task_leaves_nothing(every_kind_cache: Path, tmp_path: Path) -> None:
    """A task whose write has ended finds no marker in the folder."""
    out = tmp_path / "out"

    def end(table: Any) -> Any:
        for path in out.glob(".ray-*.writing"):
            path.unlink()
        return table

    dataset = tc.ray.read_ray(every_kind_cache, exact=True).map_batches(end, batch_format="pyarrow")
    with pytest.raises(RuntimeError, match="has ended"):
        tc.ray.write_ray(dataset, out)
    assert files(out) == []
