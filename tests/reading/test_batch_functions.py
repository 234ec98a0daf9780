"""`collate=function` gets whole samples of any structures; and no batch changes the state of the process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.reading.batches import assert_all_same, write


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "float8_e4m3fn", "float32"])
def test_tensors_that_not_all_have(tmp_path: Path, dtype: str) -> None:
    more = torch.ones(5, dtype=torch.uint8).to(getattr(torch, dtype))
    samples = [{"x": torch.arange(3)}, {"x": torch.arange(3), "m": more}, {"x": torch.arange(3), "m": more[:2]}]
    with tc.open(write(tmp_path, samples)) as cache:
        assert_all_same(samples, cache.read_batch(range(3), collate=list))


def test_names_of_other_dtypes(tmp_path: Path) -> None:
    samples: list[Any] = [
        {"x": torch.ones(4, dtype=torch.bool)},
        {"x": torch.full((4,), 5, dtype=torch.uint8)},
        {"x": np.full(3, 7, np.int8)},
        {"x": torch.zeros(2, 2)},
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        read = cache.read_batch(range(4), collate=list)
        assert_all_same(samples, read)
        assert read[3]["x"].data_ptr() % 4 == 0  # though 11 bytes come before it


def test_tensors_in_sets_and_containers_that_hold_each_other(tmp_path: Path) -> None:
    a: list[Any] = []
    b: list[Any] = [a, torch.ones(2)]
    a.append(b)
    sample = {"s": [{torch.ones(2)}], "t": {torch.ones(2)}, "a": a}
    with tc.open(write(tmp_path, [sample])) as cache:
        ((found),) = cache.read_batch([0], collate=list)
        assert [type(one) for one in (*found["s"][0], *found["t"], found["a"][0][1])] == [torch.Tensor] * 3


def test_skeletons_that_the_index_could_not_read(tmp_path: Path) -> None:
    @dataclass
    class Point:
        x: int = 1

    Point.__qualname__ = "Point"
    kinds = [torch.ones(3, dtype=torch.complex128), torch.ones(3, 2, dtype=torch.float64)]
    path = str(tmp_path / "0.tar")
    with wds.TarWriter(path, encoder=tc.encoder(allow=[Point])) as sink:
        for i, x in enumerate([kinds[0], kinds[1], kinds[0]]):
            sink.write({"__key__": str(i), "tensorcache": {"x": x, "o": Point(i)}})
    with tc.open(path, allow=[Point]) as cache:
        assert cache.read_batch([0, 2])["x"].dtype == torch.complex128
        for numbers in ([0, 1], [1, 0], [1, 2]):
            with pytest.raises(tc.BatchError, match="tensor 'x' (is|differs)"):
                cache.read_batch(numbers)
        assert cache.read_batch([1])["x"].shape == (1, 3, 2)


def test_a_defaultdict_makes_nothing_up(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(2), "d": defaultdict(list, k=1)}, {"x": torch.ones(2), "d": defaultdict(list)}]
    with tc.open(write(tmp_path, samples)) as cache:
        batch = cache.read_batch([0, 1])
        with pytest.raises(tc.BatchError, match="sample '001' has nothing at 'd.k'"):
            list(batch["d"]["k"])


def test_a_fake_tensor_mode_leaves_nothing_behind(tmp_path: Path) -> None:
    with tc.open(write(tmp_path, [{"x": torch.full((5,), i)} for i in range(3)])) as cache:
        with torch._subclasses.FakeTensorMode(), pytest.raises(Exception, match="Fake|aten"):
            cache.read_batch([1, 2])["x"].tolist()
        assert cache.read_batch([1, 2])["x"].tolist() == [[1] * 5, [2] * 5]


@pytest.mark.parametrize(
    ("value", "pad_value"),
    [
        (torch.ones(1).half(), 1e5),
        (np.ones(1, "f2"), 1e5),
        (torch.ones(1).to(torch.float8_e4m3fn), 1e30),
        (torch.ones(1).to(torch.float8_e4m3fn), float("inf")),
        (torch.ones(1).to(torch.float8_e4m3fnuz), 255),
        (torch.ones(1, dtype=torch.bool), 5),
        (np.ones(1, "?"), 5),
        (np.ones(1, "?"), float("nan")),
        (np.ones(1, "u1"), -1),
        (np.ones(1, "i4"), 0.5),
        (torch.ones(1), None),
        (torch.ones(1), "x"),
        (torch.ones(1), {"y": 1}),
    ],
    ids=str,
)
def test_padding_that_a_dtype_has_not(tmp_path: Path, value: Any, pad_value: Any) -> None:
    longer = torch.cat([value] * 2) if isinstance(value, torch.Tensor) else np.concatenate([value] * 2)
    with (
        tc.open(write(tmp_path, [{"x": value}, {"x": longer}])) as cache,
        pytest.raises(tc.BatchError, match="pad_value"),
    ):
        cache.read_batch([0, 1], collate="pad", pad_value=pad_value)


def test_padding_by_name(tmp_path: Path) -> None:
    samples = [
        {
            "labels": torch.arange(i),
            "mask": torch.ones(i, dtype=torch.bool),
            "h": torch.ones(i).bfloat16(),
            "s": np.full(i, "w"),
        }
        for i in (1, 3)
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        batch = cache.read_batch([0, 1], collate="pad", pad_value={"labels": -100, "h": float("-inf")})
        assert batch["labels"].tolist() == [[0, -100, -100], [0, 1, 2]]
        assert batch["mask"].tolist() == [[True, False, False], [True] * 3]
        assert batch["h"].tolist() == [[1, float("-inf"), float("-inf")], [1] * 3]
        assert batch["s"].tolist() == [["w", "", ""], ["w"] * 3]
        batch = cache.read_batch([0, 1], collate="pad", pad_value={"h": -0.0})
        assert str(batch["h"][0, 1].item()) == "-0.0"


def test_shards_that_are_rewritten_are_seen_before_they_are_read(tmp_path: Path) -> None:
    def fill(factor: int) -> None:
        with tc.ShardWriter(tmp_path / "%d.tar", max_samples=2, overwrite=factor > 1, fsync=False) as sink:
            for i in range(6):
                sink.write(str(i), {"x": torch.tensor([i * factor])})

    fill(1)
    with tc.open(tmp_path) as cache:
        assert cache[0]["x"].load().item() == 0
        fill(100)
        with pytest.raises(tc.FormatError, match="the shard was changed since it was opened"):
            cache.read_batch([0, 5])
