"""Foreign pickles, in members and files: values as `pickle.loads` and `torch.load` give them, or an error; nothing runs."""

from __future__ import annotations

import collections
import datetime
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.test_pth import decoded, saved
from tests.importers.folders import Gadget, imported
from tests.same import assert_same

PROTOCOLS = [2, 3, 4, 5]
UTC = datetime.timezone.utc
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(protocol: int, name: str) -> None:
    array = ARRAYS[name]
    raw = pickle.dumps({"x": array, "again": [array, array.copy()], "n": 1}, protocol)
    found, expected = decoded(raw, "pkl"), pickle.loads(raw)
    assert found["x"] is found["again"][0]
    for left, right in ((expected["x"], found["x"]), (expected["again"][1], found["again"][1])):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(protocol: int) -> None:
    value = [
        {frozenset([1, (2, 3)]): {4, 5}, "é": [None, True, 1 << 80, -1, 2.5, 1j, b"", b"\xff" * 300]},
        collections.OrderedDict(b=1, a=2),
        [collections.defaultdict(factory, a=1) for factory in (None, list, str, int, set)],
        [range(1, 9, 2), slice(None, 3), ..., datetime.date(2020, 1, 2), datetime.timedelta(days=-1, microseconds=5)],
        [datetime.datetime(2020, 1, 2, 3, tzinfo=UTC), torch.float16, torch.Size([2]), torch.device("cpu")],
        [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("hi"), np.dtype(">f4"), np.dtype("U5")],
        [np.str_(), np.bytes_()],
    ]
    shared: list[Any] = ["x" * 300]
    value.append([shared, (shared, (1, 2, 3, 4)), shared])
    for kind, raw in (("pkl", pickle.dumps(value, protocol)), ("pth", saved(value, pickle_protocol=protocol))):
        found = decoded(raw, kind)
        assert repr(found) == repr(value)
        assert [list(map(type, each)) for each in found[2:]] == [list(map(type, each)) for each in value[2:]]
        assert [each.default_factory for each in found[2]] == [None, list, str, int, set]
        assert found[-1][0] is found[-1][1][0] is found[-1][2]
    assert np.dtype("f4").isnative  # the dtype that numpy shares is not changed


class Array(np.ndarray):  # type: ignore[type-arg]
    """A class of arrays that is not numpy's."""


UNSAFE = {
    "gadget": Gadget(),
    "gadget in an array": np.array([Gadget()]),
    "objects": np.array([None]),
    "records": np.zeros(2, [("a", "f4")]),
    "dates": np.array(["NaT"], "M8[s]"),
    "class of arrays": np.ndarray,
    "other class": collections.Counter("ab"),
    "deque": collections.deque([1]),
    "array of another class": np.ones(2).view(Array),
    "module": torch.nn.Linear(1, 1),
    "function": len,
    "storage": torch.ones(2).untyped_storage(),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", UNSAFE.values(), ids=UNSAFE)
def test_unsafe_pickles_are_refused(value: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.UnsafeSkeletonError, match=r"handle_extension\('pkl', …\)"):
        decoded(pickle.dumps([1, value], protocol), "pkl")
    assert not Path("hacked").exists()


class Reduced:
    """An object that is pickled as a call and a state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = function, args, state

    def __reduce__(self) -> Any:
        return self.reduced


def array_of(**changes: Any) -> Reduced:
    state = {"version": 1, "shape": (2,), "dtype": np.dtype("f8"), "order": False, "raw": bytes(16)} | changes
    return Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), tuple(state.values()))


MEGABYTE, LEGACY = bytes(1_000_000), saved(Gadget(), _use_new_zipfile_serialization=False)
BAD = {
    "a file of torch as elements": Reduced(torch.storage._load_from_bytes, (LEGACY,)),
    "elements of something": Reduced(torch.storage._load_from_bytes, (b"PK\3\4",)),
    "bytes that many arrays share": [array_of(shape=(10**6,), dtype=np.dtype("u1"), raw=MEGABYTE) for _ in range(200)],
    "more elements": array_of(shape=(3,)),
    "negative sizes": array_of(shape=(-1, -2)),
    "a product that overflows": array_of(shape=(1 << 40, 1 << 40)),
    "a list as shape": array_of(shape=[2]),
    "no dtype": array_of(dtype=None),
    "no order": array_of(order=1),
    "a text": array_of(raw="ab"),
    "objects": array_of(raw=[1.0, 2.0]),
    "few bytes": array_of(raw=b"short"),
    "41 dimensions": array_of(shape=(1,) * 40 + (2,)),
    "a dtype with fields": Reduced(np.dtype, ("f8", False, True), (3, "<", None, ("a",), {"a": 1}, -1, -1, 0)),
    "a parameter of a list": Reduced(torch._utils._rebuild_parameter, ([1], True, collections.OrderedDict())),
    "elements without bytes": array_of(dtype=np.dtype("S0"), raw=b""),
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_bad_states(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.FormatError):
        decoded(pickle.dumps(value), "pkl")
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"c__builtin__\nset\n.",
        b"c__builtin__\nlist\n)R.",
        b"c__builtin__\nfrozenset\nc__builtin__\nset\n\x85R.",
        b"c__builtin__\nfrozenset\n](c__builtin__\nset\ne\x85R.",
        b"ccollections\ndefaultdict\nc__builtin__\nfrozenset\n\x85R.",
        b"cnumpy\nndarray\n)R.",
        b"N.N.",
        b"}K\x01K\x02s",
        b"]K\x01K\x02s.",
        b"](K\x01K\x02u.",
        b"](K\x01\x90.",
        b"]]b.",
        b"N)}\x92.",
        b"I1\n.",
        b"i__main__\nA\n.",
        b"X\xff\xff\xff\x7f.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_bad_opcodes(opcodes: bytes) -> None:
    with pytest.raises(tc.FormatError):
        decoded(b"\x80\x02" + opcodes, "pkl")


VALUE = {"x": [torch.randn(4, 6).t()[1:], torch.zeros(0)], "text": "a", "array": np.arange(3)}


def test_files(tmp_path: Path) -> None:
    """Views of one storage are one memory, wherever the storages begin in the file."""
    (tmp_path / "in").mkdir()
    contents = {"a.pt": saved(VALUE), "b.pth": gzip.compress(saved(VALUE)), "c.pt": pickle.dumps(VALUE)}
    for name, content in contents.items():
        (tmp_path / "in" / name).write_bytes(content)
    found, _ = imported(tmp_path / "in", tmp_path / "out", num_workers=1)
    for name in "abc":
        assert_same(VALUE, found[name])


def test_trusted_files(tmp_path: Path) -> None:
    """Older formats, other classes, objects of numpy, and small files that expand."""
    folder = tmp_path / "in"
    folder.mkdir()
    module = torch.nn.Linear(2, 2)
    contents = {
        "good.pt": saved(VALUE),
        "old.pt": saved(VALUE, _use_new_zipfile_serialization=False),
        "module.pt": saved({"module": module}),
        "gz.pt": gzip.compress(saved(torch.zeros(70 << 20, dtype=torch.uint8)), 1),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    np.savez(folder / "objects.npz", x=np.array([{"y": 1}, None]), z=np.array({"w": np.ones(2)}))  # type: ignore[arg-type]
    _, report = imported(folder, tmp_path / "out", on_error="skip")
    assert report.num_skipped == 4
    found, _ = imported(folder, tmp_path / "trusted", trust=True, num_workers=1)
    assert_same(VALUE, found["old"])
    assert_same({"module": module.state_dict()}, found["module"])
    assert_same({"x": [{"y": 1}, None], "z": {"w": torch.ones(2, dtype=torch.float64)}}, found["objects"])
    assert found["gz"].numel() == 70 << 20
