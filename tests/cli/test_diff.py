"""Two caches are equal, or each difference is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.cli.conftest import HOSTILE


def sample(i: int) -> dict[str, Any]:
    return {
        "x": torch.arange(6.0) + i,
        "nested": [torch.full((2, 3), i).bfloat16(), {"text": f"photo {i}", "size": (1, i), "nan": float("nan")}],
        "array": np.array(["a", f"b{i}"]),
        "empty": torch.zeros(0, 3),
        "weird": torch.tensor([1.0, float("nan"), float("inf"), -0.0]),
    }


def write(folder: Path, samples: dict[str, Any]) -> Path:
    with tc.ShardWriter(folder, max_samples=2, fsync=False) as sink:
        for key, value in samples.items():
            sink.write(key, value)
    return folder


def test_equal_caches(tmp_path: Path) -> None:
    samples = {f"k{i}": sample(i) for i in range(5)}
    first, second = write(tmp_path / "a", samples), write(tmp_path / "b", dict(reversed(samples.items())))
    found = json_of("diff", first, second)
    assert (found["is_equal"], found["num_equal"], found["changes"]) == (True, 5, [])
    assert run("diff", first, second).stdout.startswith("5 samples equal, 0 changed")


def test_keys(tmp_path: Path) -> None:
    samples = {f"k{i}": sample(i) for i in range(4)}
    first = write(tmp_path / "a", {key: samples[key] for key in ("k0", "k1", "k2")})
    second = write(tmp_path / "b", {key: samples[key] for key in ("k3", "k2")})
    found = json_of("diff", first, second, status=1)
    assert (found["only_first"], found["only_second"], found["num_equal"]) == (["k0", "k1"], ["k3"], 1)
    lines = run("diff", first, second, "--limit", 2, status=1).stdout.splitlines()
    assert lines[:3] == [f"only in {first}: k0", f"only in {first}: k1", "… and 1 more; --limit lists them"]


CHANGES: dict[str, tuple[Any, str, str]] = {
    "number": (lambda it: it["x"].__setitem__(2, 2.5), "x", "1 of 6 elements differ, by up to 0.5"),
    "sign of zero": (lambda it: it["weird"].__setitem__(3, 0.0), "weird", "1 of 4 elements differ, by up to 0"),
    "NaN": (lambda it: it["weird"].__setitem__(0, float("nan")), "weird", "1 of 4 elements differ, by up to inf"),
    "bfloat16": (lambda it: it["nested"][0].add_(1), "nested.0", "6 of 6 elements differ, by up to 1"),
    "dtype": (lambda it: it.update(x=it["x"].double()), "x", "is f32[6], and f64[6] in the second cache"),
    "shape": (lambda it: it.update(x=it["x"][:5]), "x", "is f32[6], and f32[5] in the second cache"),
    "kind": (lambda it: it.update(x=it["x"].numpy()), "x", "is f32[6] (LazyTensor), and f32[6] (LazyArray)"),
    "gone": (lambda it: it.pop("x"), "x", "is a tensor only in the first cache"),
    "new": (lambda it: it.update(new=torch.ones(1)), "new", "is a tensor only in the second cache"),
    "texts": (lambda it: it["array"].__setitem__(0, "c"), "array", "has other elements"),
    "value": (
        lambda it: it["nested"][1].update(text="x"),
        "nested.1.text",
        "is 'photo 1', and 'x' in the second cache",
    ),
    "type": (lambda it: it["nested"][1].update(size=[1, 1]), "nested.1.size", "is a tuple, and a list"),
    "value gone": (lambda it: it["nested"][1].pop("text"), "nested.1.text", "is only in the first cache"),
}


@pytest.mark.parametrize(("change", "name", "what"), CHANGES.values(), ids=CHANGES)
def test_changes(tmp_path: Path, change: Any, name: str, what: str) -> None:
    first = write(tmp_path / "a", {f"k{i}": sample(i) for i in range(3)})
    changed = {f"k{i}": sample(i) for i in range(3)}
    change(changed["k1"])
    found = json_of("diff", first, write(tmp_path / "b", changed), status=1)
    assert (found["num_equal"], found["num_changed"]) == (2, 1)
    (only,) = found["changes"]
    assert (only["key"], only["name"]) == ("k1", name)
    assert what in only["what"]


def test_hostile_names(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"k": {HOSTILE: HOSTILE, "x": torch.ones(1)}})
    second = write(tmp_path / "b", {"k": {HOSTILE: HOSTILE + "!", "x": torch.ones(1)}})
    out = run("diff", first, second, status=1).stdout
    assert out.count("\n") == 2
    assert "\x1b" not in out


def test_wrong_usage(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"k": sample(0)})
    run("diff", first, status=2)
    run("diff", first, tmp_path / "nowhere", status=2)
