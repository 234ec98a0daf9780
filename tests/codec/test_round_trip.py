"""decode(encode(x)) is x, bit for bit: structure, values, every dtype, types of containers, identity of aliases."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given

import wds_tensorcache as tc
from tests.codec import second_implementation as second
from tests.same import assert_same, tensor_bytes
from tests.strategies import TORCH_DTYPES, samples


@given(samples())
def test_any_sample(sample: Any) -> None:
    """Its members are those of the second implementation, and of the form that stock readers expect."""
    skeleton, tensors = members = tc.encode_sample(sample)
    assert second.encode(sample) == members
    assert_same(sample, second.decode(*members, verify=True))
    assert_same(sample, tc.decode_sample(*members))
    assert_same(sample, tc.decode_sample(*members, lazy=False, verify=True))
    assert_same(sample, tc.realize(tc.decode_sample(*members)))
    # and what was decoded is encoded to the same bytes
    assert tc.encode_sample(tc.decode_sample(*members)) == members
    assert tc.encode_sample(tc.decode_sample(*members, lazy=False)) == members
    check_stock_readers(skeleton, tensors)


def check_stock_readers(skeleton: bytes, tensors: bytes) -> None:
    pickle._Unpickler(io.BytesIO(skeleton)).load()  # type: ignore[attr-defined]  # the pure-Python one
    pickle.loads(skeleton)
    pickletools.dis(skeleton, io.StringIO())
    stored = safetensors.torch.load(tensors)
    begin = 8 + int.from_bytes(tensors[:8], "little")
    header = json.loads(tensors[8:begin])
    assert re.fullmatch("1 [0-9a-f]{16}", header.pop("__metadata__")["tensorcache"])
    assert stored.keys() == header.keys()
    assert begin % 64 == 0
    position, previous = 0, 16
    for name, entry in header.items():
        assert list(stored[name].shape) == entry["shape"]
        first, last = entry["data_offsets"]
        itemsize = stored[name].itemsize
        assert first == position
        assert itemsize <= previous, "wide elements come first"
        assert first % itemsize == 0
        position, previous = last, itemsize
    assert begin + position == len(tensors)


def test_members_may_be_any_bytes() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.arange(3)})
    strided = memoryview(bytes(b for byte in tensors for b in (byte, 0)))[::2]
    for member in (bytearray(tensors), memoryview(tensors).cast("b"), strided):
        lazy = tc.decode_sample(memoryview(skeleton), member, verify=True)["x"]
        assert lazy.load().tolist() == lazy.load(copy=False).tolist() == [0, 1, 2]
        assert tc.encode_sample({"x": lazy}) == (skeleton, tensors)
    for wrong in ("text", None, [1]):
        with pytest.raises(TypeError, match="a member must be bytes, bytearray or memoryview, got"):
            tc.decode_sample(skeleton, wrong)  # type: ignore[arg-type]


# --- dtypes, and tensors that are stored in another form or refused ---


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
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(3).expand(5, 3),
        torch.arange(10)[2::3],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.randn(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=["permuted", "channels_last", "expanded", "strided", "conj", "neg", "grad", "parameter"],
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


def test_structured_arrays_are_refused_with_a_remedy_that_works() -> None:
    x = np.array([(1, 2.0)], dtype=[("state", "i4"), ("reward", "f8")])
    with pytest.raises(tc.EncodeError, match="value at 'steps': an array of .*store {name: x"):
        tc.encode_sample({"steps": x})
    stored = tc.realize(tc.decode_sample(*tc.encode_sample({name: x[name] for name in x.dtype.names})))
    assert {name: array.tolist() for name, array in stored.items()} == {"state": [1], "reward": [2.0]}
