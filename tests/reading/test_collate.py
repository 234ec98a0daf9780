"""Each tensor is stacked, listed or padded as `collate` says for its name, and the record of the batch has its shapes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write

COUNT = 6


def sample(i: int) -> dict[str, Any]:
    return {
        "latent": torch.full((2, 3), float(i)),
        "cond": {"text": torch.full((1 + i % 3, 4), i, dtype=torch.bfloat16), "mask": np.full(1 + i % 3, True)},
        "odd": torch.full((2, 1 + i % 2), i),
        "scalar": torch.tensor(i),
        "i": i,
    }


folder = folder_of([sample(i) for i in range(COUNT)], max_samples=4)
EACH = {"cond.text": tc.pad(to=5, value=7), "cond.*": "list", "odd": "list"}


@pytest.mark.parametrize("numbers", [[0, 1, 5], [1, 4], [3], [2, 2, 2]])
def test_each_tensor_its_way(cache: Any, numbers: list[int]) -> None:
    batch = cache.read_batch(numbers, collate=EACH)
    assert batch["latent"].tolist() == [sample(i)["latent"].tolist() for i in numbers]
    assert batch["scalar"].tolist() == batch["i"].tolist() == numbers
    assert [row.tolist() for row in batch["odd"]] == [sample(i)["odd"].tolist() for i in numbers]
    assert [row.tolist() for row in batch["cond"]["mask"]] == [[True] * (1 + i % 3) for i in numbers]
    text = batch["cond"]["text"]
    assert (text.shape, text.dtype) == ((len(numbers), 5, 4), torch.bfloat16)
    for row, i in zip(text, numbers, strict=True):
        assert row.tolist() == [[i] * 4] * (1 + i % 3) + [[7] * 4] * (4 - i % 3)
    tensors = cache.read_tensors(numbers, collate=EACH)
    assert torch.equal(tensors["cond.text"], text)
    assert [row.tolist() for row in tensors["odd"]] == [row.tolist() for row in batch["odd"]]


def test_names_go_before_patterns(cache: Any) -> None:
    ways = {"cond.[t]*": "pad", "*": "list", "latent": "stack"}
    batch = cache.read_batch([0, 1], collate=ways, pad_value={"cond.text": -1})
    assert batch["latent"].shape == (2, 2, 3)
    assert isinstance(batch["odd"], list)
    assert batch["cond"]["text"][0].tolist() == [[0] * 4, [-1] * 4]
    assert cache.select("cond.*").read_batch([0, 3], collate={})["cond"]["text"].shape == (2, 1, 4)


def test_auto_for_one_tensor(cache: Any) -> None:
    tensors = cache.read_tensors([0, 1], collate={"cond.*": "list", "*": "auto"})
    assert [type(tensors[name]) for name in ("odd", "cond.text", "latent")] == [list, list, torch.Tensor]
    with pytest.raises(ValueError, match="collate='auto'"):
        cache.read_batch([0, 1], collate={"*": "auto"})


@pytest.mark.parametrize("name", [1, None, b"odd", ("cond", "text"), ("odd",)])
def test_names_are_strings(cache: Any, name: Any) -> None:
    for option, argument in (("collate", {name: "pad"}), ("pad_value", {name: 1})):
        arguments: dict[str, Any] = {"collate": "pad", option: argument}
        message = re.escape(f"{option}={{{name!r}: …}}, expected names of tensors or patterns, which are strings")
        for use in (cache.read_batch, cache.read_tensors, tc.join({"a": cache}).read_batch):
            with pytest.raises(TypeError, match=message):
                use([0, 3], **arguments)
        with pytest.raises(TypeError, match=message):
            tc.Loader(cache, **arguments)


@pytest.mark.parametrize("way", ["pad", tc.pad(to=3)])
def test_only_the_first_dimension_is_padded(cache: Any, way: Any) -> None:
    rest = cache.select(["latent", "cond.*", "scalar"])
    batch = rest.read_batch([0, 2], collate=way)
    assert batch["cond"]["text"].shape == (2, 3, 4)
    assert batch["cond"]["mask"].tolist() == [[True, False, False], [True] * 3]
    assert batch["latent"].shape == (2, 3 if way == tc.pad(to=3) else 2, 3)
    assert batch["scalar"].tolist() == [0, 2]
    message = r"'odd' is \[2, 1\] in sample '000', but \[2, 2\] in '001'.*first dimension"
    with pytest.raises(tc.BatchError, match=message):
        cache.read_batch([0, 1], collate=way)


def test_rows_that_are_too_long(cache: Any) -> None:
    with pytest.raises(tc.BatchError, match=r"tensor 'cond.text' has length 3 in sample '002', more than pad\(to=2\)"):
        cache.read_batch([0, 1, 2], collate={"cond.text": tc.pad(to=2), "cond.mask": "list", "odd": "list"})
    for to in (-1, 2.0, True, [], [2, 1], [1, 1], [-1, 2], [1.0], [True, 2], {1: 2}, np.array([1, 2])):
        with pytest.raises(ValueError, match="to=.*, expected a length"):
            tc.pad(to=to)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [tc.pad(to=[2, 5], value=7), tc.pad(to=(np.int64(2), 5), value=7)])
def test_the_smallest_length_that_fits(cache: Any, way: Any) -> None:
    """In `read_batch`, `read_tensors`, both loaders and masks; an error names the sample that none fits."""
    assert way == tc.pad(to=[2, 5], value=7)
    ways = {"cond.text": way, "cond.mask": "list", "odd": "list"}
    for numbers, length in (([0, 3], 2), ([1, 4], 2), ([0, 1], 2), ([0, 2], 5), ([2], 5)):
        batch, info = cache.read_batch_with_info(numbers, collate=ways)
        assert batch["cond"]["text"].shape == (len(numbers), length, 4)
        for row, i in zip(batch["cond"]["text"], numbers, strict=True):
            assert row.tolist() == [[i] * 4] * (1 + i % 3) + [[7] * 4] * (length - 1 - i % 3)
        mask = [[at <= i % 3 for at in range(length)] for i in numbers]
        assert info.mask("cond.text").tolist() == pickle.loads(pickle.dumps(info)).mask("cond.text").tolist() == mask
        assert torch.equal(cache.read_tensors(numbers, collate=ways)["cond.text"], batch["cond"]["text"])
    message = r"tensor 'cond.text' has length 3 in sample '002', more than pad\(to=\[1, 2\]\)"
    with pytest.raises(tc.BatchError, match=message):
        cache.read_batch([0, 1, 2], collate={"cond.*": tc.pad(to=[1, 2]), "odd": "list"})


@pytest.mark.parametrize(
    ("value", "pad_value"),
    [
        (torch.ones(1).half(), 1e5),
        (torch.ones(1).to(torch.float8_e4m3fn), float("inf")),
        (torch.ones(1, dtype=torch.bool), 5),
        (torch.ones(1, dtype=torch.uint8), 256),
        (np.ones(1, "?"), float("nan")),
        (np.ones(1, "i4"), 0.5),
        (torch.ones(1), None),
        (np.ones(1, "U1"), "x"),
    ],
    ids=str,
)
def test_padding_that_a_dtype_has_not(tmp_path: Path, value: Any, pad_value: Any) -> None:
    longer = torch.cat([value] * 2) if isinstance(value, torch.Tensor) else np.concatenate([value] * 2)
    message = f"pad_value={pad_value!r} cannot be represented in {value.dtype}, the dtype of tensor 'x'"
    cache = tc.open(write(tmp_path, [{"x": value}, {"x": longer}]))
    with pytest.raises(tc.BatchError, match=re.escape(message)):
        cache.read_batch([0, 1], collate="pad", pad_value=pad_value)


def test_padding_by_name(tmp_path: Path) -> None:
    samples = [
        {"labels": torch.arange(i), "h": torch.ones(i).bfloat16(), "array": np.full(i, 5), "s": np.full(i, "w")}
        for i in (1, 3)
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        pad_value = {"labels": -100, "h": float("-inf"), "array": -1}
        batch = cache.read_batch([0, 1], collate="pad", pad_value=pad_value)
        assert batch["labels"].tolist() == [[0, -100, -100], [0, 1, 2]]
        assert batch["h"].tolist() == [[1, float("-inf"), float("-inf")], [1] * 3]
        assert batch["array"].tolist() == [[5, -1, -1], [5] * 3]
        assert batch["s"].tolist() == [["w", "", ""], ["w"] * 3]
        batch = cache.read_batch([0, 1], collate="pad", pad_value={"h*": 5, "labels": 7, "l*": 9})  # a name goes first
        assert (batch["h"].tolist()[0], batch["labels"].tolist()[0], batch["array"].tolist()[0]) == (
            [1, 5, 5],
            [0, 7, 7],
            [5, 0, 0],
        )
        batch = cache.read_batch([0, 1], collate="pad", pad_value={"h": float("nan")})
        assert batch["h"].isnan().tolist() == [[False, True, True], [False] * 3]
        with pytest.raises(tc.BatchError, match="pad_value has an unknown tensor 'y'"):
            cache.read_batch([0, 1], collate="pad", pad_value={"y": 1})


@pytest.mark.parametrize(
    ("collate", "error", "message"),
    [
        ("cat", ValueError, "collate='cat', expected 'stack', 'list', 'pad', tc.pad"),
        ({"latent": list}, ValueError, "collate=<class 'list'>, expected 'stack', .*, or a function of all samples"),
        (None, ValueError, "collate=None, expected"),
        ({"laten": "list"}, tc.BatchError, "collate has an unknown tensor 'laten'; there are .*'odd'"),
    ],
    ids=str,
)
def test_ways_that_are_none(cache: Any, collate: Any, error: type[Exception], message: str) -> None:
    for each in (cache, tc.join([cache])):
        with pytest.raises(error, match=message):
            each.read_batch([0], collate=collate)
    with pytest.raises(error, match=message):
        tc.Loader(cache, 2, collate=collate)


@pytest.mark.parametrize("collate", ["stack", {"cond.*": "list", "latent": "pad"}, len], ids=str)
def test_info(cache: Any, collate: Any) -> None:
    view, numbers = cache[1:].select(["latent", "cond.*"]), [0, 3] if collate == "stack" else [2, 0]
    batch, info = view.read_batch_with_info(numbers, collate=collate)
    assert type(batch) is type(view.read_batch(numbers, collate=collate))
    copied = pickle.loads(pickle.dumps(info))
    assert copied == info
    assert copied.cache is None
    for record in (info, copied):
        assert (record.indices.tolist(), record.indices.dtype) == (numbers, np.int64)
        assert not record.indices.flags.writeable
        assert record.keys == [f"00{1 + i}" for i in numbers]
        assert record.is_padding.tolist() == [False, False]
        assert record.shapes["cond.text"].tolist() == [[1 + (1 + i) % 3, 4] for i in numbers]
        assert record.shapes["cond.text"].dtype == torch.int64
        assert set(record.shapes) == set(view.schema)


@pytest.mark.parametrize(("way", "length"), [("pad", 3), (tc.pad(to=5), 5), ("list", 3)])
def test_masks(cache: Any, way: Any, length: int) -> None:
    ways = {"cond.*": way, "odd": "list"}
    info = cache.read_batch_with_info(range(4), collate=ways)[1]
    for record in (info, pickle.loads(pickle.dumps(info)), info.to("cpu")):
        mask = record.mask("cond.text")
        assert mask.dtype == torch.bool
        assert mask.tolist() == [[at < 1 + i % 3 for at in range(length)] for i in range(4)]
    assert info.to("meta").mask("cond.text").is_meta
    assert cache.read_batch_with_info(range(4), "meta", collate=ways)[1].mask("cond.text").is_meta


def test_masks_by_name(cache: Any) -> None:
    _, info = tc.join({"a": cache}).read_batch_with_info([0], collate={"a.odd": "list", "a.cond.*": tc.pad(to=4)})
    assert info.mask("a.cond.text").tolist() == [[True, False, False, False]]
    assert cache.read_batch_with_info([0, 3], collate=list)[1].mask("cond.text").shape == (2, 1)
    with pytest.raises(KeyError, match="no tensor 'text' .*; there are .*'a.cond.text'"):
        info.mask("text")


def test_info_of_samples_that_differ(tmp_path: Path) -> None:
    samples = [{"x": torch.zeros(2), "y": torch.zeros(1)}]
    samples += [{"x": torch.zeros(1, 3), "z": torch.zeros(2), "y": torch.ones(4)}]
    with tc.open(write(tmp_path, samples)) as cache:
        found, info = cache.read_batch_with_info(["001", "000"], collate=list)
        assert [list(each) for each in found] == [["x", "z", "y"], ["x", "y"]]
        assert {name: shape.tolist() for name, shape in info.shapes.items()} == {"y": [[4], [1]], "z": [[2], [0]]}
