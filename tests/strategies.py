"""Hypothesis: nested samples with every dtype, 0-d and empty tensors, odd strides, aliases and every listed type."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict, deque
from datetime import timedelta, timezone
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import safetensors.torch
import torch
from hypothesis import strategies as st

import wds_tensorcache as tc


def _is_storable(dtype: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized dtypes are deprecated
        try:
            tc.encode_sample(torch.empty(0, dtype=dtype))
        except tc.EncodeError:
            return False
    return True


TORCH_DTYPES = sorted(filter(_is_storable, {x for x in vars(torch).values() if isinstance(x, torch.dtype)}), key=str)
# torch cannot print its 4-bit floats, which Hypothesis does: tests/codec/test_round_trip.py has them
_PRINTABLE = [dtype for dtype in TORCH_DTYPES if "float4" not in str(dtype)]
if "F8_E4M3FNUZ" not in safetensors.torch._TYPES:  # safetensors 0.7 cannot read them back
    _PRINTABLE = [dtype for dtype in _PRINTABLE if "fnuz" not in str(dtype)]
NUMPY_DTYPES = [
    *(np.dtype(kind) for kind in ["?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d", "F", "D", "S3", "U4"]),
    *(np.dtype(kind) for kind in (">i2", ">f8", ">U2", "M8[ns]", "m8[25s]", ">M8[D]")),
]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(1, dtype=torch.uint8).expand(16).contiguous().view(dtype).element_size()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every storable dtype with arbitrary bits, some not contiguous, conjugated, expanded or with gradients."""
    dtype, shape = draw(st.sampled_from(_PRINTABLE)), draw(shapes)
    nbytes = math.prod(shape) * _itemsize(dtype)
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).view(shape)
    how = draw(st.sampled_from(["plain", "transpose", "expand", "conj", "grad", "narrow"]))
    if how == "transpose" and tensor.ndim > 1:
        tensor = tensor.transpose(0, -1)
    elif how == "expand" and tensor.ndim:
        tensor = tensor[:1].expand(tensor.shape[0] and 3, *tensor.shape[1:])
    elif how == "conj" and tensor.is_complex() and dtype is not torch.complex32:
        tensor = tensor.conj()
    elif how == "grad" and dtype.is_floating_point and _itemsize(dtype) > 1:
        tensor = tensor.requires_grad_()
    elif how == "narrow" and tensor.ndim and tensor.shape[0]:
        tensor = tensor[1:]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of every storable dtype, some big-endian or transposed."""
    dtype, shape = draw(st.sampled_from(NUMPY_DTYPES)), draw(shapes)
    if dtype.kind in "SU":
        text = st.text("aé€", max_size=3) if dtype.kind == "U" else st.binary(max_size=3)
        count = math.prod(shape)
        return np.array(draw(st.lists(text, min_size=count, max_size=count)), dtype).reshape(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


zones = st.none() | st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
keys = st.text(max_size=4) | st.sampled_from(
    ["a", "b.c", "%", "x?y", "k:1", "__metadata__", "0", "~2", "é", "\ud800", "\n"]
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 600), 1 << 600) | st.integers(0, 70000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=8) | st.just("tensor:x") | st.just("\ud800"),
    st.binary(max_size=8) | st.binary(min_size=256, max_size=300),
    st.text(min_size=256, max_size=300),
    st.decimals(),
    st.fractions(),
    st.dates(),
    st.datetimes(timezones=zones) | st.datetimes().map(lambda value: value.replace(fold=1)),
    st.times(timezones=zones),
    st.timedeltas(),
    st.uuids(),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers(1)),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.sampled_from(
        [..., torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"), np.dtype(">f4"), np.dtype("M8[ns]")]
    ),
    st.builds(torch.Size, shapes),
    st.builds(PurePosixPath, st.sampled_from(["a", "a/b", "/", ".", "../x y"])),
    st.sampled_from(
        [np.float32(1.5), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 - 2j)]
    ),
    st.sampled_from(
        [np.str_("x"), np.bytes_(b"y"), np.datetime64(5, "25s"), np.timedelta64("NaT", "ns"), np.float16(0.1)]
    ),
)
hashable = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), keys, st.binary(max_size=4), st.uuids()
    )
    | st.builds(Fraction, st.integers(), st.integers(1, 99)),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=4)
    mappings = st.dictionaries(keys | hashable, inner, max_size=4)
    return st.one_of(
        items,
        items.map(tuple),
        mappings,
        mappings.map(OrderedDict),
        mappings.map(lambda pairs: defaultdict(list, pairs)),
        st.builds(deque, items, st.none() | st.integers(4, 6)),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    )


# built once: Hypothesis checks a new strategy in as much time as it draws a sample
_shared = st.shared(st.tuples(tensors(), arrays(), st.lists(plain, min_size=1, max_size=1)))
_again = st.builds(lambda parts, number: parts[number], _shared, st.integers(0, 2))
_nested = st.recursive(
    plain | tensors() | arrays() | _again | st.binary(max_size=4).map(bytearray), _nest, max_leaves=12
)


@st.composite
def samples(draw: st.DrawFn) -> Any:
    """Nested structures; some of their parts are referred to twice, and some hold themselves."""
    sample = draw(_nested)
    if draw(st.booleans()):
        loop: list[Any] = [sample]
        loop.append((loop, {"me": loop}) if draw(st.booleans()) else loop)
        return loop
    return sample
