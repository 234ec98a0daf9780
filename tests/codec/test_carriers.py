"""Tensors of every dtype pass through numpy, Arrow and DALI as bits of dtypes that these have, and come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.same import assert_same, tensor_bytes
from wds_tensorcache.codec.carriers import Carrier, arrow_carrier, dali_carrier
from wds_tensorcache.codec.dtypes import TORCH_TRUE

SHAPES: list[tuple[int, ...]] = [(), (0, 3), (5,), (2, 3)]
ARRAYS = [np.dtype(name) for name in ("?", "i2", "u8", "f2", "c8", "c16", "S1", "S3", "U2", "U3", "M8[ns]", "m8[D]")]


def value_of(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor or array of random bytes."""
    count = int(np.prod(shape))
    raw = np.random.default_rng(7).integers(0, 2 if "bool" in str(dtype) else 100, count * dtype.itemsize, np.uint8)
    if isinstance(dtype, torch.dtype):
        return torch.tensor(raw.tolist(), dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype.kind == "U":
        raw = raw.reshape(-1, 4) * np.array([1, 0, 0, 0], np.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


@pytest.mark.parametrize("choose", [arrow_carrier, dali_carrier])
@pytest.mark.parametrize("dtype", [*TORCH_TRUE, *ARRAYS], ids=str)
def test_every_dtype_comes_back(choose: Any, dtype: Any) -> None:
    carrier: Carrier = choose(dtype)
    for shape in SHAPES if choose is arrow_carrier else SHAPES[1:]:  # DALI passes batches only
        value = value_of(dtype, shape)
        bits = carrier.carry(value)
        assert (bits.dtype, bits.shape) == (carrier.dtype, (*shape, *carrier.inner))
        assert bits.tobytes() == (value.tobytes() if dtype in ARRAYS else tensor_bytes(value))
        assert carrier.fits(bits)
        assert not carrier.fits(np.empty(bits.shape, "f4" if carrier.dtype != "f4" else "f8"))
        assert_same(value, carrier.restore(bits))
        if isinstance(dtype, torch.dtype) and bits.size:
            assert_same(value, carrier.restore(torch.from_numpy(bits)))
        bits.flags.writeable = False  # as in Ray's memory
        assert_same(value, carrier.restore(bits))


def test_what_carries_them() -> None:
    def carriers(dtype: Any) -> list[Any]:
        return [(carrier.dtype.name, carrier.inner) for carrier in (arrow_carrier(dtype), dali_carrier(dtype))]

    assert carriers(torch.bfloat16) == [("uint16", ()), ("int16", ())]
    assert carriers(torch.float8_e5m2) == [("uint8", ()), ("uint8", ())]
    assert carriers(torch.complex64) == [("float32", (2,)), ("int64", ())]
    assert carriers(torch.bool) == [("bool", ()), ("uint8", ())]
    assert carriers(np.dtype("U3")) == [("uint32", (3,)), ("uint8", (12,))]
    with pytest.raises(ValueError, match="cannot store object"):
        arrow_carrier(np.dtype(object))
