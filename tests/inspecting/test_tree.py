"""The tree of a sample is bounded, whatever the sample is, and names what is in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.codec.dtypes import TORCH_TRUE
from wds_tensorcache.inspecting.tree import Node, sample_tree, short_dtype


def _tree(sample: Any) -> Node:
    return sample_tree(tc.decode_sample(*tc.encode_sample(sample)))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)


def test_a_tree() -> None:
    found = _tree(
        OrderedDict(
            x=torch.zeros(2, 3).bfloat16(),
            y={"z": [np.zeros(4), None, {"deep": torch.tensor(1)}]},
            size=(1, 2),
            numbers=[1, 2, 3, 4, 5, 6],
            long=list(range(9)),
            empty={},
            tags={"a"},
            price=Decimal("1.5"),
            nested=deque([(torch.zeros(0),)]),
        )
    )
    assert (found.kind, found.text) == ("OrderedDict", "OrderedDict of 9")
    x, y, size, numbers, long, empty, tags, price, nested = found.children
    assert x == Node("x", "tensor", "bf16[2, 3]", "x")
    assert (y.kind, y.text, y.tensor) == ("dict", "dict of 1", None)
    assert [(child.name, child.kind, child.text, child.tensor) for child in y.children[0].children] == [
        ("0", "ndarray", "f64[4]", "y.z.0"),
        ("1", "value", "None", None),
        ("2", "dict", "dict of 1", None),
    ]
    assert (size.text, numbers.text, empty.text, tags.text) == ("(1, 2)", "[1, 2, 3, 4, 5, 6]", "{}", "{'a'}")
    assert (long.kind, len(long.children), long.children[8].text) == ("list", 9, "8")
    assert price.text == "Decimal('1.5')"
    assert [node.text for node in _walk(nested)] == ["deque of 1", "tuple of 1", "f32[0]"]


def test_one_tensor_or_value() -> None:
    assert _tree(torch.zeros(3)).text == "f32[3]"
    assert _tree("text") == Node("", "value", "'text'")


def test_large_samples_are_cut() -> None:
    many = _tree({f"{i}": [{"a": i}] * 1 for i in range(3000)})
    assert many.text == "dict of 3,000"
    assert many.children[-1] == Node("", "more", "… and 2,900 more")
    wide = _tree([[{"k": (i, j)} for j in range(90)] for i in range(90)])
    assert len(list(_walk(wide))) < 2300
    text = _tree({"t": "x" * 100_000, "k" * 1000: 1, "n": 10**4000})
    assert max(len(node.text) + len(node.name) for node in _walk(text)) < 400
    assert "100,000 characters" in text.children[0].text


def test_deep_and_cyclic_samples_end() -> None:
    deep: Any = {"x": 1}
    for _ in range(150):
        deep = {"d": deep}
    assert len(list(_walk(_tree(deep)))) == 41
    cyclic: list[Any] = [{"a": 1}]
    cyclic.append(cyclic)
    again = sample_tree(cyclic).children[1]
    assert (again.text, again.children) == ("list of 2: the same as the whole sample", ())
    shared = {"k": 1}
    found = _tree({"a": shared, "b": shared})
    assert [child.text for child in found.children] == ["dict of 1", "dict of 1: the same as 'a'"]


@pytest.mark.parametrize("dtype", TORCH_TRUE, ids=str)
def test_short_names_differ(dtype: torch.dtype) -> None:
    assert [other for other in TORCH_TRUE if short_dtype(other) == short_dtype(dtype)] == [dtype]


def test_short_names() -> None:
    names = {"bfloat16": "bf16", "float32": "f32", "int64": "i64", "uint8": "u8", "bool": "bool", "complex64": "c64"}
    names |= {"float8_e4m3fn": "f8_e4m3fn"}
    assert {name: short_dtype(getattr(torch, name)) for name in names} == names
    assert [short_dtype(np.dtype(name)) for name in ("f2", "<U5", "M8[D]", "u4")] == ["f16", "<U5", "<M8[D]", "u32"]
