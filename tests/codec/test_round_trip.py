"""decode(encode(x)) is x, bit for bit: structure, values, dtypes, types of containers, identity of aliases."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given

import wds_tensorcache as tc
from tests.codec import second_implementation as second
from tests.same import assert_same
from tests.strategies import samples


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
