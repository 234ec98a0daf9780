"""Caches as datasets: rows are the samples, columns have Ray's types, tasks are balanced, only selected bytes are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.ray_data.conftest import by_key, every_kind
from tests.reading.batches import write
from tests.same import assert_same

pytestmark = pytest.mark.long


def test_columns(every_kind_cache: Path) -> None:
    schema = tc.ray.read_ray(every_kind_cache).schema()
    types = {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
    assert types["latent"] == "ArrowTensorTypeV2(shape=(4, 8, 8), dtype=halffloat)"
    assert types["cond.0.0"] == "ArrowVariableShapedTensorType(ndim=2, dtype=uint16)"
    assert types["cond.0.1.pooled"] == "ArrowTensorTypeV2(shape=(16,), dtype=uint16)"
    assert types["complex"] == "ArrowTensorTypeV2(shape=(2, 2), dtype=float)"
    assert types["mask"] == "ArrowVariableShapedTensorType(ndim=2, dtype=uint8)"
    assert (types["i"], types["weight"], types["raw"]) == ("int64", "double", "binary")
    assert (types["__key__"], types["cond.0.1.prompt"], types["__tensorcache__"]) == ("string", "string", "string")


def test_optional_tensors_survive_shuffles_and_functions(every_kind_cache: Path) -> None:
    """Some batches of the function have the tensor in all of their rows, some in a part, some in none."""
    dataset = tc.ray.read_ray(every_kind_cache, ["mask", "float8"], override_num_blocks=3)
    assert sum(batch["mask"].null_count for batch in dataset.iter_batches(batch_format="pyarrow")) == 14
    dataset = dataset.random_shuffle(seed=1).sort("i").materialize()
    for batch_size in (1, 2, 40):
        changed = dataset.map_batches(lambda batch: batch, batch_size=batch_size, batch_format="numpy")
        for batch in changed.iter_torch_batches(batch_size=13, collate_fn=tc.ray.ray_collate()):
            for key, mask in zip(batch["__key__"], batch["mask"], strict=True):
                assert_same(every_kind(int(key)).get("mask"), mask if mask is None else mask.clone())


def test_torch_batches_have_the_dtypes_of_the_cache(every_kind_cache: Path) -> None:
    names = ("latent", "float8", "bools", "complex", "number", "empty", "cond.0.0", "cond.0.1.pooled")
    keys = []
    dataset = tc.ray.read_ray(every_kind_cache)
    for batch in dataset.iter_torch_batches(batch_size=13, collate_fn=tc.ray.ray_collate()):
        assert "__tensorcache__" not in batch
        assert batch["cond.0.1.pooled"].dtype == torch.bfloat16
        assert batch["number"].shape == (len(batch["__key__"]),)
        for at, key in enumerate(batch["__key__"]):
            expected = every_kind(int(key))
            expected |= {"cond.0.0": expected["cond"][0][0], "cond.0.1.pooled": expected["cond"][0][1]["pooled"]}
            for name in names:
                assert_same(expected[name], batch[name][at].clone())
            assert batch["i"][at] == expected["i"]
            assert batch["cond.0.1.size"][at] == expected["cond"][0][1]["size"]
        keys += batch["__key__"]
        batch["latent"].zero_()  # its memory is not Ray's
    assert sorted(keys) == [f"{i:04d}" for i in range(40)]
    (batch,) = dataset.select_columns(["cond.0.1.pooled"]).iter_torch_batches(
        batch_size=40, collate_fn=tc.ray.ray_collate(dtypes={"cond.0.1.pooled": torch.bfloat16})
    )
    assert {name: tensor.dtype for name, tensor in batch.items()} == {"cond.0.1.pooled": torch.bfloat16}


def test_projection_reads_only_those_bytes(write_cache: Callable[..., Path]) -> None:
    """Bools that are bytes other than 0 and 1 are refused by whatever reads them."""
    folder = write_cache(lambda i: {"a": torch.full((4,), i), "b": torch.ones(3000, dtype=torch.bool), "i": i}, 20)
    shard = folder / "000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"\1" * 3000, b"\7" * 3000))
    selected = tc.ray.read_ray(folder, "a")
    assert [row["a"].tolist() for row in by_key(selected)] == [[i] * 4 for i in range(20)]
    pushed = by_key(tc.ray.read_ray(folder).select_columns(["i", "__key__", "a"]))
    assert [(row["i"], row["a"].tolist()) for row in pushed] == [(i, [i] * 4) for i in range(20)]
    assert by_key(tc.ray.read_ray(folder).select_columns("__key__"))[7] == {"__key__": "0007"}
    with pytest.raises(tc.FormatError, match="bool"):
        tc.ray.read_ray(folder).take_all()
    with pytest.raises(KeyError, match="unknown column 'aa'; there are 'a', "):
        tc.ray.read_ray(folder).select_columns(["aa"]).take_all()


def test_a_value_that_few_samples_have(write_cache: Callable[..., Path]) -> None:
    """Blocks without it keep their rows."""
    rare = 2  # not among the 64 samples that `read_ray` examines
    folder = write_cache(lambda i: {"i": i, "rare": 5} if i == rare else {"i": i}, 100)
    rows = tc.ray.read_ray(folder, override_num_blocks=4).select_columns(["rare"]).take_all()
    assert sorted(row["rare"] or 0 for row in rows) == [0] * 99 + [5]


def test_views_and_options(every_kind_cache: Path) -> None:
    with tc.open(every_kind_cache) as cache:
        view = cache[[7, 3, 5]].select("latent")
        rows = tc.ray.read_ray(view, override_num_blocks=1).take_all()
        assert [row["__key__"] for row in rows] == ["0007", "0003", "0005"]
        assert_same(torch.from_numpy(rows[0]["latent"].copy()), every_kind(7)["latent"])
        assert "float8" not in rows[0]
        assert tc.ray.read_ray(view[:0]).take_all() == []
        (row,) = tc.ray.read_ray(view[:1], exact=True).take_all()
        assert list(tc.flatten(tc.decode_sample(row["__skeleton__"], row["__tensors__"]))) == ["latent"]
        with pytest.raises(TypeError, match="num_threads"):
            tc.ray.read_ray(cache, num_threads=1)
        joined = tc.join({"a": view, "b": view})
        with pytest.raises(TypeError, match=r"JoinedCache.*tc\.build\(source, lambda .*\); or read each"):
            tc.ray.read_ray(joined)
    with pytest.raises(TypeError, match="no_option"):
        tc.ray.read_ray(every_kind_cache, no_option=1)
    with pytest.raises(KeyError, match="latnet"):
        tc.ray.read_ray(every_kind_cache, "latnet")


def test_classes_of_an_open_cache(tmp_path: Path) -> None:
    address = IPv4Address("192.0.2.1")
    folder = write(tmp_path / "cache", [{"address": address}], allow=[IPv4Address])
    for cache in (folder, tc.open(folder, allow=[IPv4Address])):
        options: dict[str, Any] = {} if isinstance(cache, tc.TensorCache) else {"allow": iter([IPv4Address])}
        (row,) = tc.ray.read_ray(cache, exact=True, **options).take_all()
        assert tc.ray.ray_sample(row, allow=[IPv4Address]) == {"address": address}


def test_ray_is_missing() -> None:
    script = "import sys; sys.modules['ray'] = None; import wds_tensorcache as tc; tc.ray"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'wds-tensorcache[ray]'" in result.stderr.splitlines()[-1]


def test_tasks_have_about_equal_bytes(write_cache: Callable[..., Path]) -> None:
    folder = write_cache(lambda i: {"x": torch.zeros(10 * i * i)}, 100, max_samples=30)
    dataset = tc.ray.read_ray(folder, override_num_blocks=8)
    source = dataset._logical_plan.dag.datasource
    tasks = source.get_read_tasks(8)
    sizes = [task.metadata.size_bytes for task in tasks]
    assert sum(task.metadata.num_rows for task in tasks) == dataset.count() == 100
    assert len(tasks) == 8
    assert max(sizes) < 1.3 * min(sizes)
    assert sum(sizes) == sum(40 * i * i for i in range(100))
    assert len(source.get_read_tasks(1000)) <= 100
    assert source.estimate_inmemory_data_size() == sum(sizes)


def test_alternatives(write_cache: Callable[..., Path]) -> None:
    def sample(i: int) -> Any:
        return {"latent": torch.full((2,), i), "flipped": torch.full((2,), -i), "captions": [f"{i} a", f"{i} b"]}

    folder = write_cache(sample, 50)
    choose = {"latent": ["latent", "flipped"], "caption": "captions.*"}
    once, again = (
        [tc.ray.ray_sample(row) for row in by_key(tc.ray.read_ray(folder, choose=choose, seed=3, **options))]
        for options in ({"override_num_blocks": 1}, {"override_num_blocks": 5, "exact": True})
    )
    assert_same(once, again)
    for i, chosen in enumerate(once):
        assert chosen.keys() == {"latent", "caption"}
        assert chosen["latent"].abs().tolist() == [i, i]
        assert chosen["caption"] in sample(i)["captions"]
    assert len({(bool(chosen["latent"][0] < 0), chosen["caption"][-1]) for chosen in once}) == 4
