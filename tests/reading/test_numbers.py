"""The numbers of a batch in torch's functions and operators, and in numpy's."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from operator import ge, lt, sub, truediv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import write

COUNT = 4
WEIGHTS = [0.1, 2.5, -1e300, 7.0]
X = torch.arange(COUNT * 3, dtype=torch.float32).reshape(COUNT, 3)
LOSS = torch.tensor([1.0, 2.0, 3.0, 4.0])
ROWS = torch.arange(20.0).reshape(5, 4)


def sample(i: int) -> dict[str, Any]:
    return {
        "x": X[i],
        "weight": WEIGHTS[i],
        "index": [2, 0, 3, 1][i],
        "keep": i % 2 == 0,
        "mixed": [1, 2.5, True, 4][i],
        "size": (i, 2 * i),
        "large": (1 << 63) - 1 + (i == 2),
        "name": f"n{i}",
        "ids": [0] * (1 + i),
        "some": None if i == 1 else i,
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tc.open(write(tmp_path_factory.mktemp("numbers"), [sample(i) for i in range(COUNT)])) as opened:
        yield opened


@pytest.fixture(scope="module", params=["lazy", "pickled", "worker"])
def batch(cache: Any, request: pytest.FixtureRequest) -> Any:
    if request.param == "worker":
        return next(iter(DataLoader(range(COUNT), batch_size=COUNT, collate_fn=cache.read_batch, num_workers=1)))
    found = cache.read_batch(range(COUNT))
    return found if request.param == "lazy" else pickle.loads(pickle.dumps(found))


def assert_equal(found: Any, expected: torch.Tensor) -> None:
    assert type(found) is torch.Tensor
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_they_are_the_tensors_of_their_lists(batch: Any) -> None:
    dtypes = {"weight": torch.float32, "index": torch.int64, "keep": torch.bool, "mixed": torch.float32}
    for name, dtype in dtypes.items():
        values = [sample(i)[name] for i in range(COUNT)]
        assert batch[name].tolist() == values
        assert [type(value) for value in batch[name].tolist()] == [type(value) for value in values]
        assert_equal(torch.as_tensor(batch[name]), torch.tensor(values, dtype=dtype))
        assert_equal(torch.tensor(batch[name]), torch.tensor(values, dtype=dtype))
        assert_equal(torch.clone(batch[name]), torch.tensor(values, dtype=dtype))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.clone(batch["weight"]).tolist() == WEIGHTS
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(torch.as_tensor(batch["size"]), torch.tensor([[0, 0], [1, 2], [2, 4], [3, 6]]))


FUNCTIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda weight, index, keep: LOSS * weight,
    lambda weight, index, keep: LOSS.clone().mul_(weight),
    lambda weight, index, keep: LOSS.half() * weight,
    lambda weight, index, keep: weight < LOSS,
    lambda weight, index, keep: index == LOSS,
    lambda weight, index, keep: ROWS[index],
    lambda weight, index, keep: LOSS[keep],
    lambda weight, index, keep: functional.cross_entropy(ROWS[:COUNT], target=index),
    lambda weight, index, keep: torch.where(keep, LOSS, weight),
    lambda weight, index, keep: torch.cat([weight, LOSS]),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_torch_takes_them(cache: Any, number: int) -> None:
    function, names = FUNCTIONS[number], ("weight", "index", "keep")
    batch = cache.read_batch(range(COUNT))
    sent = pickle.loads(pickle.dumps(batch))
    expected = function(*(torch.tensor([sample(i)[name] for i in range(COUNT)]) for name in names))
    assert_equal(function(*(batch[name] for name in names)), expected)
    assert_equal(function(*(sent[name] for name in names)), expected)


def test_operators_with_numbers_and_each_other(batch: Any) -> None:
    weight, index, keep = (torch.tensor(batch[name].tolist()) for name in ("weight", "index", "keep"))
    for operator in (sub, truediv, lt, ge):
        assert_equal(operator(batch["index"], 2), operator(index, 2))
        assert_equal(operator(2.5, batch["index"]), operator(2.5, index))
        assert_equal(operator(batch["index"], batch["weight"]), operator(index, weight))
    assert_equal(batch["keep"] & batch["keep"], keep)
    assert_equal(batch["keep"] | ~keep, keep | ~keep)
    assert_equal(-batch["index"], -index)
    assert_equal(~batch["keep"], ~keep)
    assert_equal(batch["index"] == 3, index == 3)
    assert_equal(batch["index"] != 3, index != 3)


def test_comparisons_with_lists_and_of_texts_are_those_of_lists(batch: Any) -> None:
    assert batch["index"] == [2, 0, 3, 1]
    assert (batch["index"] != [2, 0, 3, 1]) is False
    assert (batch["index"] == batch["weight"]) is False
    assert (batch["index"] != batch["weight"]) is True
    assert (batch["name"] == 3) is False
    assert (batch["name"] != "n1") is True
    assert 3 in batch["index"]
    assert 5 not in batch["index"]


def test_they_are_indexed_by_tensors(batch: Any) -> None:
    assert_equal(batch["weight"][torch.tensor([False, True, False, True])], torch.tensor([2.5, 7.0]))
    assert_equal(batch["index"][torch.tensor([3, 3])], torch.tensor([1, 1]))
    assert batch["index"][torch.tensor(2)] == 3


def test_lazy_tensors_and_numpy_take_them(cache: Any, batch: Any) -> None:
    lazy = tc.flatten(cache[1])["x"]
    index = batch["index"][:3]
    batch3 = cache.read_batch([0, 1, 2])
    assert_equal(lazy * batch3["index"], X[1] * torch.tensor(index))
    assert_equal(batch3["index"] * lazy, X[1] * torch.tensor(index))
    assert np.asarray(batch["weight"]).tolist() == WEIGHTS
    assert np.asarray(batch["index"]).dtype == np.int64
    for found in (np.ones(COUNT) * batch["index"], batch["index"] * np.ones(COUNT), np.multiply(batch["index"], 1.0)):
        assert type(found) is np.ndarray
        assert found.tolist() == [2, 0, 3, 1]
    assert (batch["index"] == np.array([2, 0, 0, 0])).tolist() == [True, True, False, False]
    assert np.mean(batch["index"]) == 1.5
    rows = ROWS.clone()
    rows[0, :COUNT] = batch["index"]
    rows[batch["index"], 1] = 9
    assert rows[0].tolist() == [2, 9, 3, 1]
    assert rows[:, 1].tolist() == [9, 9, 9, 9, 17]


def test_they_go_to_the_device_of_the_other_tensors(batch: Any) -> None:
    ones = torch.ones(COUNT, device="meta")
    for found in (batch["weight"] * ones, torch.where(batch["keep"], ones, 0.0), ones[batch["index"]]):
        assert found.is_meta


def test_values_that_form_no_tensor_are_named(batch: Any) -> None:
    for name, shown in (("large", "9223372036854775807"), ("name", "'n0'"), ("some", "0"), ("ids", "a list")):
        with pytest.raises(tc.BatchError, match=f"the values at '{name}', such as {shown}, do not form a tensor"):
            torch.clone(batch[name])
    with pytest.raises(tc.BatchError, match="'name'"):
        LOSS * batch["name"]
    with pytest.raises(ValueError, match="Overflow"):
        torch.as_tensor(batch["large"])
    with pytest.raises(TypeError):
        batch["index"] + [1]


@pytest.mark.parametrize("lists", [[[], [1]], [[[], [2]], [[], [3]]]])
def test_lists_of_which_the_first_is_empty(tmp_path: Path, lists: list[Any]) -> None:
    folder = write(tmp_path, [{"x": torch.ones(1), "ids": ids} for ids in lists])
    with tc.open(folder) as cache, pytest.raises(tc.BatchError, match="lists of different lengths"):
        torch.clone(cache.read_batch([0, 1])["ids"])
