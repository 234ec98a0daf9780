"""Skeletons that ask for what they must not have: rows of FORMAT.md's table of attacks."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.pickles import NO_TENSORS, ONE_TENSOR, PROTO, call, decode, fetch, reference, refused, text

DECIMAL, LIST, FORMAT = fetch("decimal", "Decimal"), fetch("builtins", "list"), fetch("builtins", "format")
DEFAULTDICT = fetch("collections", "defaultdict")
NEVER_CALLED = {
    "alone": FORMAT,
    "an argument": call("builtins", "format", FORMAT + b"\x85"),
    "popped": DECIMAL + b"0N",
    "overwritten in one batch": b"}(" + text("a") + DECIMAL + text("a") + b"Nu",
    "pushed out of a deque": call("collections", "deque", b")K\x01\x86") + DECIMAL + b"aNa",
    "one factory for two": b"(" + LIST + b"\x85\x940" + DEFAULTDICT + b"\x94h\x00R" + b"h\x01h\x00Rt" + b"0" + DECIMAL + b"0N",
    "a factory in its own tuple": b"(" + LIST + b"\x85\x94" + DEFAULTDICT + b"h\x00Rt",
    "a value, after two that are factories": (
        LIST + b"\x85\x940" + DEFAULTDICT + b"h\x00R" + DEFAULTDICT + b"h\x00R\x86" + DECIMAL + b"\x86"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_every_callable_is_called(name: str) -> None:
    refused(NEVER_CALLED[name])


def test_callables_that_are_called_from_the_memo() -> None:
    one = LIST + b"\x85\x94"
    body = b"(" + DEFAULTDICT + b"\x94" + one + b"R" + b"h\x00h\x01R" + b"h\x00)Rt"
    assert [value.default_factory for value in decode(body)] == [list, list, None]


NO_REFERENCES = [b")", b"N\x85", text("tensor:x") + text("d") + b"\x86", b"K\x01\x85", b"C\x01x\x85"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *((call("builtins", "format", arguments), "a reference takes one string") for arguments in NO_REFERENCES),
        (reference("tensor:y"), "'y', which is not in the safetensors member"),
        (reference("file:x"), "neither 'tensor:' nor 'ndarray:'"),
        (reference("tensor:x?strides=1"), "unknown attribute 'strides=1'"),
        (reference("tensor:x?dtype=complex128"), "not stored as F32"),
        (reference("tensor:x?dtype=float32"), "not stored as F32"),
        (reference("ndarray:x?dtype=datetime64[ns]"), "not stored as F32"),
        (reference("tensor:x?dtype=complex32&dtype=complex32"), "unknown attribute"),
        (b"N", r"tensors that the skeleton does not refer to: \['x'\]"),
        (b"(" + reference("tensor:x") + reference("ndarray:x") + b"t", "in two ways"),
    ],
)
def test_references(body: bytes, message: str) -> None:
    refused(body, message, tensors=ONE_TENSOR)


@pytest.mark.parametrize(
    "body",
    b"|0|1|t|e|a|N\x86|\x94|h\x00|R|NR|NNa|NNNs|(NNu|](NNu|}(Nu|(|NN|(N|NNR|N)R|\x91|(\x90|](N\x90|(]\x91|}]Ns|)Na|(\x91(K\x01\x90|(0N|\x80\x05N|NQ|P1\n|G\x00|J\x00|M|K"
    b"|\x8c\x02\xff\xfe".split(b"|"),
    ids=repr,
)
def test_malformed_stacks_and_opcodes(body: bytes) -> None:
    refused(body)


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(tc.FormatError, match="4 bytes follow the end"):
        tc.decode_sample(PROTO + b"N.evil", NO_TENSORS)
    for cut in range(len(PROTO) + 1):
        with pytest.raises(tc.FormatError):
            tc.decode_sample((PROTO + b"N")[:cut], NO_TENSORS)


class Trusted:
    safe = True


class Member(Enum):
    ONE = 1


CLASS = fetch(__name__, "Trusted")
STATE = b"}" + text("safe") + b"\x89s"
BUILDS = {
    "on a lazy tensor": reference("tensor:x") + b"}" + text("_source") + b"Nsb",
    "on a class": CLASS + STATE + b"b",
    "on a member of an Enum": call(__name__, "Member", b"K\x01\x85") + b"}" + text("_value_") + b"K\x02sb",
    "on a list": b"]" + STATE + b"b",
    "sets __class__": CLASS + b")\x81" + b"N}" + text("__class__") + b"Ns\x86b",
    "on a class, with slots": CLASS + b"N" + STATE + b"\x86b",
}


@pytest.mark.parametrize("what", BUILDS)
def test_build_never_touches_a_class_an_enum_or_a_tensor(what: str) -> None:
    match = what if "sets" in what else "BUILD"
    refused(BUILDS[what], match, tc.UnsafeSkeletonError, tensors=ONE_TENSOR if "lazy" in what else NO_TENSORS, allow=[Trusted, Member])  # fmt: skip
    assert Trusted.safe
    assert Member.ONE.value == 1


def test_allow_does_not_open_anything_else() -> None:
    assert decode(CLASS + b")\x81" + STATE + b"b", allow=[Trusted]).safe is False
    refused(CLASS + b")\x81N" + STATE + b"\x86b\x86", allow=[Trusted])  # more on the stack than one object
    refused(fetch("os", "system") + b")\x81", allow=[Trusted])
    refused(LIST + b")\x81", "NEWOBJ", tc.UnsafeSkeletonError, allow=[Trusted])


LISTED_IN_ALLOW: dict[type, bytes] = {
    deque: call("collections", "deque", b"](K\x01eK\x02\x86"),
    int: call("builtins", "int", text("12") + b"\x85"),
    type(None): call("builtins", "NoneType", b")"),
    torch.dtype: call("torch", "dtype", b")"),
    np.longlong: call("numpy", "longlong", b"K\x01\x85"),
    type(np.dtype("f4")): call(type(np.dtype("f4")).__module__, type(np.dtype("f4")).__qualname__, b")"),
    UUID: fetch("uuid", "UUID") + b")\x81}" + text("int") + b"K\x01sb",
}


@pytest.mark.parametrize("cls", LISTED_IN_ALLOW, ids=lambda cls: cls.__name__)
def test_listed_types_in_allow_stay_listed(cls: type) -> None:
    for allow in ([], [cls], [cls, Trusted]):
        refused(LISTED_IN_ALLOW[cls], allow=allow)


def test_listed_types_in_allow_have_no_state_and_count() -> None:
    state = b"}" + text("a") + b"K\x01sb"
    refused(call("collections", "OrderedDict", b")") + state, "BUILD", allow=[OrderedDict, Trusted])
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
    cls = call(__name__, "AppendOnly", b")")
    for items in (b"K\x01aK\x02a", b"(K\x01K\x02e", b"(eK\x01a(K\x02e"):
        assert decode(cls + items, allow=[AppendOnly]).items == [1, 2]
    refused(call(__name__, "Trusted", b")") + b"K\x01a", "append", allow=[Trusted])


@dataclasses.dataclass
class Node:
    name: Any = None
    shared: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any = None


HANDED: dict[str, Callable[[bytes], bytes]] = {
    "argument": lambda fetched: fetched + b"\x85R",
    "in a list": lambda fetched: b"](" + fetched + b"e\x85R",
    "NEWOBJ": lambda fetched: fetched + b"\x85\x81",
    "NEWOBJ_EX": lambda fetched: b")}" + text("name") + fetched + b"s\x92",
    "BUILD": lambda fetched: b")R}" + text("shared") + b"](" + fetched + b"es" + b"b",
    "BUILD of slots": lambda fetched: b")\x81" + fetched + b"\x85b",
    "in a tuple": lambda fetched: fetched + b"\x85\x85R",
}


@pytest.mark.parametrize("how", HANDED)
@pytest.mark.parametrize("cls", [Node, Slotted])
def test_no_class_is_handed_a_callable(how: str, cls: type) -> None:
    for fetched in (LIST, LIST + b"\x85", DECIMAL):
        body = fetch(__name__, cls.__name__) + HANDED[how](fetched)
        refused(body, "uses a callable as a value", tc.UnsafeSkeletonError, allow=[Node, Slotted])


def test_a_newer_version_is_refused_by_its_number() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    newer = skeleton[:15] + struct.pack("<H", 2) + skeleton[17:]
    longer = skeleton[:3] + bytes([skeleton[3] + 8]) + newer[4:41] + bytes(8) + skeleton[41:]
    of_tensors = tensors.replace(b'"tensorcache":"1 ', b'"tensorcache":"2 ')
    for members in ((newer, tensors), (longer, tensors), (skeleton, of_tensors)):
        with pytest.raises(tc.FormatError, match="format version 2; this release reads version 1"):
            tc.decode_sample(*members)


def test_damage_is_not_called_an_attack() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    damaged = skeleton.replace(b"builtins", b"builthns")
    assert damaged != skeleton
    with pytest.raises(tc.FormatError, match="the skeleton is damaged: its digest does not match its bytes") as caught:
        tc.decode_sample(damaged, tensors)
    assert caught.value.kind == "damaged"
    assert not isinstance(caught.value, tc.UnsafeSkeletonError)


def test_an_error_says_what_it_would_need_also_further_up() -> None:
    for body, needs in ((fetch("os", "system"), "os.system"), (b"i", None)):
        with pytest.raises(tc.UnsafeSkeletonError) as caught:
            decode(body)
        assert caught.value.needs == caught.value.at("x.tar").needs == needs
