"""One object of a sample is one object in each result, and two objects have two values."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.same import assert_same

SHARED: list[Any] = [
    [1, "a"],
    [],
    [[1], (2, [3])],
    {1, 2},
    frozenset([1, (2, 3)]),
    OrderedDict(a=[1]),
    defaultdict(list, a=[1]),
    bytearray(b"abc"),
    {"t": torch.ones(2), "n": [1]},
    {torch.ones(2)},
    (torch.ones(2), [1]),
    deque([torch.ones(2)], maxlen=2),
    torch.ones(2),
    np.ones(2),
]


def kept(samples: list[Any]) -> list[Any]:
    return samples


def test_functions_get_one_object_for_one(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    ring: dict[str, Any] = {"t": torch.ones(2)}
    ring["self"] = [ring, loop]
    ones = {
        str(at): {"a": one, "b": [one, {"c": one}], "d": (one,), "other": copy.deepcopy(one)}
        for at, one in enumerate([*SHARED, ring])
    }
    sample = {"x": torch.ones(3), **ones}
    with tc.open(write(tmp_path, [sample, sample])) as cache:
        read = cache.read_batch([1, 0, 1], collate=kept)
        for found in read:
            assert_same(sample, found)  # which compares what is one object
        assert read[0]["0"]["a"] is not read[2]["0"]["a"]
        ((found),) = tc.join({"left": cache, "right": cache}).read_batch([0], collate=kept)
        assert_same([sample, sample], [found["left"], found["left"]])
        assert_same(sample, found["right"])
        assert_same(sample, cache.select(["*"]).read_batch([0], collate=kept)[0])


# --- batches: one object in the first sample, two in another ---


@pytest.mark.parametrize("with_tensor", [True, False])
def test_containers_that_are_shared_again_and_again(tmp_path: Path, with_tensor: bool) -> None:
    """Each is visited once: there are 2^60 paths to the innermost."""

    def sample(i: int) -> Any:
        value: Any = {"n": i, "t": torch.tensor(i)} if with_tensor else {"n": i}
        for _ in range(60):
            value = {"a": value, "b": value}
        return {"x": torch.tensor([i]), "v": value}

    def innermost(value: Any) -> Any:
        for _ in range(60):
            assert value["a"] is value["b"]
            value = value["b"]
        return value

    samples = [sample(i) for i in range(3)]
    with tc.open(write(tmp_path, samples)) as cache:
        for collate in ("stack", "list"):
            batch = cache.read_batch([2, 0], collate=collate)
            assert innermost(batch["v"])["n"] == [2, 0]
        for found in cache.read_batch([1], collate=kept):
            assert innermost(found["v"])["n"] == 1
        assert innermost(cache.select(["x"]).read_batch([2, 0])["v"])["n"] == [2, 0]
        filled = tc.nest([cache[2], cache[0]], {"x": torch.zeros(2, 1)})
        assert innermost(filled["v"])["n"] == [2, 0]
        assert tc.flatten(cache[0]).keys() == ({"x", "v" + ".a" * 60 + ".t"} if with_tensor else {"x"})


@pytest.mark.parametrize("collate", ["stack", "list", "pad"])
def test_one_tensor_in_containers_that_are_one_or_two(tmp_path: Path, collate: str) -> None:
    def sample(i: int, *, is_one: bool) -> dict[str, Any]:
        x = torch.tensor([i])
        one = [x, i]
        return {"a": one, "b": one if is_one else [x, i + 10]}

    samples = [sample(0, is_one=True), sample(1, is_one=False), sample(2, is_one=True)]
    with tc.open(write(tmp_path, samples)) as cache:
        for unlike in ([0, 1], [1, 0]):
            with pytest.raises(tc.BatchError, match="their structures differ|has no tensor 'b.0'"):
                cache.read_batch(unlike, collate=collate)
        for numbers, shared in (([0, 2], True), ([1], False)):
            batch = cache.read_batch(numbers, collate=collate)
            assert batch["a"][1] == numbers
            assert batch["b"][1] == [i + 10 * (i == 1) for i in numbers]
            assert (batch["a"] is batch["b"]) is shared
            assert list(batch["a"][0]) == list(batch["b"][0])
