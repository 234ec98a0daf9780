"""A TensorCache behaves as the list of what was written, for every access, in every thread and process."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests import strategies
from tests.conftest import diffusion_sample
from tests.reading.batches import assert_all_same, folder_of, write
from tests.same import assert_same

COUNT = 20
WRITTEN = [diffusion_sample(i) for i in range(COUNT)]
KEYS = [f"{i:03d}" for i in range(COUNT)]
folder = folder_of(WRITTEN, max_samples=7)


@settings(max_examples=40)
@given(st.lists(strategies.samples(), min_size=1, max_size=5), st.integers(1, 3))
def test_samples_are_read_as_written(samples: list[Any], max_samples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), samples, max_samples=max_samples)
        with tc.open(folder) as cache:
            assert len(cache) == len(samples)
            for i, sample in enumerate(samples):
                assert_same(sample, cache[i])
                assert_same(sample, cache[i - len(samples)])
                assert_same(sample, cache[f"{i:03d}"])
            assert_all_same(samples, list(cache))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([0, COUNT], IndexError, r"indices\[1\] = 20 out of range \[0, 20\)"),
        ([-COUNT - 1], IndexError, r"indices\[0\] = -21 out of range"),
        ([2**64 - 1], IndexError, r"indices\[0\] = 18446744073709551615 out of range"),
        (["000", "absent"], KeyError, "no sample 'absent' among the 20"),
        ([0.0], TypeError, "indices must be a sequence of ints or keys"),
        ([True], TypeError, "indices must be a sequence of ints or keys"),
        (np.zeros(0, bool), TypeError, "or a mask of 20 bools"),
        ([[0, 1], [2, 3]], TypeError, "indices must be a sequence of ints or keys"),
        ("000", TypeError, "indices must be a sequence of ints or keys, got '000'"),
    ],
    ids=str,
)
def test_indices_that_are_not_there(cache: tc.TensorCache, wrong: Any, error: type[Exception], message: str) -> None:
    for ask in (cache.__getitems__, cache.read_batch):
        with pytest.raises(error, match=message):
            ask(wrong)


@pytest.mark.parametrize(
    "index", [1.0, None, True, torch.tensor(True), b"000", (1,), np.array([[1, 2]]), [1.5], slice("a", "b")]
)
def test_not_an_index(cache: tc.TensorCache, index: Any) -> None:
    with pytest.raises(TypeError):
        cache[index]


def test_keys(cache: tc.TensorCache) -> None:
    keys = cache.keys()
    assert [keys[i] for i in range(-COUNT, COUNT)] == KEYS * 2
    assert list(keys[3:9][::-2]) == KEYS[3:9][::-2]
    assert "007" in keys
    assert "7" not in keys
    assert keys.index("012") == cache.index("012") == cache.index("012", 3, 13) == 12
    assert cache[[5, 3, 5]].index("005") == 0
    assert tc.join({"a": cache[::2]}).index("012") == 6
    assert (cache.count("012"), cache[[5, 3, 5]].count("005"), cache.count(cache[0])) == (1, 2, 0)
    for absent in ("7", 7):
        with pytest.raises(ValueError, match=f"no sample {absent!r} among the 20 samples"):
            keys.index(absent)
    assert "\ud800" not in keys  # it has no form in UTF-8
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            keys[wrong]
    assert 3 not in cache


def test_the_same_key_in_several_shards(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"{number:02d}.tar", {"x": {"from": number}}, manifest=False)
    with tc.open(str(tmp_path)) as cache:
        assert "x" in cache
        assert cache.index("x") == 0
        assert cache.index("x", 5) == 5
        assert cache[1] == {"from": 1}
        with pytest.raises(KeyError, match=r"sample 'x' is in several shards, .*03\.tar, …; use the sample's index"):
            cache["x"]
        assert cache[19:]["x"] == {"from": 19}
        assert cache[::20]["x"] == {"from": 0}


def test_select(cache: tc.TensorCache) -> None:
    view = cache.select(["cond.*.pooled_output"])
    sample = view[3]
    prompt = {"prompt": "photo 3", "size": (64, 48)}
    assert sample["latent"] == {}
    assert sample["cond"][0][0] is None
    pooled = sample["cond"][0][1].pop("pooled_output")
    assert sample["cond"] == [[None, prompt]]
    assert torch.equal(pooled, WRITTEN[3]["cond"][0][1]["pooled_output"])
    assert cache.select(["*"])[3].keys() == WRITTEN[3].keys()
    assert list(view.schema) == ["cond.0.1.pooled_output"]
    assert list(cache.select("latent.*").schema) == ["latent.samples"]
    assert list(cache.select([]).schema) == []
    assert list(cache.select(["cond.*"]).select(["*pooled*"])[2:].schema) == ["cond.0.1.pooled_output"]
    with pytest.raises(KeyError, match="unknown tensor 'latent.samples'"):
        view.select(["latent.samples"])


def test_samples_of_a_view_have_the_same_keys(tmp_path: Path) -> None:
    """Whether they lack a tensor that is not selected, have None in its place, or have it."""
    masks = [{"mask": torch.ones(1)}, {"mask": None}, {}]
    samples = [{"x": torch.tensor(i), "a": [{"n": None, **mask}], **mask} for i, mask in enumerate(masks)]
    with tc.open(write(tmp_path, samples)) as cache:
        twice = cache.select(["x", "a"]).select("x")
        for view in (cache.select("x"), cache[::-1].select("x")[::-1], pickle.loads(pickle.dumps(twice))):
            read = [view[0], *view.__getitems__([1, 2]), *view.read_batch([0, 1, 2], collate=list)]
            assert [int(sample.pop("x")) for sample in read] == [0, 1, 2] * 2
            assert read == [{"a": [{"n": None}]}] * 6
        assert list(tc.join({"c": cache.select("x")})[1]["c"]) == ["x", "a"]


def test_select_of_names_that_look_like_patterns(tmp_path: Path) -> None:
    sample = {name: torch.tensor(i) for i, name in enumerate(["a[0]", "a0", "a*", "ab"])}
    with tc.open(write(tmp_path, [sample])) as cache:
        assert list(cache.select(["a[[]0]", "a[*]"])[0]) == ["a[0]", "a*"]
        assert list(cache.select(["a[[]0]", "a[*]"]).select(["a*"])[0]) == ["a[0]", "a*"]


def test_filter_reads_no_tensors(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(i, 4, dtype=torch.bool), "n": torch.zeros(3, dtype=torch.complex128)} for i in range(9)]
    folder = write(tmp_path, samples, max_samples=4)
    for path in tmp_path.glob("*.tar"):
        path.write_bytes(path.read_bytes().replace(b"\1" * 4, b"\7" * 4))  # no bools
    with tc.open(folder) as cache:
        for is_kept, keys in (
            (lambda entry: entry.shapes["x"][0] > 5, ["006", "007", "008"]),
            (lambda entry: entry.nbytes == 48 + 4 * 4, ["004"]),
            (lambda entry: entry.key > "006", ["007", "008"]),
            (lambda entry: entry.shapes["n"] != (3,), []),
        ):
            assert list(cache.filter(is_kept).keys()) == keys
            assert list(cache.filter(is_kept)[::-1].keys()) == keys[::-1]
        view = cache[2:].filter(lambda entry: entry.shapes["x"][0] % 2 == 0).filter(lambda entry: entry.key != "004")
        assert list(view.keys()) == ["002", "006", "008"]
        assert cache.schema["x"].shape == ((0, 8), 4)
        with pytest.raises(tc.FormatError, match="bytes other than 0 and 1"):
            cache[1]["x"].load()


def test_use_after_close(folder: str) -> None:
    cache = tc.open(folder)
    sample, batch = cache[0], cache.read_batch(range(COUNT))
    expected = torch.stack([s["latent"]["samples"] for s in WRITTEN])
    cache.close()
    cache.close()
    assert len(cache) == COUNT
    for use in (
        lambda: cache[0],
        lambda: cache[:3][0],
        lambda: cache.read_batch([0]),
        lambda: sample["latent"]["samples"].load(),
        lambda: pickle.dumps(sample),
        lambda: batch["cond"][0][1]["prompt"].tolist(),
    ):
        with pytest.raises(ValueError, match="the cache is closed"):
            use()
    assert torch.equal(batch["latent"]["samples"], expected)
