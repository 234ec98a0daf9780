"""Statistics agree with numpy on all values at once, for every dtype, and memory and results are bounded."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from wds_tensorcache.codec.dtypes import TORCH_TRUE
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.inspecting import values as values_module
from wds_tensorcache.inspecting.histogram import Bins, Histogram
from wds_tensorcache.inspecting.repeats import RepeatCounter
from wds_tensorcache.inspecting.statistics import TensorStatistics, collect_statistics
from wds_tensorcache.inspecting.values import Moments, measure

_FINITE = st.floats(allow_nan=False, allow_infinity=False)


def _lazy(value: Any) -> Lazy:
    found: Lazy = tc.decode_sample(*tc.encode_sample({"x": value}))["x"]
    return found


def _write(folder: Path, samples: dict[str, Any], **members: Any) -> Path:
    with tc.ShardWriter(folder / "%d.tar", max_samples=3, fsync=False) as sink:
        for key, sample in samples.items():
            sink.write(key, sample, **members)
    return folder


def _counted(found: Histogram, values: np.ndarray[Any, Any]) -> list[int]:
    """Count values by the definition of the histogram's bins."""
    places = [found.begin + i * found.width for i in range(len(found.counts) + 1)]
    inside = [int(((values >= a) & (values < b)).sum()) for a, b in itertools.pairwise(places)]
    return [int((values < places[0]).sum()), *inside, int((values >= places[-1]).sum())]


@given(st.lists(st.lists(_FINITE, min_size=1, max_size=9), min_size=1, max_size=6))
def test_no_value_is_in_a_wrong_bin(parts: list[list[float]]) -> None:
    bins = Bins()
    for part in parts:
        bins.add(np.array(part))
    values = np.array([value for part in parts for value in part])
    found = bins.histogram()
    assert found is not None
    assert len(found.counts) <= 64
    assert sum(found.counts) + found.num_below + found.num_above == len(values)
    if np.isfinite(found.begin + (len(found.counts) + 1) * found.width):
        assert [found.num_below, *found.counts, found.num_above] == _counted(found, values)
    assert max(found.num_below, found.num_above) <= 0.001 * len(values)


@given(st.lists(st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1), min_size=1, max_size=6))
def test_bins_of_integers(parts: list[list[int]]) -> None:
    bins = Bins(is_whole=True)
    for part in parts:
        bins.add(np.array(part, np.float64))
    values = np.array([value for part in parts for value in part], np.float64)
    found = bins.histogram()
    assert found is not None
    assert found.width >= 1
    assert [found.num_below, *found.counts, found.num_above] == _counted(found, values)


def test_outliers_do_not_flatten_a_histogram() -> None:
    bins = Bins()
    values = np.random.default_rng(0).normal(size=100_000)
    bins.add(values)
    bins.add(np.array([100.0, -250.0]))
    found = bins.histogram()
    assert found is not None
    assert sum(count > 500 for count in found.counts) >= 16
    assert found.num_below + sum(found.counts) + found.num_above == 100_002
    assert found.num_below >= 1
    assert found.num_above >= 1
    assert found.begin > -10


@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_TRUE if "float4" not in str(dtype)], ids=str)
def test_values_of_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "_PART_NBYTES", 64)
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (60, dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    tensor = raw.view(dtype).reshape(5, 12)
    whole = torch.view_as_real(tensor) if dtype.is_complex else tensor
    array = (whole if not dtype.is_floating_point or dtype is torch.float64 else whole.float()).numpy().reshape(-1)
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    found = measure(_lazy(tensor))
    assert found is not None
    assert found.num_values == array.size
    assert found.num_nan == (np.isnan(array).sum() if array.dtype.kind == "f" else 0)
    assert found.num_nan + found.num_inf == array.size - finite.size
    assert found.num_zero == (array == 0).sum()
    assert found.min == finite.min().item()
    assert found.max == finite.max().item()
    if np.abs(finite.astype(np.float64)).max() < 1e100:
        assert found.mean == pytest.approx(finite.astype(np.float64).mean())
        assert found.std == pytest.approx(finite.astype(np.float64).std())
    assert found.histogram is not None
    assert found.histogram.num_below + sum(found.histogram.counts) + found.histogram.num_above == finite.size


def test_moments_without_a_histogram() -> None:
    with_bins, without = Moments(), Moments(has_histogram=False)
    for part in (np.array([1.5, np.nan, -3.0]), np.array([2.0])):
        with_bins.add(part)
        without.add(part)
    assert with_bins.result().histogram is not None
    assert without.result() == dataclasses.replace(with_bins.result(), histogram=None)


def test_integers_are_exact() -> None:
    found = measure(_lazy(torch.tensor([2**63 - 1, -(2**63), 5])))
    assert found is not None
    assert (found.min, found.max) == (-(2**63), 2**63 - 1)
    found = measure(_lazy(np.array([2**64 - 1, 2**64 - 3], np.uint64)))
    assert found is not None
    assert (found.min, found.max) == (2**64 - 3, 2**64 - 1)


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "b"]), np.array([b"x"]), np.array(["2020-01-01"], "M8[D]"), torch.zeros(3, dtype=torch.uint8)],
)
def test_text_has_no_numbers(value: Any) -> None:
    assert (measure(_lazy(value)) is None) == isinstance(value, np.ndarray)


@pytest.mark.parametrize("value", [torch.zeros(0, 4), torch.tensor([float("nan"), float("inf"), -float("inf")])])
def test_nothing_finite(value: torch.Tensor) -> None:
    found = measure(_lazy(value))
    assert found is not None
    assert (found.min, found.max, found.mean, found.std, found.histogram) == (None,) * 5
    assert (found.num_values, found.num_nan, found.num_inf) == ((3, 1, 2) if value.numel() else (0, 0, 0))


def test_a_bool_that_is_none_names_its_place(tmp_path: Path) -> None:
    folder = _write(tmp_path / "cache", {"a": {"m": torch.ones(64, dtype=torch.bool)}})
    shard = folder / "0.tar"
    content = shard.read_bytes()
    at = content.index(b"\1" * 64)
    shard.write_bytes(content[:at] + b"\7" + content[at + 1 :])
    with tc.open(folder) as cache, pytest.raises(tc.FormatError, match=r"sample 'a': tensor 'm'"):
        collect_statistics(cache)


def test_a_cache(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    samples: dict[str, Any] = {
        f"{i}": {"x": torch.randn(2 + i % 2, 8, generator=chance).half(), "same": torch.ones(50), "n": i, "t": "text"}
        for i in range(8)
    }
    samples["3"]["x"][0, 0] = float("nan")
    samples["5"]["x"][0, :2] = float("inf")
    samples["6"]["more"] = samples["7"]["more"] = np.arange(10)
    with tc.open(_write(tmp_path / "cache", samples, json={"a": 1})) as cache:
        found, some = collect_statistics(cache), collect_statistics(cache, 2)
    assert (found.num_samples, found.num_shards, found.num_examined) == (8, 3, 8)
    assert found.members == {"json": 8}
    by_name = {each.name: each for each in found.tensors}
    assert set(by_name) == {"x", "same", "more"}
    x = by_name["x"]
    values = torch.cat([sample["x"].flatten() for sample in samples.values()]).double().numpy()
    finite = values[np.isfinite(values)]
    assert x.values is not None
    assert (x.values.num_values, x.values.num_nan, x.values.num_inf) == (len(values), 1, 2)
    assert (x.values.min, x.values.max) == (finite.min(), finite.max())
    assert x.values.mean == pytest.approx(finite.mean())
    assert x.values.std == pytest.approx(finite.std())
    assert (x.num_not_finite, x.not_finite) == (2, ("3", "5"))
    assert (x.dtypes, x.shape, x.num_shapes, x.num_samples) == (("float16",), ((2, 3), 8), 2, 8)
    assert (by_name["more"].kind, by_name["more"].num_samples, by_name["more"].num_examined) == ("ndarray", 2, 2)
    # seven copies of `same`, and one of `more`
    assert (found.repeats.num_tensors, found.repeats.nbytes) == (8, 7 * 200 + 80)
    assert not found.repeats.is_estimate
    assert [(each.name, each.key, each.count) for each in found.repeats.most] == [("same", "0", 8), ("more", "6", 2)]
    assert found.sample_nbytes.max == 3 * 8 * 2 + 200 + 80
    assert {each.name for each in found.values} == {"n", "t"}
    assert some.num_examined == 2
    assert (some.nbytes, some.num_samples) == (found.nbytes, 8)
    assert {each.num_examined for each in some.tensors} == {2, 0}
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_equal_bytes_of_two_dtypes_are_two_tensors(tmp_path: Path) -> None:
    folder = _write(tmp_path / "cache", {"a": {"x": torch.zeros(8)}, "b": {"x": torch.zeros(8, dtype=torch.int32)}})
    with tc.open(folder) as cache:
        found = collect_statistics(cache)
    assert found.repeats.num_tensors == 0
    assert found.tensors[0].dtypes == ("float32", "int32")


def test_repeats_in_bounded_memory() -> None:
    counter, chance = RepeatCounter(max_known=512), np.random.default_rng(1)
    digests = chance.integers(0, 1 << 63, 20_000)
    for digest in np.concatenate([digests, digests, digests[:10_000]]).tolist():
        counter.add(digest, "x", "key", 10)
    assert len(counter._known) <= 512
    found = counter.result()
    assert found.is_estimate
    assert found.num_tensors == pytest.approx(30_000, rel=0.2)
    assert found.nbytes == 10 * found.num_tensors
    assert len(found.most) == 20


def test_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_tensorcache.inspecting.statistics._MAX_TENSORS", 3)
    folder = _write(tmp_path / "cache", {"a": {f"t{i}": torch.full((2,), i) for i in range(5)}})
    with tc.open(folder) as cache:
        found = collect_statistics(cache)
    examined: list[TensorStatistics] = [each for each in found.tensors if each.values is not None]
    assert (len(found.tensors), len(examined)) == (5, 3)
