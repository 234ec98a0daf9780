"""Statistics agree with numpy on all values at once, for every dtype, and memory and results are bounded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.command import json_of, run
from tests.reading.batches import write

_DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
).split()


def _num_counted(histogram: dict[str, Any]) -> int:
    return int(histogram["num_below"] + sum(histogram["counts"]) + histogram["num_above"])


def _histograms(folder: Path, tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    write(folder, {"a": tensors})
    shown = json_of("show", folder, "a")["tensors"]
    histograms = {tensor["name"]: tensor["values"]["histogram"] for tensor in shown}
    assert all(len(histogram["counts"]) <= 64 for histogram in histograms.values())
    return histograms


def test_bins_of_whole_numbers(tmp_path: Path) -> None:
    cases = [[5], [0, 1], [-3, 70, 8, 8], range(200), [-(1 << 40), 1 << 40, 7], [0, 63], [0, 64]]
    tensors = {f"{numbers}": torch.tensor(numbers) for numbers in cases}
    for name, found in _histograms(tmp_path, tensors).items():
        values = tensors[name].numpy()
        assert found["width"] >= 1
        edges = [found["begin"] + i * found["width"] for i in range(len(found["counts"]) + 1)]
        assert found["counts"] == [((low <= values) & (values < high)).sum() for low, high in pairwise(edges)], name
        assert _num_counted(found) == len(values)


def test_every_value_is_in_the_histogram(tmp_path: Path) -> None:
    cases = [[0.5, 0.5], [-1e308, 1e308, 0.0], [1e-310, 2e-310], [0.0, 1e300] + [1.0] * 50]
    tensors = {f"{i}": torch.tensor(numbers, dtype=torch.float64) for i, numbers in enumerate(cases)}
    tensors["int64"] = torch.tensor([-(2**63), 2**63 - 1])
    for name, found in _histograms(tmp_path, tensors).items():
        assert _num_counted(found) == len(tensors[name])
        assert found["begin"] <= tensors[name].max()


def test_histograms_of_many_values(tmp_path: Path) -> None:
    """They are made from some of the values, and outliers do not flatten them."""
    chance = np.random.default_rng(0)
    found = _histograms(tmp_path, {"x": np.append(chance.normal(size=500_000), np.full(100, 1e6))})["x"]
    assert 4000 < sum(found["counts"]) <= 16_384
    assert sum(count > 30 for count in found["counts"]) >= 16
    assert found["num_above"] > 0
    assert -10 < found["begin"] < -2


def test_values_of_every_dtype(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(7)
    tensors = {}
    for dtype in (getattr(torch, name) for name in _DTYPES if hasattr(torch, name)):
        size = dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (60, size), generator=chance, dtype=torch.uint8)
        tensors[str(dtype).removeprefix("torch.")] = raw.view(dtype).reshape(5, 12)
    tensors["large"] = torch.arange(3_000_000).double()  # several parts
    write(tmp_path, {"a": tensors})
    shown = {tensor["name"]: tensor["values"] for tensor in json_of("show", tmp_path, "a")["tensors"]}
    for name, tensor in tensors.items():
        found = shown[name]
        if "float4" in name:
            assert found is None
            continue
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        array = (whole if whole.dtype is torch.float64 or not whole.is_floating_point() else whole.float()).numpy()
        finite = array[np.isfinite(array)]
        assert found["num_values"] == array.size
        assert found["num_nan"] == np.isnan(array).sum()
        assert found["num_nan"] + found["num_inf"] == array.size - finite.size
        assert found["num_zero"] == (array == 0).sum()
        assert (found["min"], found["max"]) == (finite.min().item(), finite.max().item())
        assert type(found["min"]) is not bool
        if np.abs(finite.astype(np.float64)).max() < 1e100:
            assert found["mean"] == pytest.approx(finite.astype(np.float64).mean())
            assert found["std"] == pytest.approx(finite.astype(np.float64).std())
        assert _num_counted(found["histogram"]) == finite.size or name == "large"


def test_values(tmp_path: Path) -> None:
    cases: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
        "int64": (torch.tensor([2**63 - 1, -(2**63), 5]), (3, -(2**63), 2**63 - 1)),
        "uint64": (np.array([2**64 - 1, 2**64 - 3], np.uint64), (2, 2**64 - 3, 2**64 - 1)),
        "empty": (torch.zeros(0, 4), (0, None, None)),
        "not finite": (torch.tensor([float("nan"), float("inf"), -float("inf")]), (3, None, None)),
        "text": (np.array(["a", "b"]), None),
        "bytes": (np.array([b"x"]), None),
        "date": (np.array(["2020-01-01"], "M8[D]"), None),
    }
    write(tmp_path, {"a": {name: value for name, (value, _) in cases.items()}})
    for tensor in json_of("show", tmp_path, "a")["tensors"]:
        found, expected = tensor["values"], cases[tensor["name"]][1]
        if expected is None:
            assert found is None
        else:
            assert (found["num_values"], found["min"], found["max"]) == expected
            is_empty = expected[1] is None
            assert (found["mean"] is None, found["std"] is None, found["histogram"] is None) == (is_empty,) * 3


def test_constants(tmp_path: Path) -> None:
    """They have no deviation: neither their sum is rounded, nor does it overflow."""
    values = {
        "tenth": (0.1, torch.float64),
        "large": (-1.7976931348623157e308, torch.float64),
        "int": (2**62 + 1, torch.int64),
    }
    tensors = {name: torch.full((1000,), value, dtype=dtype) for name, (value, dtype) in values.items()}
    write(tmp_path, {"a": tensors, "b": tensors})
    for tensor in json_of("stats", tmp_path)["tensors"]:
        value = values[tensor["name"]][0]
        assert (tensor["values"]["mean"], tensor["values"]["std"]) == (float(value), 0)


def test_a_bool_that_is_none_names_its_place(tmp_path: Path) -> None:
    shard = Path(write(tmp_path / "0.tar", {"a": {"m": torch.ones(64, dtype=torch.bool)}}))
    content = shard.read_bytes()
    at = content.index(b"\1" * 64)
    shard.write_bytes(content[:at] + b"\7" + content[at + 1 :])
    for arguments in (["stats", shard], ["show", shard, "a"]):
        assert "sample 'a': tensor 'm'" in run(*arguments, status=1).stderr


def test_a_cache(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    samples: dict[str, Any] = {
        f"{i}": {"x": torch.randn(2 + i % 2, 8, generator=chance).half(), "same": torch.ones(50), "n": i, "t": "text"}
        for i in range(8)
    }
    samples["3"]["x"][0, 0] = float("nan")
    samples["5"]["x"][0, :2] = float("inf")
    samples["6"]["more"] = samples["7"]["more"] = np.arange(10)
    folder = write(tmp_path / "cache", samples, lambda i: {"json": {"a": 1}}, max_samples=3)
    found, some = json_of("stats", folder), json_of("stats", folder, "--samples", 2)
    assert (found["num_samples"], found["num_shards"], found["num_examined"]) == (8, 3, 8)
    assert found["members"] == {"json": 8}
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(by_name) == {"x", "same", "more"}
    x, more = by_name["x"], by_name["more"]
    values = torch.cat([sample["x"].flatten() for sample in samples.values()]).double().numpy()
    finite = values[np.isfinite(values)]
    assert (x["values"]["num_values"], x["values"]["num_nan"], x["values"]["num_inf"]) == (len(values), 1, 2)
    assert (x["values"]["min"], x["values"]["max"]) == (finite.min(), finite.max())
    assert x["values"]["mean"] == pytest.approx(finite.mean())
    assert x["values"]["std"] == pytest.approx(finite.std())
    assert _num_counted(x["values"]["histogram"]) == len(finite)
    assert (x["num_not_finite"], x["not_finite"]) == (2, ["3", "5"])
    assert (x["dtypes"], x["shape"], x["num_shapes"], x["num_samples"]) == (["float16"], [[2, 3], 8], 2, 8)
    assert (more["kind"], more["num_samples"], more["num_examined"]) == ("ndarray", 2, 2)
    # seven copies of `same`, and one of `more`
    assert (found["repeats"]["num_tensors"], found["repeats"]["nbytes"]) == (8, 7 * 200 + 80)
    most = [(repeat["name"], repeat["key"], repeat["count"]) for repeat in found["repeats"]["most"]]
    assert (most, found["repeats"]["is_partial"]) == ([("same", "0", 8), ("more", "6", 2)], False)
    assert found["sample_nbytes"]["max"] == 3 * 8 * 2 + 200 + 80
    assert {value["name"] for value in found["values"]} == {"n", "t"}
    assert some["num_examined"] == 2
    assert (some["nbytes"], some["num_samples"]) == (found["nbytes"], 8)
    assert {tensor["num_examined"] for tensor in some["tensors"]} == {2, 0}


def test_equal_bytes_of_two_dtypes_are_two_tensors(tmp_path: Path) -> None:
    samples = {"a": {"x": torch.zeros(8)}, "b": {"x": torch.zeros(8, dtype=torch.int32)}}
    stats = json_of("stats", write(tmp_path, samples))
    assert stats["repeats"]["num_tensors"] == 0
    assert stats["tensors"][0]["dtypes"] == ["float32", "int32"]


def test_many_names(tmp_path: Path) -> None:
    stats = json_of("stats", write(tmp_path, {"a": {f"t{i}": torch.full((2,), i) for i in range(1200)}}))
    assert len(stats["tensors"]) == 1200
    assert sum(tensor["values"] is not None for tensor in stats["tensors"]) == 1000
