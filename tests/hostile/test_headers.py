"""Headers of `.safetensors` members that attack their reader: one test per row of FORMAT.md's table of attacks."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import header as member
from tests.hostile.forged import put
from tests.hostile.pickles import PROTO, little_memory

X = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def u8(shape: Any, *offsets: int) -> dict[str, Any]:
    return {"x": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}


def refused(raw: bytes, match: str) -> None:
    with little_memory(20 * len(raw) + 2_000_000), pytest.raises(tc.FormatError, match=match):
        tc.decode_sample(PROTO + b"N.", raw)


def test_lengths() -> None:
    for length in (0, 1, 7):
        refused(bytes(length), "has . bytes, but its header needs 8")
    for length in (1000, 1 << 31, 1 << 63, (1 << 64) - 1):
        refused(member({"x": X}, length=length), f"its header needs {length + 8}")
    refused(member(b"{" + b" " * 100_000_000 + b"}", b""), "the limit is 100000000")


@pytest.mark.long
def test_a_header_of_the_longest_length(tmp_path: Path) -> None:
    """The limit is that of stock safetensors, and the same for members in shards."""
    raw = member(json.dumps({"x": X}).encode().ljust(100_000_000))
    skeleton = PROTO + tc.encode_sample({"x": torch.zeros(2)})[0][42:]
    path = put(tmp_path / "a.tar", {"a.skel.pyd": skeleton, "a.safetensors": raw})
    assert tc.open(path)[0]["x"].tolist() == [*b"ab"]
    assert tc.verify(path).ok


SPELLED = ["-0", "1e0", "00", "true", '"0"', "NaN"]
ENTRIES: list[tuple[str, Any, str]] = [
    *(
        (f"{where} {number}", b'{"x":{"dtype":"U8","shape":[%s],"data_offsets":[%s,0]}}' % pair, "is not the JSON|impossible")
        for number in SPELLED
        for where, pair in (("shape", (number.encode(), b"0")), ("offset", (b"0", number.encode())))
    ),
    ("an array", [1], "begins with b'\\['"),
    ("cut", b'{"x": {"dtype', "is not the JSON"),
    ("not UTF-8", b'{"\xff": 1}', "is not the JSON"),
    ("surrogates that are escaped", b'{"\\ud800": 1}', "surrogates not allowed"),
    ("deep", b'{"x":' + b"[" * 100_000, "is not the JSON"),
    ("huge number", b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,2]}}', "is not the JSON"),
    ("duplicate tensor", b'{"x": 1, "x": 2}', "'x' occurs twice"),
    ("duplicate tensor, escaped", b'{"x": 1, "\\u0078": 2}', "'x' occurs twice"),
    ("metadata of numbers", {"__metadata__": {"a": 1}, "x": X}, "does not map strings to strings"),
    ("metadata of surrogates", b'{"__metadata__": {"\\ud800": "a"}}', "a key of __metadata__ contains a surrogate"),
    ("metadata that is none", {"__metadata__": [], "x": X}, "does not map strings to strings"),
    ("our metadata, damaged", {"__metadata__": {"tensorcache": "1 xyz"}, "x": X}, "16 hexadecimal digits"),
    ("a newer version", {"__metadata__": {"tensorcache": "2 " + "0" * 16}, "x": X}, "format version 2; this release"),
    ("our metadata, elsewhere", {"x": X, "__metadata__": {"tensorcache": "1 " + "0" * 16}}, "is not at the beginning of the header"),
    ("our metadata, escaped", b'{"__metadata__":{"tensorcache":"\\u0031 0123456789abcdef"},"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "or its value is escaped"),
    ("an unknown field", {"x": {**X, "strides": [1]}}, "expected dtype, shape and data_offsets"),
    ("a missing field", {"x": {"dtype": "U8", "shape": [2]}}, "expected dtype, shape and data_offsets"),
    ("as deep as JSON may be", b'{"x":' + b"[" * 900 + b"]" * 900 + b"}", "expected dtype, shape and data_offsets"),
    ("no object", {"x": 5}, "expected dtype, shape and data_offsets, got 5"),
    ("an unknown dtype", {"x": {**X, "dtype": "F12"}}, "unknown dtype 'F12'"),
    ("a dtype that is a list", {"x": {**X, "dtype": ["U8"]}}, "unknown dtype"),
    ("a negative dimension", u8([-2], 0, 2), "impossible shape"),
    ("a shape that is none", u8("2", 0, 2), "impossible shape"),
    ("a shape that overflows", u8([1 << 40, 1 << 40], 0, 2), "impossible shape"),
    ("an empty shape that overflows", u8([0, 1 << 62], 0, 0), "impossible shape"),
    ("65 dimensions", u8([1] * 64 + [2], 0, 2), "impossible shape"),
    ("negative offsets", u8([2], -2, 0), "impossible data_offsets"),
    ("offsets of 2^63", u8([2], (1 << 63) - 2, 1 << 63), "impossible data_offsets"),
    ("offsets that turn back", u8([2], 2, 0), "impossible data_offsets"),
    # Python prints no longer ones, and their place in the member is longer
    ("offsets of 4,300 digits", u8([0], 10**4300 - 1, 10**4300 - 1), "impossible data_offsets"),
    ("three offsets", u8([2], 0, 1, 2), "impossible data_offsets"),
    ("offsets of another size", u8([2], 0, 1), r"hold 1 bytes, but U8\[2\] needs 2"),
    ("beyond the member", u8([9], 0, 9), "the tensors end at byte"),
    ("less than the member", u8([1], 0, 1), "the tensors end at byte"),
    ("a hole", u8([1], 1, 2), "follows a hole"),
    ("an overlap", {"x": X, "y": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, "overlaps the tensor before it"),
    ("no tensors, but bytes", {}, "the tensors end at byte"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "match"), [row[1:] for row in ENTRIES], ids=[row[0] for row in ENTRIES])
def test_headers(entries: Any, match: str) -> None:
    refused(member(entries), match)


def test_many_tensors_cost_no_more_than_their_bytes() -> None:
    names = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    refused(member(names, b""), "tensors that the skeleton does not refer to")
    refused(member(json.dumps(names).encode()[:-1] + b', "t0": 1}', b""), "'t0' occurs twice")


def test_a_known_layout_is_checked_again() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(4)})
    tc.decode_sample(skeleton, tensors)
    for damaged, match in [
        (tensors + b"\0", "the tensors end at byte"),
        (tensors[:-1], "the tensors end at byte"),
        (tensors[:42] + b"+" + tensors[43:], "is not 16 hexadecimal digits"),
        (tensors[:42] + b"0x0x" + tensors[46:], "is not 16 hexadecimal digits"),
    ]:
        with pytest.raises(tc.FormatError, match=match):
            tc.decode_sample(skeleton, damaged)


@pytest.mark.long
def test_headers_are_not_kept_without_a_limit() -> None:
    """Headers with other names each: those of the last samples are kept, and none that is long."""

    def renamed(count: int, name: str) -> list[list[bytes]]:
        halves = tc.encode_sample({f"{name} ####": torch.zeros(1)})
        return [[half.replace(b"####", b"%04d" % number) for half in halves] for number in range(count)]

    # the first ones fill all that is kept at least once, whatever other tests have left there
    first, more, long = renamed(1500, "first"), renamed(3000, "more"), renamed(50, "x" * 70_000)
    peaks = []
    tracemalloc.start()
    try:
        for samples in (first, more, long):
            tracemalloc.reset_peak()
            for members in samples:
                tc.decode_sample(*members)
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
    assert peaks[2] < peaks[1] + 1_000_000
