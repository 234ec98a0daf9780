"""Samples of 500, 2,000 and 8,000 tensors, from file to value: what a tensor costs does not grow with their number. Counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.codec.test_templates import num_calls

COUNTS = (500, 2_000, 8_000)


def of_dict(tensors: list[torch.Tensor]) -> Any:
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def of_shapes(tensors: list[torch.Tensor]) -> Any:
    return [tensor.new_empty(0, number) for number, tensor in enumerate(tensors)]


def of_set(tensors: list[torch.Tensor]) -> Any:
    return {"set": set(tensors)}


STEPS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: tc.open(path)[0],
    "read_batch": lambda path: tc.open(path).read_batch([0, 0]),
    "select": lambda path: tc.open(path).select("tensor 1*")[0],
    "read_batch of one": lambda path: tc.open(path).select("tensor 7").read_batch([0]),
    "write_index": tc.write_index,
}


@pytest.mark.parametrize("make", [of_dict, list, of_shapes, of_set])
@pytest.mark.long
def test_costs_of_a_tensor(tmp_path: Path, make: Any) -> None:
    costs: dict[str, list[float]] = {}
    for count in COUNTS:
        sample = make([torch.full((2,), float(i)) for i in range(count)])
        pattern = tmp_path / f"{count}-%d.tar"

        def write(pattern: Path = pattern, sample: Any = sample) -> None:
            with tc.ShardWriter(pattern, manifest=False) as sink:
                sink.write("a", sample)

        costs.setdefault("write", []).append(num_calls(write) / count)
        for name, step in STEPS.items() if make is of_dict else [("open", STEPS["open"])]:
            path = tmp_path / f"{count}-0.tar"
            costs.setdefault(name, []).append(num_calls(lambda step=step, path=path: step(path)) / count)
    for name, found in costs.items():
        assert found[-1] < 1.2 * found[-2], name
        assert found[-1] < 300, name
