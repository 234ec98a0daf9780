"""Every sample comes once per epoch over all ranks, and the sequence can be resumed anywhere."""

from __future__ import annotations

import json
import pickle
import re
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from torch.utils.data import Subset

import wds_tensorcache as tc
from tests.same import assert_same
from tests.training.loaders import COUNT, modes, ranks, steps


@pytest.mark.parametrize("last", ["short", "pad", "drop", "wrap"])
@pytest.mark.parametrize("mode", ["all", "in order", "blocks", "buckets", "blocks+buckets"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 2), (5, 1), (3, 4)])
def test_epochs(cache: Any, more: Any, mode: str, last: str, world_size: int, batch_size: int) -> None:
    options = modes(cache, more)[mode.split("+")[0]] | ({"bucket_by": "y"} if "buckets" in mode else {})
    options |= {"last_batch": last, "batch_size": batch_size, "world_size": world_size}
    size = world_size * batch_size
    sizes = [8, 8, 7] if "buckets" in mode else [COUNT]
    expected = sum(n // size if last == "drop" else -(-n // size) for n in sizes)
    if not expected:
        with pytest.raises(ValueError, match="do not fill one step"):
            ranks(**options)
        return
    loaders = ranks(**options)
    assert {len(loader) for loader in loaders} == {expected}
    orders = []
    for epoch in range(3):
        taken = steps(loaders, expected)
        seen = sorted(number for step in taken for number in step)
        assert {loader.epoch for loader in loaders} == {epoch + 1}
        if last in ("short", "pad"):
            assert seen == list(range(COUNT))
        elif last == "drop":
            assert len(seen) == len(set(seen)) == sum(n // size * size for n in sizes)
        else:
            assert set(seen) == set(range(COUNT))
            assert len(seen) == expected * size
        if "buckets" in mode:
            assert all(len({number % 3 for number in step}) == 1 for step in taken)
        orders.append(taken)
    assert (orders[0] == orders[1]) is (mode == "in order")


def test_blocks_are_near_each_other(cache: Any) -> None:
    loader = tc.Loader(cache, 1, shuffle="blocks", window=5, collate="list")
    shards = [info.indices.item() // 5 for _, info in loader.with_info()]
    whole = [shards[begin : begin + 5] for begin in range(0, COUNT, 5)]
    assert all(len(set(window)) <= 2 for window in whole)
    assert shards != sorted(shards)


def test_batches_are_those_of_read_batch(cache: Any) -> None:
    for options in ({"collate": "pad", "pad_value": -1}, {"collate": "list"}, {"collate": len}):
        for batch, info in tc.Loader(cache, 4, last_batch="drop", **options).with_info():
            assert_same(cache.read_batch(info.indices, **options), batch)
            assert info.source is None
            assert not info.is_padding.any()
    for batch, info in tc.Loader(cache, 4, bucket_by="y").with_info():
        assert info.source == (len(batch["y"][0]),)
        assert_same(cache.read_batch(info.indices), batch)
    for batch in tc.Loader(cache.select(["x"]), 4):
        assert list(batch) == ["x", "i"]


def test_wrong_options_are_refused(cache: Any, folder: str) -> None:
    mixed: dict[str, Any] = {"cache": None, "mix": {"a": cache}}
    for options, message in (
        ({"cache": None}, "a cache, or mix="),
        ({"cache": None, "weights": np.ones(COUNT), "mix": {"a": (cache, 1)}}, "expected a dict with some of 'a'"),
        ({"cache": None, "weights": {"a": [1]}, "mix": {"a": (cache, 1)}}, "expected 23 numbers"),
        ({"cache": None, "weights": {"a": [1] * 23}, "mix": {"a": cache}}, "need a weight of each cache, too: mix={"),
        ({"weights": np.ones(COUNT), "repeats": 2}, "repeats and weights are mutually exclusive"),
        ({"cache": None, "mix": {"a": (cache, 1)}, "repeats": {"a": 2}}, "leave out the weights"),
        (mixed | {"repeats": {"b": 2}}, "repeats={'b': 2}, expected a dict with some of 'a'"),
        ({"repeats": 0}, "repeats=0, expected at least 1"),
        ({"repeats": 1 << 62}, "repeats=4611686018427387904, expected at least 1, and at most 1,073,741,824"),
        (
            {"cache": None, "mix": {"a": (cache, 0.5), "b": cache}},
            "^mix= has the types {'a': 'tuple', 'b': 'TensorCache'}, expected {'a': .* or {'a': cache, 'b': other}",
        ),
        ({"batch_size": 0}, "batch_size=0, expected at least 1"),
        ({"collate": "stacked"}, "stacked"),
        ({"num_threads": -1}, "num_threads=-1, prefetch_batches=2: expected 0 or more"),
        ({"last_batch": "fill"}, "expected one of short, pad, wrap, drop"),
        ({"shuffle": "yes"}, "expected True, False or 'blocks'"),
        ({"cache": folder}, "open it with tc.open"),
        ({"cache": Subset(cache, [0, 1])}, r"In place of a Subset of a cache, pass cache\[indices\]"),
        ({"cache": tc.ResumablePipeline(folder)}, "pass a stream to torch's DataLoader, with batch_size=None if"),
        ({"cache": wds.DataPipeline()}, "DataPipeline object at .* pass a stream to torch's DataLoader"),
        ({"cache": cache[:0]}, "the cache has no samples"),
        ({"batch_size": 24, "last_batch": "drop"}, "23 samples do not fill one step of 24 on 1 ranks"),
        ({"rank": 1}, "both or neither"),
        ({"cache": None, "mix": {"a": (cache, 2**2000)}}, "expected 1 numbers"),
        ({"shuffle": "blocks", "window": 0}, "window=0"),
        ({"on_early_exit": "stop"}, "expected one of next_epoch, continue"),
    ):
        with pytest.raises(ValueError, match=message):
            tc.Loader(**({"cache": cache, "batch_size": 4} | options))
    with pytest.raises(ValueError, match="without weights= and without weights in mix="):
        tc.Loader(cache, 4).set_weights([1])
    with pytest.raises(ValueError, match="expected a dict with 'a'"):
        tc.Loader(None, 4, mix={"a": (cache, 1)}).set_weights([1])


def test_integers_of_numpy_and_torch(cache: Any) -> None:
    options: dict[str, Any] = {"rank": np.int32(0), "world_size": np.int64(1), "seed": torch.tensor(5)}
    loader = tc.Loader(cache, np.int64(4), **options, shuffle=np.True_)
    assert json.loads(json.dumps(loader.state_dict())) == tc.Loader(cache, 4, shuffle=True, seed=5).state_dict()
    wrong = {"batch_size": "4", "seed": None, "prefetch_batches": 1.5, "window": 2.5, "repeats": {"a": 2}}
    for name, value in (*wrong.items(), ("rank", 0.5)):
        with pytest.raises(TypeError, match=f"^{name}={re.escape(repr(value))}, expected an integer$"):
            tc.Loader(**{"cache": cache, "batch_size": 4, name: value} | ({"world_size": 2} if name == "rank" else {}))


def test_batches_are_the_callers_alone(cache: Any) -> None:
    loader = tc.Loader(cache.select(["x"]), 4)
    with pytest.raises(TypeError, match="a Loader cannot be pickled"):
        pickle.dumps(loader)
    iterator = iter(loader)
    batch = next(iterator)
    found = weakref.ref(batch["x"])
    del batch
    assert found() is None


@pytest.mark.parametrize("kind", [tc.Loader, tc.torch_loader])
def test_an_error_before_the_first_batch_keeps_the_position(cache: Any, kind: Any) -> None:
    """After `load_state_dict`, the loop that follows a failed one resumes in the same epoch."""
    fails = [True]

    def collate(samples: list[Any]) -> Any:
        if samples[0]["i"] == 4 and fails:  # the first batch, whichever thread comes first
            fails.clear()
            raise ZeroDivisionError
        return [sample["i"] for sample in samples]

    first = tc.Loader(cache, 4, collate="list")
    next(iter(first))
    loader = kind(cache, 4, collate=collate)
    loader.load_state_dict(first.state_dict())
    with pytest.raises(ZeroDivisionError):
        list(loader)
    assert [i for batch in loader for i in batch] == list(range(4, COUNT))


# --- statistics: no assertion depends on the machine's speed ---


def test_counts_and_bytes(cache: Any) -> None:
    loader = tc.Loader(cache.select("x"), 4)
    assert loader.stats().num_batches == loader.stats().total_s == 0
    assert "waited" not in repr(loader)
    list(loader)
    once = loader.stats()
    assert (once.num_batches, once.nbytes) == (6, 6 * 128)  # multiples of 64 bytes
    assert 0 < once.training_waited_s <= once.total_s
    assert 0 <= once.data_waited_s <= once.total_s
    assert once.read_s > 0
    assert once.transform_s == once.transfer_s == 0
    assert once.nbytes_per_s == once.nbytes / once.total_s
    assert repr(loader).endswith(f"\n  {once}")
    next(iter(loader))
    more = loader.stats() - once
    assert (more.num_batches, more.nbytes) == (1, 128)
    assert more.total_s >= more.training_waited_s > 0


def test_waiting_times(cache: Any) -> None:
    loader = tc.Loader(cache.select("x"), 8, num_threads=1, prefetch_batches=2)
    iterator = iter(loader)
    next(iterator)
    first = loader.stats()
    assert (first.num_batches, first.data_waited_s) == (1, 0)
    loader.pause()  # the other two batches are ready
    began = time.perf_counter()
    time.sleep(0.01)  # training
    paused_s = time.perf_counter() - began
    next(iterator)
    second = loader.stats() - first
    assert second.num_batches == 1
    assert second.total_s >= second.data_waited_s >= paused_s
    loader.close()


def test_waits_of_a_torch_loader(cache: Any) -> None:
    loader = tc.torch_loader(cache.select("x"), 4, num_workers=2)
    list(loader)
    once = loader.stats()
    assert (once.num_batches, once.nbytes, once.read_s, once.data_waited_s) == (6, 0, 0, 0)
    assert repr(loader).endswith(f"\n  {once}")
    assert 0 < once.training_waited_s <= once.total_s
