"""The source is a pure function of epoch and iteration; ranks share an epoch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from dali_plugin import TensorCacheSource
from tests.dali.conftest import COUNT


def numbers_of(epoch: int, *sources: TensorCacheSource) -> list[list[int]]:
    return [[n for i in range(len(s)) for n in s.indices(epoch, i).tolist()] for s in sources]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 20, 32])
def test_ranks_share_an_epoch(cache: Any, world_size: int, batch_size: int) -> None:
    for last in ("short", "pad", "wrap", "drop"):
        options: dict[str, Any] = {"batch_size": batch_size, "world_size": world_size, "last_batch": last}
        if last == "drop" and COUNT // world_size < batch_size:
            with pytest.raises(
                ValueError, match=f"20 samples do not fill one step of {batch_size} on {world_size} ranks"
            ):
                TensorCacheSource(cache, ["scalar"], **options)
            continue
        ranks = [TensorCacheSource(cache, ["scalar"], rank=r, shuffle=True, **options) for r in range(world_size)]
        assert len({len(source) for source in ranks}) == 1
        for epoch in range(2):
            seen = numbers_of(epoch, *ranks)
            everything = [number for numbers in seen for number in numbers]
            assert len({len(numbers) for numbers in seen}) == 1
            if last == "drop":
                assert len(everything) == len(set(everything)) == len(ranks[0]) * batch_size * world_size
                assert COUNT - len(everything) < batch_size * world_size
            else:
                assert set(everything) == set(range(COUNT))
            if last == "short":
                assert len(everything) - COUNT < world_size
            if last in ("pad", "wrap"):
                assert len(everything) == len(ranks[0]) * batch_size * world_size
            assert_rows_are_those_of_loaders(cache, epoch, ranks, options)


def assert_rows_are_those_of_loaders(cache: Any, epoch: int, ranks: list[Any], options: dict[str, Any]) -> None:
    """The same samples in the same rows, and the same rows are padding."""
    for rank, source in enumerate(ranks):
        loader = tc.Loader(cache, rank=rank, shuffle=True, collate=len, num_threads=0, **options)  # reads no tensors
        loader.set_epoch(epoch)
        infos = [info for _, info in loader.with_info()]
        assert len(infos) == len(source)
        for iteration, info in enumerate(infos):
            assert source.indices(epoch, iteration).tolist() == info.indices.tolist()
            assert source.is_padding(iteration, len(info.indices)).tolist() == info.is_padding.tolist()


def test_orders(cache: Any) -> None:
    plain = TensorCacheSource(cache, ["scalar"], batch_size=4)
    shuffled = TensorCacheSource(cache, ["scalar"], batch_size=4, shuffle=True, seed=1)
    assert numbers_of(0, plain) == numbers_of(5, plain) == [list(range(COUNT))]
    first, second = numbers_of(0, shuffled), numbers_of(1, shuffled)
    assert first != second != numbers_of(0, TensorCacheSource(cache, ["scalar"], batch_size=4, shuffle=True, seed=2))
    assert numbers_of(0, pickle.loads(pickle.dumps(shuffled))) == first
    info = SimpleNamespace(iteration=3, epoch_idx=1)
    scalars, numbers = shuffled(info)
    assert numbers.tolist() == scalars.tolist() == second[0][12:16]
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


def test_what_is_refused(cache: Any, tmp_path: Any) -> None:
    for tensors, members, message in (
        (["cond.0.1"], [], r"unknown tensor 'cond.0.1'; there are 'cond.0.0'"),
        (["tensors.flaot32"], [], "there are 'tensors.float32'"),
        (None, ["jpg"], r"unknown member 'jpg'; there are 'bin'"),
    ):
        with pytest.raises(KeyError, match=message):
            TensorCacheSource(cache, tensors, members, batch_size=4)
    for options in ({"batch_size": 0}, {"batch_size": 1, "rank": 2, "world_size": 2}):
        with pytest.raises(ValueError, match="batch_size=0|out of range"):
            TensorCacheSource(cache, **options)
    with pytest.raises(ValueError, match="last_batch='fill', expected one of short, pad, wrap, drop"):
        TensorCacheSource(cache, batch_size=2, last_batch="fill")
    with pytest.raises(ValueError, match="the cache has no samples"):
        TensorCacheSource(cache[:0], batch_size=2)
    assert TensorCacheSource(cache, "scalar", batch_size=4).outputs == ["scalar", "number"]


def test_no_tensors(cache: Any) -> None:
    source = TensorCacheSource(cache, [], ["bin"], batch_size=4)
    members, numbers = source.batch(0, 1)
    assert np.array_equal(members[1], np.frombuffer(b"member 5", np.uint8))
    assert numbers.tolist() == [4, 5, 6, 7]


def test_dtypes_that_have_no_node(tmp_path: Any) -> None:
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        sink.write("a", {"x": torch.ones(2), "y": torch.ones(2)})
        sink.write("b", {"x": torch.ones(2, dtype=torch.int8), "y": torch.ones(2)})
    with pytest.raises(TypeError, match=r"tensor 'x' is torch.float32 and torch.int8 in different samples"):
        TensorCacheSource(tmp_path, batch_size=2)
    with pytest.raises(TypeError, match="as_float takes bfloat16 tensors, but 'y' is torch.float32"):
        TensorCacheSource(tmp_path, ["y"], batch_size=2).use_float(["y"])
    with pytest.raises(KeyError, match="unknown tensor of this source 'z'"):
        TensorCacheSource(tmp_path, ["y"], batch_size=2).use_float(["z"])


def test_reprs(cache: Any) -> None:
    source = TensorCacheSource(cache, ["scalar"], batch_size=6, shuffle=True, rank=1, world_size=2)
    assert repr(source).startswith(
        "TensorCacheSource(20 samples, batch_size=6, 2 steps per epoch, rank=1, world_size=2,"
    )
    assert repr(source).endswith("outputs=['scalar', 'number'])")


def test_samples_that_lack_a_tensor(tmp_path: Any) -> None:
    with tc.ShardWriter(f"{tmp_path}/%d.tar", fsync=False) as sink:
        for i in range(4):
            sink.write(f"{i}", {"x": torch.tensor([i]), "mask": torch.ones(1 + i) if i % 2 else None, "i": i})
    with tc.open(tmp_path) as cache:
        source = TensorCacheSource(cache, ["x"], batch_size=4)
        x, number = source(SimpleNamespace(epoch_idx=0, iteration=0))
        batch, _ = source.nest({"x": x, "number": number})
        assert batch["x"].tolist() == [[i] for i in range(4)]
        assert batch["i"] == list(range(4))
        assert set(batch) == {"x", "i"}
        with pytest.raises(tc.BatchError, match="sample '0' has no tensor 'mask'"):
            TensorCacheSource(cache, ["mask"], batch_size=4)(SimpleNamespace(epoch_idx=0, iteration=0))
