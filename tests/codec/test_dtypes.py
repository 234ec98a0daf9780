"""The dtype table: every dtype bit for bit, in the stored form that FORMAT.md names, and every refusal with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.same import tensor_bytes
from tests.strategies import TORCH_DTYPES


def make_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    raw = torch.arange(count * 16, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    raw = raw & 1 if dtype is torch.bool else raw
    return raw.view(dtype)[:count].reshape(shape) if count else raw.view(dtype).reshape(shape)


def round_trip(value: Any) -> Any:
    return tc.decode_sample(*tc.encode_sample({"x": value}), verify=True)["x"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_strides_of_one_element_or_none(dtype: torch.dtype) -> None:
    """torch calls these contiguous, whatever their strides."""
    wide = make_tensor(dtype, 1, 16)
    for tensor in (wide[:, 3], wide[:, 3:4], wide[:0, 3], wide.T[5]):
        loaded = round_trip(tensor).load()
        assert tensor_bytes(loaded) == tensor_bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1))
        assert loaded.shape == tensor.shape


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make_tensor(dtype, *shape)
    lazy = round_trip(tensor)
    assert (lazy.dtype, lazy.shape, lazy.nbytes) == (dtype, tensor.shape, tensor.nbytes)
    for loaded in (lazy.load(), lazy.load(out=torch.empty_like(tensor)), lazy.load(copy=False)):
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert tensor_bytes(loaded) == tensor_bytes(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(10)[2::3],
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=["channels_last", "strided", "neg", "parameter"],
)
def test_values_of_unusual_tensors(tensor: torch.Tensor) -> None:
    loaded = round_trip(tensor).load()
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad
    assert loaded.is_contiguous()
    assert torch.equal(loaded, tensor.detach())


def test_tensors_inside_torch_func_are_refused() -> None:
    with pytest.raises(tc.EncodeError, match="cannot be read"):
        torch.func.vmap(lambda x: tc.encode_sample(x) and x)(torch.zeros(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_are_refused() -> None:
    try:
        tensor = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)
    except (AttributeError, RuntimeError):
        pytest.skip(f"torch {torch.__version__} has no quantized tensors any more")
    with pytest.raises(tc.EncodeError, match="quantized tensor cannot be stored"):
        tc.encode_sample(tensor)
