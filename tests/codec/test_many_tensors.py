"""Samples of 100, 1,000 and 10,000 tensors: what one costs does not depend on how many there are. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.codec.test_templates import num_calls

COUNTS = (100, 1_000, 10_000)


def of_dicts(tensors: list[torch.Tensor]) -> Any:
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def nested(tensors: list[torch.Tensor]) -> Any:
    return [{"x": tensor, "number": number} for number, tensor in enumerate(tensors)]


@pytest.mark.parametrize("make", [of_dicts, list, nested])
@pytest.mark.long
def test_costs_of_a_tensor(make: Callable[[list[torch.Tensor]], Any]) -> None:
    written, read = [], []
    for count in COUNTS:
        tensors = [torch.full((2,), float(number)) for number in range(count)]
        # under new names, so that nothing is known of an earlier sample
        first, second = ({f"{make.__name__} {count} {n}": make(tensors)} for n in range(2))
        written.append(num_calls(lambda sample=first: tc.encode_sample(sample)) / count)
        members = tc.encode_sample(second, align=8)
        read.append(num_calls(lambda members=members: tc.decode_sample(*members)) / count)
    assert max(written) < 1.1 * min(written)
    assert max(read) < 1.1 * min(read)
    assert max(written) < 150
    assert max(read) < 100
