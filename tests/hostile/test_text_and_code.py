"""Where a second implementation, written from FORMAT.md alone, differed from this one: now both say the same."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.pickles import NO_TENSORS, ONE_TENSOR, PROTO, call, decode, refused, text


def test_a_defaultdict_without_a_factory() -> None:
    written = tc.encode_sample(defaultdict(None, a=1))
    assert b"defaultdict\x93)R" in written[0]
    assert tc.decode_sample(*written).default_factory is None
    assert tc.decode_sample(*written) == {"a": 1}
    refused(call("collections", "defaultdict", b"N\x85"), "absent or one of list, dict")


DECIMAL = text("decimal") + text("Decimal") + b"\x93"
LIST = text("builtins") + text("list") + b"\x93"
DEFAULTDICT = text("collections") + text("defaultdict") + b"\x93"
NEVER_CALLED = {
    "popped": DECIMAL + b"0N",
    "popped with a mark": b"(" + DECIMAL + b"1N",
    "overwritten": b"}" + text("a") + DECIMAL + b"s" + text("a") + b"Ns",
    "overwritten in one batch": b"}(" + text("a") + DECIMAL + text("a") + b"Nu",
    "pushed out of a deque": call("collections", "deque", b")K\x01\x86") + DECIMAL + b"aNa",
    "kept in the memo": DECIMAL + b"\x940N",
    "one factory for two": b"(" + LIST + b"\x85\x940" + DEFAULTDICT + b"\x94h\x00R" + b"h\x01h\x00Rt" + b"0" + DECIMAL + b"0N",
    "a factory in its own tuple": b"(" + LIST + b"\x85\x94" + DEFAULTDICT + b"h\x00Rt",
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_every_callable_is_called(name: str) -> None:
    refused(NEVER_CALLED[name], "uses a callable as a value, or never calls it", tc.UnsafeSkeletonError)


def test_callables_that_are_called_from_the_memo() -> None:
    one = LIST + b"\x85\x94"
    body = b"(" + DEFAULTDICT + b"\x94" + one + b"R" + b"h\x00h\x01R" + b"h\x00)Rt"
    assert [value.default_factory for value in decode(body)] == [list, list, None]


@pytest.mark.parametrize("value", [torch.empty((0, 2**59), dtype=torch.uint8), np.empty((0, 2**59), np.uint8)])
def test_what_cannot_be_read_is_not_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        tc.EncodeError, match=r"value at 'a.0': its stored form has the shape \[0, 576460752303423488\]"
    ):
        tc.encode_sample({"a": [value]})
    with (
        pytest.raises(tc.EncodeError, match="sample 'k': value at 'a'"),
        tc.ShardWriter(tmp_path / "a.tar") as writer,
    ):
        writer.write("k", {"a": value})
    smaller = value[:, : 2**59 - 1]
    assert tc.decode_sample(*tc.encode_sample(smaller)).shape == (0, 2**59 - 1)
    with pytest.raises(tc.EncodeError, match="multiply to 2"):
        tc.encode_sample(np.empty((0, 2**58), np.complex128))  # stored with one dimension more


def test_a_member_that_another_tool_wrote_again() -> None:
    """It has no digest, and another length: FORMAT.md 3.3 compares neither, and it is never called verified."""
    skeleton, _ = tc.encode_sample({"x": torch.ones(2)})
    foreign = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    member = len(foreign).to_bytes(8, "little") + foreign + np.ones(2, np.float32).tobytes()
    assert tc.decode_sample(skeleton, member)["x"].load().tolist() == [1, 1]
    with pytest.raises(tc.FormatError, match="cannot be verified"):
        tc.decode_sample(skeleton, member, verify=True)


class Trusted:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_both_kinds_of_index_say_the_same(tmp_path: Path) -> None:
    paths = tmp_path / "a" / "x.tar", tmp_path / "b" / "x.tar"
    for path in paths:
        with tc.ShardWriter(path, allow=[Trusted], footer=path is paths[0], manifest=False) as writer:
            writer.write("0", {"x": torch.ones(2), "o": Trusted(1)})
            writer.write("1", {"y": torch.ones(2)})
    tc.write_index(paths[1])
    shard, sidecar = paths[1].read_bytes(), paths[1].with_name("x.tar.index").read_bytes()
    written = paths[0].read_bytes()
    assert written.startswith(shard)
    assert written[-len(sidecar) : -40] == sidecar[:-40]  # the trailers have other lengths
    assert b'"references":[null,["tensor:y"]]' in written.replace(b" ", b"")
    for path in paths:
        assert tc.verify(path, num_threads=1).ok
        assert tc.verify(path, num_threads=1, allow=[Trusted]).ok


@pytest.mark.parametrize(
    "body",
    [
        call("collections", "deque", b")N\x86"),
        call("collections", "deque", b"]K\x01\x86"),
        call("datetime", "time", b"C\x06" + bytes(6) + b"N\x86"),
        call("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01" + bytes(6) + b"N\x86"),
        call("datetime", "timedelta", b"K\x00J\x80\x51\x01\x00K\x00\x87"),
        call("datetime", "timedelta", b"K\x00K\x00J\x40\x42\x0f\x00\x87"),
        call("datetime", "timedelta", b"K\x00J\xff\xff\xff\xffK\x00\x87"),
    ],
    ids=repr,
)
def test_forms_that_no_writer_writes(body: bytes) -> None:
    refused(body)


def test_a_reference_with_an_empty_attribute() -> None:
    refused(call("builtins", "format", text("tensor:x?") + b"\x85"), "unknown attribute ''", tensors=ONE_TENSOR)


def test_forms_that_stock_pickle_writes() -> None:
    assert decode(call("builtins", "bytearray", b"C\x01a\x85")) == bytearray(b"a")
    assert str(decode(call("pathlib", "PurePosixPath", text("a") + text("b") + b"\x86"))) == "a/b"
    assert decode(call("datetime", "timedelta", b"J\xff\xff\xff\xffK\x01K\x02\x87")) == timedelta(-1, 1, 2)


def test_int_keys_by_magnitude() -> None:
    sample = {-(2**64) + 1: torch.ones(1), 2**64 - 1: torch.ones(1), -(2**64): torch.ones(1), 2**64: torch.ones(1)}
    names = [tensor.name for tensor in tc.decode_sample(*tc.encode_sample(sample)).values()]
    assert names == [str(-(2**64) + 1), str(2**64 - 1), "@2", "@3"]


def test_numbers_are_written_each_time() -> None:
    number, whole = 1.5, 10**30
    once, twice = (tc.encode_sample([number, whole] * count)[0] for count in (1, 2))
    assert twice.count(once[-23:-2]) == 2


def test_suffixes_in_the_index_of_dali(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "a.tar") as writer:
        writer.write("k", {"x": 1}, JPG=b"1")
    assert (tmp_path / "a.idx").read_text().split("\n")[1].endswith(" k.jpg")


@pytest.mark.parametrize("spelled", ["-0", "0.0", "1e0", "00", "true", "null", '"0"', "-0.0", "+0", "0x0", "NaN"])
@pytest.mark.parametrize("where", ["shape", "data_offsets"])
def test_how_a_header_spells_sizes(spelled: str, where: str) -> None:
    shape, begin = (spelled, "0") if where == "shape" else ("0", spelled)
    json = f'{{"x":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},0]}}}}'.encode()
    with pytest.raises(tc.FormatError, match="is not the JSON|impossible"):
        tc.decode_sample(PROTO + b"N.", len(json).to_bytes(8, "little") + json)
    assert tc.decode_sample(PROTO + b"N.", NO_TENSORS) is None
    named = b'{"x-0":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    body = call("builtins", "format", text("tensor:x-0") + b"\x85")
    assert decode(body, len(named).to_bytes(8, "little") + named).shape == (0,)
