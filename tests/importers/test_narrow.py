"""Narrowing keeps every bit of every number, and happens exactly if that is possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wds_tensorcache.importers.narrow import narrow


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().contiguous().view(torch.int32)


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Return all 65,536 values of a dtype of 16 bits."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def test_all_values_of_bfloat16() -> None:
    values = all_of(torch.bfloat16)
    found = narrow(values.float())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))  # also the bits of NaN
    assert torch.equal(bits(found), bits(values))


def test_all_values_of_float16() -> None:
    """Each alone: either it comes back bit for bit, or it stays."""
    for value in all_of(torch.float16)[::7].float():
        found = narrow(value.reshape(1))
        assert torch.equal(bits(found), bits(value.reshape(1)))
    numbers = all_of(torch.float16)
    numbers = numbers[~numbers.isnan()].float()
    found = narrow(numbers)
    assert found.dtype == torch.float16
    assert torch.equal(bits(found), bits(numbers))


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=40), st.integers(0, 3))
def test_any_bits(words: list[int], kind: int) -> None:
    mask = [-1, ~0xFFFF, ~0x1FFF, 0][kind]
    tensor = torch.tensor([word & mask for word in words], dtype=torch.int32).view(torch.float32)
    found = narrow(tensor)
    assert found.dtype == (torch.bfloat16 if kind in (1, 3) else found.dtype)
    assert torch.equal(bits(found), bits(tensor))
    is_half = torch.equal(bits(tensor.half()), bits(tensor))
    is_brain = torch.equal(bits(tensor.bfloat16()), bits(tensor)) or not (bits(tensor) & 0xFFFF).any()
    assert (found is tensor) == (not is_half and not is_brain)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 9_999])
def test_one_value_that_does_not_fit(at: int) -> None:
    """Wherever it is, also after the first values."""
    tensor = torch.ones(10_000)
    assert narrow(tensor).dtype == torch.bfloat16
    tensor[at] = 1 + 2**-10
    assert narrow(tensor).dtype == torch.float16
    tensor[at] = 1 + 2**-20
    assert narrow(tensor) is tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.int32),
        torch.ones(0),
        torch.ones(3, dtype=torch.complex64),
    ],
    ids=repr,
)
def test_other_tensors_stay(tensor: torch.Tensor) -> None:
    assert narrow(tensor) is tensor


def test_shapes_and_strides() -> None:
    for tensor in (
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor(3.0),
        torch.ones(2, 3, 4)[:, ::2],
        torch.ones(1).expand(5),
    ):
        found = narrow(tensor)
        assert found.dtype == torch.bfloat16
        assert found.shape == tensor.shape
        assert np.array_equal(found.float().numpy(), tensor.numpy())
