"""The tree of a sample is bounded, whatever the sample is, and names what is in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.command import json_of, run
from tests.inspecting.caches import view
from tests.reading.batches import write


@pytest.fixture
def tree_of(tmp_path: Path) -> Any:
    """Return a function of a sample that returns its structure in `show --json`."""

    def show(sample: Any) -> dict[str, Any]:
        write(tmp_path / "0.tar", {"a": sample}, overwrite=True)
        assert run("show", tmp_path, "a").stdout
        structure: dict[str, Any] = json_of("show", tmp_path, "a")["structure"]
        return structure

    return show


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from _walk(child)


def test_a_tree(tree_of: Any) -> None:
    root = tree_of(
        OrderedDict(
            x=torch.zeros(2, 3).bfloat16(),
            y={"z": [np.zeros(4), None, {"deep": torch.tensor(1)}]},
            size=(1, 2),
            numbers=list(range(9)),
            empty={},
            tags={"a"},
            price=Decimal("1.5"),
            nested=deque([(torch.zeros(0),)]),
        )
    )
    assert (root["kind"], root["text"]) == ("OrderedDict", "OrderedDict of 8")
    assert [(node["name"], node["kind"], node["text"], node["tensor"]) for node in _walk(root)][1:] == [
        ("x", "tensor", "bf16[2, 3]", "x"),
        ("y", "dict", "dict of 1", None),
        ("z", "list", "list of 3", None),
        ("0", "ndarray", "f64[4]", "y.z.0"),
        ("1", "value", "None", None),
        ("2", "dict", "dict of 1", None),
        ("deep", "tensor", "i64[]", "y.z.2.deep"),
        ("size", "value", "(1, 2)", None),
        ("numbers", "value", "[0, 1, 2, 3, 4, 5, 6, 7, 8]", None),
        ("empty", "value", "{}", None),
        ("tags", "value", "{'a'}", None),
        ("price", "value", "Decimal('1.5')", None),
        ("nested", "deque", "deque of 1", None),
        ("0", "tuple", "tuple of 1", None),
        ("0", "tensor", "f32[0]", "nested.0.0"),
    ]


def test_large_samples_are_cut(tree_of: Any) -> None:
    many = tree_of({f"{i}": [{"a": i}] for i in range(1000)})
    assert many["text"] == "dict of 1,000"
    assert many["children"][-1]["text"] == "… and 900 more"
    assert len(list(_walk(tree_of({i: {j: {"k": 1} for j in range(90)} for i in range(90)})))) < 2300
    node = tree_of({"t": "x" * 100_000, "k" * 1000: 1, "n": 10**4000, "long": [["x" * 50] * 50] * 50})
    assert max(len(child["text"]) + len(child["name"]) for child in _walk(node)) < 600


def test_deep_and_cyclic_samples_end(tree_of: Any) -> None:
    deep: Any = {"x": 1}
    for _ in range(90):
        deep = {"d": deep}
    assert len(list(_walk(tree_of(deep)))) == 41
    cyclic: dict[str, Any] = {"a": 1, "list": [torch.zeros(1)]}
    cyclic["list"] += [cyclic, cyclic["list"]]
    texts = [node["text"] for node in tree_of(cyclic)["children"][1]["children"]]
    assert texts == ["f32[1]", "dict of 2: shown above", "list of 3: shown above"]
    values: list[Any] = [1]
    values.append(values)
    assert tree_of(values)["text"] == "[1, [1, [1, [1, […]]]]]"


def test_samples_that_differ(tmp_path: Path) -> None:
    write(tmp_path, [{"a": [torch.zeros(2)] * 2, "b": {"c": torch.zeros(1)}, "d": None}, {"b": None, 5: "x", "d": 7}])
    a, b, d, five = view(tmp_path)[0]["structure"]["children"]
    assert (a["name"], a["num_samples"], len(a["children"]), a["types"]) == ("a", 1, 2, ["list"])
    assert (b["text"], b["num_samples"], b["children"][0]["num_samples"]) == ("dict or None of 1", 2, 1)
    assert (d["types"], d["text"]) == (["None", "int"], "7")
    assert (five["name"], five["text"], five["types"]) == ("5", "'x'", ["str"])


def test_short_names_of_dtypes(tree_of: Any) -> None:
    names = {"bfloat16": "bf16", "float32": "f32", "int64": "i64", "uint8": "u8", "bool": "bool", "complex64": "c64"}
    names |= {"float8_e4m3fn": "f8_e4m3fn"}
    sample: dict[str, Any] = {name: torch.zeros(2).to(getattr(torch, name)) for name in names}
    arrays = {"f2": "f16", "<U5": "<U5", "M8[D]": "<M8[D]", "u4": "u32"}
    sample |= {name: np.zeros(2, name) for name in arrays}
    texts = {node["name"]: node["text"] for node in tree_of(sample)["children"]}
    assert texts == {name: f"{text}[2]" for name, text in (names | arrays).items()}
