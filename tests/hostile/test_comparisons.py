"""Keys, numbers and arguments that a short skeleton makes its reader compare, divide, walk or copy again and again."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.hostile.colliding import integer
from tests.hostile.pickles import call, decode, refused, text
from tests.hostile.tables import MODULUS, count_calls

SLOW = "too long to compare"


def kept(*values: bytes) -> bytes:
    return b"".join(value + b"\x940" for value in values)


def long_text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


WAYS: dict[str, Callable[[int], bytes]] = {
    "SETITEM": lambda times: b"}h\x00Ns" + b"h\x01Ns" * times,
    "ADDITEMS": lambda times: b"\x8f(h\x00\x90" + b"(h\x01\x90" * times,
    "dicts of 512": lambda times: b"](" + (b"}(h\x00N" + b"h\x01N" * 511 + b"u") * (times // 511) + b"e",
    "sets of 8": lambda times: b"](" + (b"\x8f(h\x00" + b"h\x01" * 7 + b"\x90") * (times // 7) + b"e",
    "frozensets of 8": lambda times: b"](" + (b"(h\x00" + b"h\x01" * 7 + b"\x91") * (times // 7) + b"e",
}
EQUAL = {
    "texts": long_text("x" * 100_000),
    "bytes": b"B" + struct.pack("<I", 100_000) + bytes(100_000),
    "numpy.str_": call("numpy", "str_", long_text("x" * 30_000) + b"\x85"),
    "Windows paths": call("pathlib", "PureWindowsPath", long_text("a\\" * 20_000) + b"\x85"),
    "Posix paths in tuples": call("pathlib", "PurePosixPath", long_text("a/" * 20_000) + b"\x85") + b"\x85",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EQUAL)
def test_two_equal_keys_compared_again_and_again(way: str, kind: str) -> None:
    found, calls = count_calls(lambda: decode(kept(EQUAL[kind], EQUAL[kind]) + WAYS[way](60_000)))
    assert isinstance(found, tc.FormatError)
    assert calls < 6000


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_are_converted_to_be_compared(way: str) -> None:
    number = 1 << 24_000
    same = call("decimal", "Decimal", text(str(hash(number) + 5 * MODULUS)) + b"\x85")
    for keys in ((integer(number), same), (same, integer(number)), (integer(number) + b"\x85", same + b"\x85")):
        refused(kept(*keys) + WAYS[way](750), "too")


def test_the_limit_is_for_all_containers_together() -> None:
    both = kept(*[long_text("x" * 100_000)] * 2)
    one = b"}h\x00Nsh\x01Ns"
    assert len(decode(both + b"](" + one * 100 + b"e")) == 100
    refused(both + b"](" + one * 20_000 + b"e", SLOW)


def test_one_text_compared_with_itself_costs_nothing() -> None:
    (found,) = decode(kept(long_text("x" * 100_000)) + b"}" + b"h\x00Ns" * 60_000)
    assert len(found) == 100_000


def test_small_dicts_of_keys_that_share_a_hash_are_honest() -> None:
    keys = [(a, b, c) for a in (-1, -2) for b in (-1, -2) for c in (-1, -2)]
    sample = [dict.fromkeys(keys) for _ in range(3000)] + [set(keys)]
    assert tc.decode_sample(*tc.encode_sample(sample)) == sample


def test_what_takes_too_long_to_compare_is_not_written() -> None:
    number = 1 << 24_000
    keys = [(number,), (Decimal(hash(number) + 5 * MODULUS),)]
    with pytest.raises(tc.EncodeError, match="share hashes"):
        tc.encode_sample([dict.fromkeys(keys) for _ in range(50)])


@pytest.mark.parametrize("place", range(3))
def test_the_numbers_of_a_range_have_at_most_4096_bits(place: int) -> None:
    numbers = [0, 1, 1]
    numbers[place] = (1 << 4096) - 1
    assert tc.decode_sample(*tc.encode_sample(range(*numbers))) == range(*numbers)
    for sign in (1, -1):
        numbers[place] = sign << 4096
        refused(call("builtins", "range", b"".join(map(integer, numbers)) + b"\x87"), "more than 4096 bits")
        with pytest.raises(tc.EncodeError, match="value at 'a': range cannot be stored: .* more than 4096 bits"):
            tc.encode_sample({"a": range(*numbers)})


@dataclasses.dataclass
class Node:
    name: Any = None
    shared: Any = None


def count_steps(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `run` returns, and how often it steps a walk over nested containers."""
    steps = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal steps
        steps += event == "call" and frame.f_code.co_name == "walk"

    sys.setprofile(profile)
    try:
        return run(), steps
    finally:
        sys.setprofile(None)


def test_what_many_objects_share_is_not_walked_for_each() -> None:
    shared = [[number] for number in range(300)]
    written = tc.encode_sample([Node(str(number), shared) for number in range(300)], allow=[Node])
    found, steps = count_steps(lambda: tc.decode_sample(*written, allow=[Node]))
    assert len(found) == 300
    assert steps < 3000
    cls = text(Node.__module__) + text("Node") + b"\x93\x94"
    body = b"](" + b"]" * 300 + b"e\x940](" + cls + b"h\x00\x85R" + b"h\x01h\x00\x85R" * 300 + b"e"
    found, steps = count_steps(lambda: decode(body, allow=[Node]))
    assert len(found) == 301
    assert steps < 3000


@pytest.mark.parametrize(
    "arguments",
    [
        lambda fetched: fetched + b"\x85R",
        lambda fetched: b"](" + fetched + b"e\x85R",
        lambda fetched: fetched + b"\x85\x81",
        lambda fetched: b")}" + text("name") + fetched + b"s\x92",
        lambda fetched: b")R}" + text("shared") + b"](" + fetched + b"es" + b"b",
        lambda fetched: fetched + b"\x85\x85R",
    ],
    ids=["argument", "in a list", "NEWOBJ", "NEWOBJ_EX", "BUILD", "in a tuple"],
)
@pytest.mark.parametrize("factory", [False, True])
def test_no_class_is_handed_a_callable(arguments: Callable[[bytes], bytes], factory: bool) -> None:
    fetched = text("builtins") + text("list") + b"\x93" + (b"\x85" if factory else b"")
    body = text(Node.__module__) + text("Node") + b"\x93" + arguments(fetched)
    refused(body, "uses a callable as a value", tc.UnsafeSkeletonError, allow=[Node])


SHARED: dict[str, Any] = {
    "numpy.str_": list(np.full(1200, "x" * 1000)),
    "numpy.bytes_": list(np.full(3000, b"x" * 1000)),
    "Decimal": [Decimal("1." + "3" * 300) for _ in range(20_000)],
    "paths": [PurePosixPath("/data/" + "x" * 250) for _ in range(20_000)],
    "many": [PureWindowsPath("x" * (200 + number % 3)) for number in range(20_000)],
}


@pytest.mark.parametrize("name", SHARED)
def test_equal_long_texts_of_many_values_are_read_back(name: str) -> None:
    written = tc.encode_sample({"a": SHARED[name]})
    assert tc.decode_sample(*written) == {"a": SHARED[name]}
    assert tc.encode_sample(tc.decode_sample(*written)) == written


def test_texts_are_written_once_where_a_reader_takes_that() -> None:
    sizes = [len(tc.encode_sample(list(np.full(count, "x" * 1000)))[0]) for count in (900, 901)]
    assert sizes[1] - sizes[0] < 10
