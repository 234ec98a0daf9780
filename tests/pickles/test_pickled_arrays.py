"""Pickles of arrays and tensors, read without running them: as `pickle.loads` would read them, or an error."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.integrations.pickles.arrays import decode_pickle

PROTOCOLS = [2, 3, 4, 5]
LIMIT = 1 << 20
RECONSTRUCT = np.ones(1).__reduce__()[0]
ARRAYS = {
    "float64": np.arange(6.0).reshape(2, 3),
    "Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "big-endian": np.array([1, 2], ">i4"),
    "half": np.zeros((0, 4), np.float16),
    "0-d": np.array(3, np.uint8),
    "bool": np.array([True, False]),
    "complex": np.array([1j]),
    "texts": np.array(["ab", "c"]),
    "bytes": np.array([b"ab", b"c"]),
}
TENSORS = {
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "view": torch.arange(10)[2:5],
    "transposed": torch.arange(6).reshape(2, 3).T,
    "0-d": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def decode(raw: bytes) -> Any:
    return decode_pickle(raw, LIMIT, "; REMEDY")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays(protocol: int, array: np.ndarray[Any, Any]) -> None:
    raw = pickle.dumps({"x": array, "again": [array, array.copy()], "n": 1}, protocol)
    found, expected = decode(raw), pickle.loads(raw)
    assert found["x"] is found["again"][0]
    for left, right in ((expected["x"], found["x"]), (expected["again"][1], found["again"][1])):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors(protocol: int, tensor: torch.Tensor) -> None:
    raw = pickle.dumps([tensor, {"x": tensor}], protocol)
    found = decode(raw)
    assert found[0] is found[1]["x"]
    assert type(found[0]) is type(tensor)
    assert_same(tensor.detach().contiguous(), found[0].detach().contiguous())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scalars_and_dtypes(protocol: int) -> None:
    value = [
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("hi"),
        np.dtype(">f4"),
        np.dtype("U5"),
        torch.float16,
    ]
    found = decode(pickle.dumps(value, protocol))
    assert found == value
    assert list(map(type, found)) == list(map(type, value))
    assert np.dtype("f4").isnative  # the dtype that numpy shares is not changed


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_of_listed_types(protocol: int) -> None:
    """All types that samples may contain; Python pickles them by other names and opcodes than skeletons have."""
    one = uuid.UUID(int=7)
    value = [
        {frozenset([1, (2, 3)]): {4, 5}},
        [one, one, uuid.UUID(int=(1 << 128) - 1)],
        collections.defaultdict(list, a=1),
        collections.defaultdict(str),
        collections.defaultdict(int),
        collections.defaultdict(set),
        collections.defaultdict(None, b=2),
        range(1, 9, 2),
        slice(None, 3),
        ...,
        datetime.date(2020, 1, 2),
        datetime.timedelta(days=-1, microseconds=5),
        datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc),
        np.datetime64(5, "25s"),
        np.timedelta64("NaT", "ns"),
        np.dtype("M8[7D]"),
    ]
    arrays = [np.arange(3).astype(dtype) for dtype in ("M8[ns]", ">M8[25s]", "m8[D]")]
    found, times = decode(pickle.dumps([value, arrays], protocol))
    assert repr(found) == repr(value)
    assert list(map(type, found)) == list(map(type, value))
    assert found[1][0] is found[1][1]
    assert [each.default_factory for each in found[2:7]] == [list, str, int, set, None]
    for array, other in zip(arrays, times, strict=True):
        assert other.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
        assert other.astype("<i8").tobytes() == array.astype("<i8").tobytes()
    assert np.dtype("M8").str == "<M8"  # the dtype that numpy shares is not changed


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cuuid\nUUID\n)\x81.",  # no number
        b"cuuid\nUUID\n.",
        b"cuuid\nUUID\n)R.",
        b"cuuid\nUUID\nK\x01\x85\x81}X\x03\x00\x00\x00intK\x01sb.",
        b"cuuid\nUUID\n)\x81}X\x03\x00\x00\x00intK\x01sb}X\x03\x00\x00\x00intK\x02sb.",  # twice
        b"cuuid\nUUID\n)\x81}X\x03\x00\x00\x00intJ\xff\xff\xff\xffsb.",
        b"cuuid\nUUID\n)\x81}X\x03\x00\x00\x00intX\x01\x00\x00\x001sb.",
        b"cuuid\nUUID\n)\x81}(X\x03\x00\x00\x00intK\x01X\x03\x00\x00\x00hexK\x01ub.",
        b"c__builtin__\nset\n.",
        b"c__builtin__\nlist\n)R.",
        b"c__builtin__\nfrozenset\nc__builtin__\nset\n\x85R.",
        b"c__builtin__\nfrozenset\n](c__builtin__\nset\ne\x85R.",
        b"ccollections\ndefaultdict\nc__builtin__\nfrozenset\n\x85R.",
    ],
)
def test_hostile_listed_types(opcodes: bytes) -> None:
    with pytest.raises(tc.FormatError):
        decode(b"\x80\x02" + opcodes)


def test_cosmos_text_states() -> None:
    """cosmos-predict2: `t5_xxl/{stem}.pickle`, and the members of its WebDatasets."""
    states = np.random.default_rng(0).normal(size=(7, 16)).astype(np.float32)
    for value in ([states], {"ai_caption": {"embeddings": {"t5_xxl_fp8": states}}}):
        found = decode(pickle.dumps(value))
        assert pickle.dumps(found) == pickle.dumps(value)


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


class Array(np.ndarray):  # type: ignore[type-arg]
    """A class of arrays that is not numpy's."""


UNSAFE = {
    "gadget": Gadget(),
    "gadget in an array": np.array([Gadget()]),
    "objects": np.array([None]),
    "records": np.zeros(2, [("a", "f4")]),
    "dates without a unit": np.array(["NaT"], "M8"),
    "class of arrays": np.ndarray,
    "other class": collections.Counter("ab"),
    "array of another class": np.ones(2).view(Array),
    "module": torch.nn.Linear(1, 1),
    "function": len,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", UNSAFE.values(), ids=UNSAFE)
def test_what_is_refused(value: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.FormatError) as caught:
        decode(pickle.dumps([1, value], protocol))
    assert isinstance(caught.value, tc.UnsafeSkeletonError)
    assert str(caught.value).endswith("; REMEDY")
    assert not Path("hacked").exists()


def test_a_file_of_torch_inside_a_pickle() -> None:
    """The elements of a tensor are in a file of `torch.save`, which may contain a gadget."""
    out = io.BytesIO()
    torch.save(Gadget(), out, _use_new_zipfile_serialization=False)

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (out.getvalue(),)

    with pytest.raises(tc.FormatError):
        decode(pickle.dumps(Storage()))
    with pytest.raises(tc.UnsafeSkeletonError, match="storage"):
        decode(pickle.dumps(torch.ones(2).untyped_storage()))


def test_bytes_that_many_arrays_share() -> None:
    """Each would be a copy: 2 MB of pickle would need 2 GB."""
    raw = bytes(1_000_000)

    class Shared:
        def __init__(self, state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            return RECONSTRUCT, (np.ndarray, (0,), b"b"), self.state

    state = (1, (len(raw),), np.dtype("u1"), False, raw)
    with pytest.raises(tc.FormatError, match="together are much larger"):
        decode(pickle.dumps([Shared(state) for _ in range(2000)]))


@pytest.mark.parametrize(
    "change",
    [
        {1: (3,)}, {1: (-1, -2)}, {1: (1 << 40, 1 << 40)}, {1: [2]}, {2: None}, {3: 1}, {4: "ab"}, {4: [1.0, 2.0]},
        {4: b"short"}, {1: (1,) * 40 + (2,)},
    ],
)  # fmt: skip
def test_states_that_do_not_fit(change: dict[int, Any]) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            state = [1, (2,), np.dtype("f8"), False, bytes(16)]
            for at, value in change.items():
                state[at] = value
            return RECONSTRUCT, (np.ndarray, (0,), b"b"), tuple(state)

    with pytest.raises(tc.FormatError):
        decode(pickle.dumps(Bad()))


def test_damage_anywhere() -> None:
    draw = random.Random(0)
    values = [list(ARRAYS.values()), list(TENSORS.values()), {"x": np.float32(1), "y": np.dtype("U4")}]
    pickles = [pickle.dumps(value, protocol) for value in values for protocol in PROTOCOLS]
    num_bad = 0
    for _ in range(3000):
        raw = bytearray(draw.choice(pickles))
        for _ in range(draw.choice((1, 1, 2, 5))):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        if draw.random() < 0.1:
            del raw[draw.randrange(len(raw)) :]
        try:
            decode(bytes(raw))
        except tc.FormatError:
            num_bad += 1
    assert num_bad > 500
