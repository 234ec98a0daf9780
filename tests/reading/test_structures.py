"""A batch is of one structure: where a sample has another, it is an error, whichever sample comes first."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from datetime import datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.same import assert_same

A, B = torch.zeros(2), torch.ones(2)

UNLIKE = {
    "keys in another order": [{(64, 64): A, (32, 32): B}, {(32, 32): B, (64, 64): A}],
    "other keys": [{(1, 2): A}, {(3, 4): B}],
    "numbers and texts": [{1: A, "1": B}, {"1": B, 1: A}],
}

SMALL = {
    "a value more": [{"t": A, "a": 1}, {"t": A, "a": 2, "b": 3}],
    "an empty dict": [{"t": A, "m": {}}, {"t": A, "m": {"x": 1}}],
    "a dict or a text": [{"t": A, "m": {0: "q"}}, {"t": A, "m": "hello"}],
    "a defaultdict makes nothing up": [{"t": A, "m": defaultdict(list, k=1)}, {"t": A, "m": defaultdict(list)}],
    "inside of a list": [{"t": [A, {"a": 1}]}, {"t": [A, {"a": 1, "b": 2}]}],
}


@pytest.mark.parametrize("samples", UNLIKE.values(), ids=UNLIKE)
def test_tensors_in_other_places(tmp_path: Path, samples: list[Any]) -> None:
    with tc.open(write(tmp_path, samples * 3)) as cache:
        for order in permutations(range(2)):
            for collate in ("stack", "list", "pad"):
                with pytest.raises(tc.BatchError, match=r"their structures differ|has no tensor|has neither tensor"):
                    _places(cache.read_batch([*order, 2, 3], collate=collate))
        assert len(cache.read_batch([0, 1], collate=list)) == 2


def test_texts_as_arrays(tmp_path: Path) -> None:
    with tc.open(write(tmp_path, [{"t": A, "prompt": np.array(text)} for text in ("a", "ab")])) as cache:
        with pytest.raises(tc.BatchError, match=r"'prompt' is ndarray of <U1 .*, but .* <U2 .*store texts as str"):
            cache.read_batch([0, 1], collate="list")
        assert cache.select(["t"]).read_batch([0, 1])["t"].shape == (2, 2)


def test_values_that_are_built_from_plain_ones(tmp_path: Path) -> None:
    samples = [
        {
            "t": A + i,
            "score": np.float32(i / 3),
            "made": [datetime(2020, 1, 1 + i), i],
            "inner": {"size": torch.Size([i, 4])},
        }
        for i in range(12)
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        for begin in (0, 4, 8):
            batch, expected = cache.read_batch(range(begin, begin + 4)), samples[begin : begin + 4]
            assert torch.equal(batch["t"], torch.stack([sample["t"] for sample in expected]))
            for column, name in ((batch["score"], "score"), (batch["made"], "made")):
                assert_same([sample[name] for sample in expected], list(column))
            assert_same([sample["inner"]["size"] for sample in expected], list(batch["inner"]["size"]))


@pytest.mark.parametrize("samples", SMALL.values(), ids=SMALL)
def test_small_values_do_not_vanish(tmp_path: Path, samples: list[Any]) -> None:
    with tc.open(write(tmp_path, samples * 3)) as cache:
        for order in permutations(range(2)):
            batch = cache.read_batch(order)
            assert len(next(iter(cache.read_tensors(order).values()))) == 2
            if "m" not in batch or not isinstance(batch["m"], dict) or batch["m"]:  # else there is nothing to look at
                with pytest.raises(tc.BatchError, match="their structures differ"):
                    _places(batch)


def test_worker_processes_raise(tmp_path: Path) -> None:
    with tc.open(write(tmp_path, SMALL["inside of a list"])) as cache:
        loader = DataLoader(range(2), batch_size=2, num_workers=1, collate_fn=cache.read_batch, timeout=60)
        with pytest.raises(tc.BatchError, match="their structures differ"):
            next(iter(loader))


def _places(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return all of a batch by place, as lists."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    else:
        return {path: value if type(value) is list else value.tolist()}
    return {place: found for key, item in items for place, found in _places(item, (*path, key)).items()}


SELECTED = [
    {
        "x": A + i,
        "cond": [[A * i, {"prompt": f"p{i}", "size": (i, [i])}], (i, (A + 1, {"n": i}))],
        "only": [[A + 2], {"y": A + 3, "z": [A + 4]}],
        "plain": [[i, None], {"text": f"t{i}"}],
    }
    for i in range(3)
]
NAMES = ["x", "cond.0.0", "cond.1.1.0", "only.0.0", "only.1.y", "only.1.z.0"]


@given(st.sets(st.sampled_from(NAMES)))
@settings(max_examples=40)
def test_select_changes_no_place(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    folder = tmp_path_factory.getbasetemp() / "selected"
    if not folder.exists():
        write(folder, SELECTED)
    with tc.open(folder) as cache:
        whole = _places(cache.read_batch([2, 0, 1]))
        view = cache.select(names)
        batches = [
            view.read_batch([2, 0, 1]),
            tc.join({"a": view}).read_batch([2, 0, 1])["a"],
            cache.nest([2, 0, 1], view.read_tensors([2, 0, 1])),
        ]
        streamed = tc.nest([cache[i] for i in (2, 0, 1)], view.read_tensors([2, 0, 1]))
        assert streamed["cond"][0][1]["prompt"] == ["p2", "p0", "p1"]
        with pytest.raises(ValueError, match="a batch has at least one sample"):
            tc.nest([], {})
        assert streamed["cond"][1][1][1]["n"] == [2, 0, 1]
        for batch in batches:
            found = _places(batch)
            for path, value in found.items():
                assert value == whole[path] or (value == [None] * 3 and ".".join(map(str, path)) not in names)
            lost = {".".join(map(str, path)) for path in whole.keys() - found.keys()}
            assert lost == ({"x", "only.1.y"} - names)  # the tensors in dicts


# --- one object of a sample is one object in each result, and two objects have two values ---


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
        read = cache.read_batch([1, 0, 1], collate=list)
        for found in read:
            assert_same(sample, found)  # which compares what is one object
        assert read[0]["0"]["a"] is not read[2]["0"]["a"]
        ((found),) = tc.join({"left": cache, "right": cache}).read_batch([0], collate=list)
        assert_same([sample, sample], [found["left"], found["left"]])
        assert_same(sample, found["right"])
        assert_same(sample, cache.select(["*"]).read_batch([0], collate=list)[0])


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
        for found in cache.read_batch([1], collate=list):
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
