"""Names, aliases, cycles, listed types, classes in allow=, and every refusal with its path and remedy."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc

T = torch.arange(3)


def names(sample: Any, **options: Any) -> list[str]:
    return list(safetensors.torch.load(tc.encode_sample(sample, **options)[1]))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"latent": {"samples": T}}, ["latent.samples"]),
        ({"cond": [[0, {"pooled_output": T}]]}, ["cond.0.1.pooled_output"]),
        (T, ["@0"]),
        ([T], ["0"]),
        ({"0": T, 0: T.clone()}, ["0", "0~2"]),
        ({"0": T, 0: T.clone(), "0~2": T.clone()}, ["0", "0~2", "0~2~2"]),
        ({"a.b": T, "c%d": T.clone(), "e?f:g": T.clone()}, ["a%2Eb", "c%25d", "e%3Ff%3Ag"]),
        ({"\n": T, "\x7f": T.clone(), "\ud800": T.clone()}, ["%0A", "%7F", "%ED%A0%80"]),
        ({"": T}, ["%"]),
        ({"__metadata__": T}, ["%5F_metadata__"]),
        ({"a": {"__metadata__": T}}, ["a.__metadata__"]),
        ({1.5: T, None: T.clone(), True: T.clone(), -3: T.clone()}, ["@0", "@1", "@2", "-3"]),
        ({"ü": T}, ["ü"]),
        ({"x": OrderedDict(y=deque([T]))}, ["x.y.0"]),
    ],
    ids=str,
)
def test_names(sample: Any, expected: list[str]) -> None:
    assert sorted(names(sample)) == sorted(expected)


def test_tensors_without_a_path_are_counted() -> None:
    assert names({"s": {T}}) == ["s.@0"]
    lazy = tc.decode_sample(*tc.encode_sample({"s": {T}, (1, T): 2}))
    (element,) = lazy["s"]
    assert torch.equal(element.load(), T)
    assert element is list(lazy)[1][1]


def make_loop(kind: type) -> Any:
    if kind is tuple:
        inner: list[Any] = []
        loop: Any = (inner, 1, 2, 3)
        inner.append(loop)
        return loop
    loop = defaultdict(list) if kind is defaultdict else kind()
    if isinstance(loop, dict):
        loop["me"] = loop
    else:
        loop.append(loop)
    return loop


@pytest.mark.parametrize("kind", [list, dict, tuple, OrderedDict, defaultdict, deque])
def test_containers_that_hold_themselves(kind: type) -> None:
    skeleton, tensors = tc.encode_sample({"loop": make_loop(kind), "t": T})
    for sample in (tc.decode_sample(skeleton, tensors), tc.realize(tc.decode_sample(skeleton, tensors))):
        loop = sample["loop"]
        assert type(loop) is kind
        again = loop[0][0] if kind is tuple else loop["me"] if isinstance(loop, dict) else loop[0]
        assert again is loop
    stock = pickle.loads(skeleton)["loop"]
    assert type(stock) is kind


@pytest.mark.parametrize("kind", [list, tuple, dict], ids=str)
def test_depth(kind: type) -> None:
    def nested(depth: int) -> Any:
        value: Any = kind()
        for _ in range(depth - 1):
            value = {"k": value} if kind is dict else kind([value])
        return value

    assert tc.decode_sample(*tc.encode_sample(nested(200))) == nested(200)
    with pytest.raises(tc.EncodeError, match="more than 200 deep"):
        tc.encode_sample(nested(201))
    with pytest.raises(tc.FormatError, match="more than 200 deep"):
        tc.decode_sample(pickle.dumps(nested(201), 4), tc.encode_sample(0)[1])


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    latent: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    latent: Any


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


class Names(dict):  # type: ignore[type-arg]
    pass


class Stateful:
    def __init__(self, latent: Any) -> None:
        self.latent = latent

    def __getstate__(self) -> Any:
        return [self.latent]

    def __setstate__(self, state: Any) -> None:
        (self.latent,) = state


class WithArguments:
    def __new__(cls, *, latent: Any) -> WithArguments:
        self = super().__new__(cls)
        self.latent = latent
        return self

    def __getnewargs_ex__(self) -> Any:
        return (), {"latent": self.latent}


ALLOWED = [Frozen, Slotted, Stateful, WithArguments, Point, Color, Level, Names]


@pytest.mark.parametrize(
    "value", [Frozen(T), Slotted(T), Stateful(T), WithArguments(latent=T)], ids=lambda v: type(v).__name__
)
def test_objects_of_allowed_classes(value: Any) -> None:
    sample = {"a": value, "b": value}
    with pytest.raises(tc.EncodeError, match=rf"value at 'a': .*allow=\[{type(value).__name__}\]"):
        tc.encode_sample(sample)
    skeleton, tensors = tc.encode_sample(sample, allow=ALLOWED)
    assert list(safetensors.torch.load(tensors)) == ["a.@0"]
    with pytest.raises(tc.UnsafeSkeletonError, match=type(value).__name__):
        tc.decode_sample(skeleton, tensors)
    decoded = tc.decode_sample(skeleton, tensors, allow=ALLOWED)
    assert type(decoded["a"]) is type(value)
    assert decoded["a"] is decoded["b"]
    assert torch.equal(decoded["a"].latent.load(), T)
    if dataclasses.is_dataclass(value):
        real = tc.realize(decoded)
        assert torch.equal(real["a"].latent, T)
        assert real["a"] is real["b"]
        assert isinstance(decoded["a"].latent, tc.LazyTensor), "the input is not changed"


def test_namedtuples_enums_and_subclasses() -> None:
    sample = {"p": Point(T, 1), "c": Color.RED, "l": Level.LOW, "n": Names(a=T)}
    decoded = tc.decode_sample(*tc.encode_sample(sample, allow=ALLOWED), allow=ALLOWED)
    assert decoded["c"] is Color.RED
    assert decoded["l"] is Level.LOW
    assert type(decoded["p"]) is Point
    assert type(decoded["n"]) is Names
    real = tc.realize(decoded)
    assert type(real["p"]) is Point
    assert torch.equal(real["p"].x, T)


def test_allow_takes_classes() -> None:
    with pytest.raises(TypeError, match="allow= takes classes, got 'builtins'"):
        tc.encode_sample(1, allow=["builtins"])  # type: ignore[list-item]


class Odd:
    def __reduce__(self) -> Any:
        return print, ("executed",)


class Subclass(torch.Tensor):
    pass


def a_function() -> None: ...


REFUSED = [
    (lambda: a_function, "its name"),
    (lambda: (i for i in range(3)), r"list\(x\)"),
    (lambda: Path("a"), r"path.*str\(x\)"),
    (lambda: Point(1, 2), r"allow=\[Point\]"),
    (lambda: Level.LOW, r"allow=\[Level\]"),
    (lambda: Names(), r"dict\(x\)"),
    (lambda: object(), r"allow=\[object\]"),
    (lambda: defaultdict(lambda: 0), "factory"),
    (lambda: datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC")), "timezone.utc"),
    (lambda: Fraction(1 << 70000), "bits"),
    (lambda: slice("a"), "slice"),
    (lambda: np.dtype("f4,i4"), "dtype"),
    (lambda: np.datetime64("NaT"), "unit"),
    (lambda: np.timedelta64(1, "1000000000s"), "units or more"),
    (lambda: torch.nested.nested_tensor([T, T[:1]], layout=torch.jagged), r"nested.*store list\(x\.unbind\(\)\)"),
    (lambda: torch.nested.nested_tensor([T, T[:1]], layout=torch.strided), r"nested.*store list\(x\.unbind\(\)\)"),
    (lambda: torch.eye(2).to_sparse(), r"torch\.sparse_coo.*store x\.to_dense\(\), or its indices and values"),
    (lambda: torch.empty(2, device="meta"), "meta or"),
    (lambda: torch.zeros(2).as_subclass(Subclass), "subclass.*as_subclass"),
    (lambda: torch.empty(4, dtype=torch.uint8).view(torch.bits8), r"bits8.*view\(torch.uint8\)"),
    (lambda: np.ma.masked_array([1, 2], [0, 1]), "masked.*mask"),
    (lambda: np.array([object()]), "array of object .*tolist"),
    (lambda: np.matrix([[1]]), "subclass matrix.*asarray"),
    (lambda: np.zeros(2, np.longdouble), "astype"),
    (lambda: torch.empty((0, 1 << 59), dtype=torch.uint8), "multiply to"),
    (lambda: np.empty((0, 1 << 58), np.complex128), "multiply to"),  # stored with one dimension more
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*unit:DeprecationWarning")  # numpy's, of datetimes without one
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # sparse and nested layouts announce themselves as prototypes
@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_when_writing(make: Any, message: str) -> None:
    with pytest.raises(tc.EncodeError, match=f"value at 'a.0.b': .*({message})"):
        tc.encode_sample({"a": [{"b": make()}]})


def test_an_allowed_class_that_reduces_to_a_function_is_refused() -> None:
    with pytest.raises(tc.EncodeError, match="Odd is pickled by .*print.*store its fields"):
        tc.encode_sample(Odd(), allow=[Odd])


class Node:
    def __init__(self) -> None:
        self.peers = {self}


def test_a_set_whose_element_holds_it_is_refused() -> None:
    with pytest.raises(tc.EncodeError, match="a set is contained in one of its elements"):
        tc.encode_sample(Node(), allow=[Node])


def test_invalid_bools_and_texts_are_not_written() -> None:
    two = torch.tensor([2, 0], dtype=torch.uint8)
    for value in (two.view(torch.bool), two.numpy().view(bool)):
        with pytest.raises(tc.EncodeError, match="value at 'x': a bool array holds bytes other than 0 and 1"):
            tc.encode_sample({"x": value})
    with pytest.raises(tc.EncodeError, match="text beyond|code points beyond Unicode"):
        tc.encode_sample(np.array([0x110000], "u4").view("U1"))
