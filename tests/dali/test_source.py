"""The source is a pure function of epoch and iteration; ranks share an epoch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from dali_plugin import TensorCacheSource
from tests.dali.conftest import COUNT
from tests.reading.batches import write


def numbers_of(epoch: int, source: TensorCacheSource) -> list[int]:
    return [number for i in range(len(source)) for number in source.indices(epoch, i).tolist()]


@pytest.mark.parametrize("last_batch", ["short", "pad", "wrap", "drop"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 3), (2, 4), (3, 1), (3, 20), (7, 32)])
def test_rows_are_those_of_loaders(cache: Any, world_size: int, batch_size: int, last_batch: str) -> None:
    """The same samples in the same rows, and the same rows are padding."""
    options: dict[str, Any] = {"batch_size": batch_size, "world_size": world_size, "last_batch": last_batch}
    if last_batch == "drop" and COUNT // world_size < batch_size:
        with pytest.raises(ValueError, match=f"20 samples do not fill one step of {batch_size} on {world_size} ranks"):
            TensorCacheSource(cache, ["scalar"], **options)
        return
    cache = cache.select("scalar")
    for rank in range(world_size):
        source = TensorCacheSource(cache, rank=rank, shuffle=True, **options)
        loader = tc.Loader(cache, rank=rank, shuffle=True, collate=len, num_threads=0, **options)  # reads no tensors
        for epoch in range(2):
            loader.set_epoch(epoch)
            infos = [info for _, info in loader.with_info()]
            assert len(infos) == len(source)
            for iteration, info in enumerate(infos):
                assert source.indices(epoch, iteration).tolist() == info.indices.tolist()
                assert source.is_padding(iteration, len(info.indices)).tolist() == info.is_padding.tolist()


def test_orders(cache: Any) -> None:
    plain = TensorCacheSource(cache, ["scalar"], batch_size=4)
    shuffled = TensorCacheSource(cache, ["scalar"], batch_size=4, shuffle=True, seed=1)
    assert numbers_of(0, plain) == numbers_of(5, plain) == list(range(COUNT))
    first, second = numbers_of(0, shuffled), numbers_of(1, shuffled)
    assert first != second != numbers_of(0, TensorCacheSource(cache, ["scalar"], batch_size=4, shuffle=True, seed=2))
    assert numbers_of(0, pickle.loads(pickle.dumps(shuffled))) == first
    scalars, numbers = shuffled(SimpleNamespace(iteration=3, epoch_idx=1))
    assert numbers.tolist() == scalars.tolist() == second[12:16]
    with pytest.raises(StopIteration):
        shuffled(SimpleNamespace(iteration=5, epoch_idx=1))
    with pytest.raises(IndexError, match=r"iteration 5 out of range \[0, 5\)"):
        shuffled.indices(0, 5)


def test_batches_stay_as_long_as_dali_may_read_them(cache: Any) -> None:
    source = TensorCacheSource(cache, ["cond.0.0", "tensors.float32"], ["bin"], batch_size=4, keep=3)
    batches = [source.batch(0, i) for i in range(5)]
    for i, (ragged, dense, members, numbers) in enumerate(batches):
        assert numbers.tolist() == list(range(4 * i, 4 * i + 4))
        assert dense.shape == (4, 2, 3)
        assert [one.shape for one in ragged] == [(1 + n % 3, 5) for n in numbers.tolist()]
        assert [raw.tobytes() for raw in members] == [b"member %d" % n for n in numbers]
    copied = pickle.loads(pickle.dumps(source))
    assert copied.batch(0, 0)[-1].tolist() == [0, 1, 2, 3]
    del batches, ragged, dense, members, numbers
    assert len(cache._store.pool._leases) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensors": ["cond.0.1"]}, KeyError, r"unknown tensor 'cond.0.1'; there are 'cond.0.0'"),
        ({"tensors": ["tensors.flaot32"]}, KeyError, "there are 'tensors.float32'"),
        ({"tensors": ["text.*"]}, KeyError, r"unknown tensor 'text\.\*'"),
        ({"tensors": ["tensors.float32", "tensors.float*"]}, ValueError, "a name occurs twice"),
        ({"members": ["jpg"]}, KeyError, r"unknown member 'jpg'; there are 'bin'"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"num_threads": -1}, ValueError, "expected 0 or more"),
        ({"prefetch_batches": -1}, ValueError, "expected 0 or more"),
        ({"rank": 2, "world_size": 2}, ValueError, "out of range"),
        ({"last_batch": "fill"}, ValueError, "last_batch='fill', expected one of short, pad, wrap, drop"),
    ],
)
def test_arguments_that_are_refused(cache: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        TensorCacheSource(cache, **{"batch_size": 4, **options})


def test_names_and_members_alone(cache: Any) -> None:
    with pytest.raises(ValueError, match="the cache has no samples"):
        TensorCacheSource(cache[:0], batch_size=2)
    assert TensorCacheSource(cache, "scalar", batch_size=4).outputs == ["scalar", "number"]
    floats = "float16 float32 float64 float8_e4m3fn float8_e5m2 float8_e8m0fnu"
    source = TensorCacheSource(cache, ["tensors.float*", "scalar"], batch_size=6)
    assert sorted(source.tensors) == sorted(["scalar", *(f"tensors.{name}" for name in floats.split())])
    members, numbers = TensorCacheSource(cache, [], ["bin"], batch_size=4).batch(0, 1)
    assert numbers.tolist() == [4, 5, 6, 7]
    assert [member.tobytes() for member in members] == [b"member %d" % i for i in numbers]


def test_dtypes_that_have_no_node(tmp_path: Any) -> None:
    write(tmp_path, [{"x": torch.ones(2, dtype=dtype), "y": torch.ones(2)} for dtype in (torch.float32, torch.int8)])
    with pytest.raises(TypeError, match=r"tensor 'x' is torch.float32 and torch.int8 in different samples"):
        TensorCacheSource(tmp_path, batch_size=2)
    with pytest.raises(TypeError, match="as_float takes bfloat16 tensors, but 'y' is torch.float32"):
        TensorCacheSource(tmp_path, ["y"], batch_size=2).use_float(["y"])
    with pytest.raises(KeyError, match="unknown tensor of this source 'z'"):
        TensorCacheSource(tmp_path, ["y"], batch_size=2).use_float(["z"])


def test_tensors_and_members_that_some_samples_lack(tmp_path: Any) -> None:
    samples = [{"x": torch.tensor([i]), "mask": torch.ones(1 + i) if i % 2 else None, "i": i} for i in range(4)]
    with tc.open(write(tmp_path, samples, lambda i: {"jpg": b"x"} if i else {})) as cache:
        source = TensorCacheSource(cache, ["x"], batch_size=4)
        x, number = source(SimpleNamespace(epoch_idx=0, iteration=0))
        batch, _ = source.nest({"x": x, "number": number})
        assert (batch["x"].tolist(), batch["i"], set(batch)) == ([[i] for i in range(4)], list(range(4)), {"x", "i"})
        with pytest.raises(tc.BatchError, match="2 of 4 samples have 'mask', but DALI needs it in every sample"):
            TensorCacheSource(cache, batch_size=4)
        with pytest.raises(tc.BatchError, match="3 of 4 samples have 'jpg', but DALI needs it in every sample"):
            TensorCacheSource(cache, ["x"], ["jpg"], batch_size=4)
        joined = tc.join({"a": cache, "b": tc.join({"c": cache.select(["x"])})})
        with pytest.raises(tc.BatchError, match=r"2 of 4 samples have 'a\.mask', but DALI needs it in every sample"):
            TensorCacheSource(joined, batch_size=4)
        with pytest.raises(tc.BatchError, match="3 of 4 samples have 'jpg', but DALI needs it in every sample"):
            TensorCacheSource(joined, ["a.x"], ["jpg"], batch_size=4)
        assert len(TensorCacheSource(joined[[1, 3]], ["a.mask", "b.c.x"], ["jpg"], batch_size=2).batch(0, 0)) == 4
        assert TensorCacheSource(cache[[1, 3]], members=["jpg"], batch_size=2).batch(0, 0)[-1].tolist() == [0, 1]
