"""Any byte may change, any bytes may come: a right result, or an error of ours."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.hostile.pickles import NO_TENSORS, ONE_TENSOR, PROTO, decode, text
from tests.strategies import samples


class Trusted:
    pass


@given(samples(), st.data())
def test_any_byte_may_change(sample: Any, data: st.DataObject) -> None:
    skeleton, tensors = tc.encode_sample(sample)
    whole = bytearray(skeleton + tensors)
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    damaged = bytes(whole[: len(skeleton)]), bytes(whole[len(skeleton) :])
    with pytest.raises(tc.FormatError):
        tc.decode_sample(*damaged, verify=True)
    try:
        tc.realize(tc.decode_sample(*damaged))
    except tc.TensorCacheError:
        pass  # the other allowed outcome; anything else fails the test


@given(st.binary(max_size=60), st.sampled_from([b"", PROTO, b"\x80\x05"]))
def test_any_bytes(body: bytes, prefix: bytes) -> None:
    for skeleton, tensors in (
        (prefix + body, NO_TENSORS),
        (PROTO + b"N.", body),
        (PROTO + b"N.", struct.pack("<Q", len(body)) + body),
    ):
        try:
            tc.realize(tc.decode_sample(skeleton, tensors))
        except tc.TensorCacheError:
            pass  # as above


OPCODES = [bytes([code]) for code in b"(.0123NR]})abehjst\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94\x81\x92"]
PIECES = [
    *OPCODES,
    b"K\x07",
    b"h\x00",
    b"h\x01",
    text("a"),
    text("builtins"),
    text("format"),
    text("list"),
    text("tensor:x"),
]
PIECES += [
    text("collections"),
    text("defaultdict"),
    text("deque"),
    text("torch"),
    text("Size"),
    text("float32"),
    b"G" + bytes(8),
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.booleans())
def test_any_opcodes(body: bytes, allow: bool) -> None:
    try:
        value = decode(body, ONE_TENSOR, allow=[Trusted] if allow else [])
    except tc.TensorCacheError:
        return
    assert "Builder" not in repr(value)
