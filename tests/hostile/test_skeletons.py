"""Skeletons that ask for what they must not have: rows of FORMAT.md's table of attacks."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections import OrderedDict, deque
from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.pickles import NO_TENSORS, ONE_TENSOR, PROTO, call, decode, refused, text


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_old_protocols(protocol: int) -> None:
    with pytest.raises(tc.FormatError, match="protocol 4 or 5"):
        tc.decode_sample(pickle.dumps({"a": 1}, protocol), NO_TENSORS)


LEAKS = {
    "alone": text("builtins") + text("format") + b"\x93",
    "in a list": b"]" + text("builtins") + text("format") + b"\x93a",
    "in a tuple": text("decimal") + text("Decimal") + b"\x93\x85",
    "memoized": b"(" + text("builtins") + text("format") + b"\x93\x94h\x00e",
    "after a call": text("builtins")
    + text("complex")
    + b"\x93\x94"
    + b"G"
    + bytes(8)
    + b"G"
    + bytes(8)
    + b"\x86R0h\x00",
    "as a factory twice": (
        text("builtins")
        + text("list")
        + b"\x93\x85\x940"  # the factory's argument tuple, kept
        + text("collections")
        + text("defaultdict")
        + b"\x93h\x00R"
        + text("collections")
        + text("defaultdict")
        + b"\x93h\x00R\x86"
        + text("decimal")
        + text("Decimal")
        + b"\x93\x86"
    ),
    "as a key": b"}" + text("builtins") + text("format") + b"\x93Ns",
    "as a factory, then used": b"]" + text("builtins") + text("list") + b"\x93\x94a",
    "argument": call("builtins", "format", text("builtins") + text("format") + b"\x93\x85"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_callables_are_not_values(name: str) -> None:
    refused(LEAKS[name])


def test_reference_arguments() -> None:
    for arguments in (b")", b"N\x85", text("tensor:x") + text("d") + b"\x86", b"K\x01\x85", b"C\x01x\x85"):
        refused(call("builtins", "format", arguments), "a reference takes one string", tensors=ONE_TENSOR)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tensor:y", "'y', which is not in the safetensors member"),
        ("tensor:", "is not in the safetensors member"),
        ("file:x", "neither 'tensor:' nor 'ndarray:'"),
        ("x", "neither"),
        ("tensor:x?strides=1", "unknown attribute 'strides=1'"),
        ("tensor:x?dtype=complex128", "not stored as F32"),
        ("tensor:x?dtype=float32", "not stored as F32"),
        ("ndarray:x?dtype=O", "not stored as F32"),
        ("ndarray:x?dtype=datetime64[ns]", "not stored as F32"),
        ("tensor:x?dtype=complex32&dtype=complex32", "unknown attribute"),
    ],
)
def test_references(reference: str, message: str) -> None:
    refused(call("builtins", "format", text(reference) + b"\x85"), message.replace("[", r"\["), tensors=ONE_TENSOR)


def test_tensors_that_no_skeleton_names() -> None:
    refused(b"N", r"tensors that the skeleton does not refer to: \['x'\]", tensors=ONE_TENSOR)


def test_one_tensor_referred_to_in_two_ways() -> None:
    both = (
        b"("
        + call("builtins", "format", text("tensor:x") + b"\x85")
        + call("builtins", "format", text("ndarray:x") + b"\x85")
        + b"t"
    )
    refused(both, "in two ways", tensors=ONE_TENSOR)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"0",
        b"1",
        b"t",
        b"e",
        b"a",
        b"N\x86",
        b"\x94",
        b"h\x00",
        b"R",
        b"NR",
        b"NNa",
        b"NNNs",
        b"(NNu",
        b"](NNu",
        b"}(Nu",
        b"(",
        b"NN",
        b"(N",
    ]
    + [
        b"NNR",
        b"N)R",
        b"\x91",
        b"(\x90",
        b"](N\x90",
        b"(]\x91",
        b"}]Ns",
        b"G\x00",
        b"J\x00",
        b"M",
        b"K",
        b"\x8c\x02\xff\xfe",
    ],
    ids=repr,
)
def test_malformed_stacks_and_opcodes(body: bytes) -> None:
    refused(body)


def test_bytes_behind_the_end() -> None:
    with pytest.raises(tc.FormatError, match="4 bytes follow the end"):
        tc.decode_sample(PROTO + b"N.evil", NO_TENSORS)
    for cut in range(len(PROTO) + 1):
        with pytest.raises(tc.FormatError):
            tc.decode_sample((PROTO + b"N")[:cut], NO_TENSORS)


def test_a_lazy_tensor_takes_no_state() -> None:
    tensor = call("builtins", "format", text("tensor:x") + b"\x85")
    state = b"}" + text("_source") + b"Ns"
    refused(tensor + state + b"b", "BUILD", tc.UnsafeSkeletonError, tensors=ONE_TENSOR)
    refused(tensor + state + b"b", "BUILD", tc.UnsafeSkeletonError, tensors=ONE_TENSOR, allow=[Trusted])


class Trusted:
    safe = True


class Member(Enum):
    ONE = 1


def test_build_never_touches_a_class_or_an_enum() -> None:
    cls = text(Trusted.__module__) + text("Trusted") + b"\x93"
    state = b"}" + text("safe") + b"\x89s"
    refused(cls + state + b"b", "BUILD", tc.UnsafeSkeletonError, allow=[Trusted])
    member = call(Member.__module__, "Member", b"K\x01\x85")
    refused(member + b"}" + text("_value_") + b"K\x02sb", "BUILD", tc.UnsafeSkeletonError, allow=[Member])
    refused(b"]" + state + b"b", "BUILD on a list", tc.UnsafeSkeletonError, allow=[Trusted])
    refused(cls + b")\x81N" + state + b"\x86b\x86", allow=[Trusted])  # more on the stack than one object
    assert Trusted.safe
    assert Member.ONE.value == 1
    slots = cls + b")\x81" + b"N}" + text("__class__") + b"Ns\x86b"
    refused(slots, "sets __class__", tc.UnsafeSkeletonError, allow=[Trusted])
    assert decode(cls + b")\x81" + state + b"b", allow=[Trusted]).safe is False


def test_allow_does_not_open_anything_else() -> None:
    refused(text("os") + text("system") + b"\x93)\x81", allow=[Trusted])
    refused(text("builtins") + text("list") + b"\x93)\x81", "NEWOBJ", tc.UnsafeSkeletonError, allow=[Trusted])


LISTED_IN_ALLOW: dict[type, bytes] = {
    deque: call("collections", "deque", b"](K\x01eK\x02\x86"),
    OrderedDict: call("collections", "OrderedDict", b"]\x85"),
    date: call("datetime", "date", b"M\xd0\x07K\x01K\x02\x87"),
    bytearray: call("builtins", "bytearray", b"K\x09\x85"),
    int: call("builtins", "int", text("12") + b"\x85"),
    bytes: call("builtins", "bytes", b"K\x09\x85"),
    frozenset: call("builtins", "frozenset", b"]\x85"),
    type(None): call("builtins", "NoneType", b")"),
    torch.dtype: call("torch", "dtype", b")"),
    np.bool_: call(np.bool_.__module__, np.bool_.__qualname__, b"K\x01\x85"),
    np.longlong: call("numpy", "longlong", b"K\x01\x85"),
    type(np.dtype("f4")): call(type(np.dtype("f4")).__module__, type(np.dtype("f4")).__qualname__, b")"),
    UUID: text("uuid") + text("UUID") + b"\x93)\x81}" + text("int") + b"K\x01sb",
}


@pytest.mark.parametrize("cls", LISTED_IN_ALLOW, ids=lambda cls: cls.__name__)
def test_listed_types_in_allow_stay_listed(cls: type) -> None:
    for allow in ([], [cls], [cls, Trusted]):
        refused(LISTED_IN_ALLOW[cls], allow=allow)


def test_listed_types_in_allow_take_no_state() -> None:
    state = b"}" + text("a") + b"K\x01sb"
    refused(call("collections", "OrderedDict", b")") + state, "BUILD", allow=[OrderedDict, Trusted])


def test_deques_in_allow_count() -> None:
    many = b"](" + call("collections", "deque", b")") * 1001 + b"e"
    refused(many, "1000 deques", allow=[deque])


def test_listed_types_in_allow_are_written_as_listed_types() -> None:
    sample = [OrderedDict(a=1), deque([1], 2), np.dtype("f4"), torch.float32, frozenset({1}), UUID(int=1), np.True_]
    plain = tc.encode_sample(sample)
    assert tc.encode_sample(sample, allow=[type(value) for value in sample]) == plain
    assert tc.decode_sample(*plain, allow=[type(value) for value in sample]) == sample


class AppendOnly:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        self.items.append(item)


def test_objects_without_extend_receive_items_one_by_one() -> None:
    cls = call(AppendOnly.__module__, "AppendOnly", b")")
    for items in (b"K\x01aK\x02a", b"(K\x01K\x02e", b"(eK\x01a(K\x02e"):
        assert decode(cls + items, allow=[AppendOnly]).items == [1, 2]
    refused(call(Trusted.__module__, "Trusted", b")") + b"K\x01a", "append", allow=[Trusted])


def test_a_newer_version_is_refused_by_its_number() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    newer = skeleton[:15] + struct.pack("<H", 2) + skeleton[17:]
    with pytest.raises(tc.FormatError, match="format version 2; this release reads version 1"):
        tc.decode_sample(newer, tensors)
    longer = skeleton[:3] + bytes([skeleton[3] + 8]) + newer[4:41] + bytes(8) + skeleton[41:]
    with pytest.raises(tc.FormatError, match="format version 2"):
        tc.decode_sample(longer, tensors)
    with pytest.raises(tc.FormatError, match="format version 2"):
        tc.decode_sample(skeleton, tensors.replace(b'"tensorcache":"1 ', b'"tensorcache":"2 '))


@dataclasses.dataclass(slots=True)
class Slotted:
    value: object


def test_callables_do_not_hide_in_slots() -> None:
    cls = text(Slotted.__module__) + text("Slotted") + b"\x93"
    leak = text("decimal") + text("Decimal") + b"\x93"
    for body in (
        cls + leak + b"\x85R",
        cls + leak + b"\x85\x81",
        cls + b"]" + leak + b"a\x85R",
        cls + b")\x81" + leak + b"\x85b",
    ):
        refused(body, "callable as a value", tc.UnsafeSkeletonError, allow=[Slotted])


def test_damage_is_not_called_an_attack() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    damaged = skeleton.replace(b"builtins", b"builthns")
    assert damaged != skeleton
    with pytest.raises(tc.FormatError, match="the skeleton is damaged: its digest does not match its bytes") as caught:
        tc.decode_sample(damaged, tensors)
    assert caught.value.kind == "damaged"
    assert not isinstance(caught.value, tc.UnsafeSkeletonError)


def test_an_error_says_what_it_would_need_also_further_up() -> None:
    _, tensors = tc.encode_sample({})
    with pytest.raises(tc.UnsafeSkeletonError) as caught:
        tc.decode_sample(b"\x80\x04\x8c\x02os\x8c\x06system\x93.", tensors)
    assert caught.value.needs == caught.value.at("x.tar").needs == "os.system"
    with pytest.raises(tc.UnsafeSkeletonError) as caught:
        tc.decode_sample(b"\x80\x04i.", tensors)
    assert caught.value.needs is None
