"""Foreign members that `torch.save` wrote, or an attacker in its name: read without `torch.load`, at the cost of their bytes."""

from __future__ import annotations

import copy
import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.hostile.pickles import integer, little_memory
from tests.same import tensor_bytes


def decoded(raw: bytes, kind: str = "pth", **options: Any) -> Any:
    (found,) = tc.decode(**options)([{"__key__": "k", "__url__": "s.tar", kind: raw}])
    return found[kind]


def saved(value: Any, **options: Any) -> bytes:
    torch.save(value, stream := io.BytesIO(), **options)
    return stream.getvalue()


def zipped(pickled: bytes, kind: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for name, record in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"a/{name}", record)
    return stream.getvalue()


def fetch(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(count: bytes, key: str = "0", kind: bytes = fetch("torch", "FloatStorage")) -> bytes:
    return b"(" + text("storage") + kind + text(key) + text("cpu") + count + b"tQ"


HOOKS = fetch("collections", "OrderedDict") + b")R"


def tensor(offset: bytes, size: bytes, stride: bytes, count: bytes = b"K\x04", **options: Any) -> bytes:
    rebuild = fetch("torch._utils", "_rebuild_tensor_v2")
    return rebuild + b"(" + storage(count, **options) + offset + size + stride + b"\x89" + HOOKS + b"tR"


SHARED = b"K\x01\x85" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
KEYS = b"".join(integer(i) + b"N" for i in range(10_001))
LIST = b"](" + b"K\x01" * 50_000 + b"eq\x000"
HUGE = b"\x8a\x08" + struct.pack("<q", 1 << 60)
V3 = fetch("torch._utils", "_rebuild_tensor_v3") + b"(" + storage(b"K\x04") + b"K\x00K\x01\x85K\x01\x85\x89" + HOOKS
ATTACKS = {
    "a key that shares its parts": b"}" + SHARED + b"Ns",
    "a set's element that shares its parts": fetch("__builtin__", "set") + b"](" + SHARED + b"e\x85R",
    "a dtype that shares its parts": V3 + SHARED + b"tR",
    "too many keys": b"}(" + KEYS + b"u",
    "too many elements": fetch("__builtin__", "set") + b"](" + KEYS.replace(b"N", b"") + b"e\x85R",
    "one list for many sets": LIST + b"](" + (fetch("__builtin__", "set") + b"h\x00\x85R") * 20_000 + b"e",
    "a bytearray of a size": fetch("__builtin__", "bytearray") + b"J" + struct.pack("<i", 1 << 30) + b"\x85R",
    "bytes of a size": fetch("__builtin__", "bytes") + b"J" + struct.pack("<i", 1 << 30) + b"\x85R",
    "a storage of a size": fetch("torch.storage", "UntypedStorage") + b"J" + struct.pack("<i", 1 << 30) + b"\x85R",
    "a storage larger than its record": tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85", count=b"K\x05"),
    "a storage that is the pickle": tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85", key="../data.pkl"),
    "a storage of something": b"(" + text("module") + b"NNtQ",
    "a storage of a negative count": tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85", count=b"J\xff\xff\xff\xff"),
    "a storage of a large count": tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85", count=HUGE),
    "a storage as a value": storage(b"K\x04"),
    "a tensor beyond its storage": tensor(b"K\x01", b"K\x04\x85", b"K\x01\x85"),
    "a negative stride": tensor(b"K\x03", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "a stride of 0": tensor(b"K\x00", HUGE + b"\x85", b"K\x00\x85"),
    "strides of 0, 80 MB": b"](" + tensor(b"K\x00", b"J" + struct.pack("<i", 1 << 18) + b"\x85", b"K\x00\x85") * 80 + b"e",
    "no elements, of a shape that overflows": tensor(b"K\x00", b"K\x00" + HUGE + HUGE + b"\x87", b"K\x01K\x01K\x01\x87"),
    "a size that repeats a text": tensor(b"K\x00", HUGE[:-4] + b"\x01\x00\x00\x00" + text("xxxx") + b"\x86", b"K\x01K\x01\x86"),
    "1,000 dimensions": tensor(b"K\x00", b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t"),
    "a LONG_BINPUT at 2^28": b"Nr\x00\x00\x00\x10" + b"h\x07",
    "a list that doubles itself": b"]Naq\x00" + (fetch("__builtin__", "slice") + b"K\x00K\x00N\x87Rh\x00s") * 40,
    "a list that doubles itself at once": b"]Naq\x00(" + (fetch("__builtin__", "slice") + b"K\x00K\x00N\x87Rh\x00") * 40 + b"u",
    "state of a dict": b"}" + b"}" + text("x") + b"Nsb",
    "text longer than the file": b"X\xff\xff\xff\x7f",
    "code": fetch("os", "system") + text("touch OWNED") + b"\x85R",
    "a reference to a tensor": fetch("builtins", "format") + text("tensor:x") + b"\x85R",
    "a class as a value": fetch("collections", "OrderedDict"),
    "deep": b"]" * 100_000 + b"a" * 99_999,
    "no end": b"}(",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = zipped(b"\x80\x02" + ATTACKS[name] + b"." * (name != "no end"), **{"data/0": bytes(16)})
    # a list of one element takes 88 bytes, and 2 to write
    place = "^s.tar: sample 'k': member 'pth': "
    with little_memory(2_000_000 + 128 * len(raw)), pytest.raises(tc.FormatError, match=place):
        decoded(raw)
    assert not list(tmp_path.iterdir())


PICKLED = saved(torch.ones(4))
ONE = b"\x80\x02" + tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85") + b"."


def overlapping() -> bytes:
    """A zip of 1,000 storages, all of them the same bytes."""
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr("a/data.pkl", ONE)
        archive.writestr("a/data/0", bytes(1 << 16))
        for number in range(1, 1000):
            again = copy.copy(archive.getinfo("a/data/0"))
            again.filename = f"a/data/{number}"
            archive.filelist.append(again)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (saved([1], _use_new_zipfile_serialization=False), "expected a zip file"),
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(60), "cannot be decoded"),
        (PICKLED[:-30], "cannot be decoded"),
        (zipped(ONE, zipfile.ZIP_DEFLATED, **{"data/0": bytes(16)}), "compressed"),
        (zipped(ONE, **{"data/0": bytes(16), "byteorder": b"big"}), "not little-endian"),
        (zipped(ONE), "'data/0' is not in the zip"),
        (PICKLED.replace(b"FloatStorage", b"LunarStorage"), "LunarStorage"),
        (overlapping(), "overlap"),
    ],
)
def test_files_that_are_not_read(raw: bytes, match: str) -> None:
    with pytest.raises(tc.FormatError, match=f"^s.tar: sample 'k': member 'pth': .*{match}"):
        decoded(raw)


def rich() -> dict[str, Any]:
    base = torch.arange(12.0)
    view = base[2:8].view(2, 3).t()
    plain = torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
    plain += torch.bool, torch.complex64, torch.complex128
    rare = torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn
    return {
        "none": None,
        "bools": (True, False),
        "ints": [0, 300, 70_000, -1, 10**30],
        "floats": [1.5, 1j],
        "é": "né",
        "bytes": [b"\x00\xff", b""],
        "set": {1, "a"},
        "ordered": OrderedDict(a=1),
        "of torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu")],
        7: {"deep": [[[]]]},
        **{str(dtype): torch.tensor([[0, 1], [1, 1]]).to(dtype) for dtype in plain},
        **{str(dtype): torch.zeros(3).to(dtype) for dtype in rare},
        "view": view,
        "again": [view, {"x": view}],
        "base": base,
        "scalar": torch.tensor(3),
        "expanded": torch.ones(1).expand(4, 5),
        "no elements": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), False),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["pth", "pkl"])
def test_what_torch_load_reads_is_the_same(kind: str, protocol: int) -> None:
    values = rich()
    raw = saved(values, pickle_protocol=protocol) if kind == "pth" else pickle.dumps(values, protocol)
    found = decoded(raw, kind)
    assert list(found) == list(values)
    again = found.pop("again")
    assert again[0] is again[1]["x"] is found["view"]
    for name in found:
        value = values[name]
        assert type(found[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            for question in (lambda t: (t.dtype, t.stride(), t.requires_grad), tensor_bytes):
                assert question(value) == question(found[name])
        else:
            assert found[name] == value
    if kind == "pth":
        found["base"][2] = 99
        assert found["view"][0, 0] == 99  # one storage, as it was


def test_state_dicts() -> None:
    found = decoded(saved(torch.nn.BatchNorm1d(2).state_dict()))
    assert type(found) is OrderedDict
    torch.nn.BatchNorm1d(2).load_state_dict(found)


def test_checksums_may_be_left_out() -> None:
    raw = bytearray(saved(torch.ones(4)))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        sums = [file.CRC for file in archive.infolist() if file.CRC]
    for number in sums:
        raw = raw.replace(struct.pack("<I", number), bytes(4))
    assert torch.equal(decoded(bytes(raw)), torch.ones(4))


@pytest.mark.parametrize(
    "value", [torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.empty(3, device="meta")]
)
def test_other_values_need_a_handler(value: Any) -> None:
    raw = saved(value)
    with pytest.raises(tc.FormatError, match="handle_extension"):
        decoded(raw)
    handler = wds.handle_extension("pth", lambda raw: torch.load(io.BytesIO(raw), weights_only=False))
    (found,) = tc.decode(handler)([{"__key__": "k", "pth": raw}])
    assert type(found["pth"]) is type(value)


def test_the_bound_is_the_callers() -> None:
    raw = saved(torch.ones(1).expand(20 << 20))
    with pytest.raises(tc.FormatError, match="more than 67,108,864 bytes.*max_expanded_nbytes"):
        decoded(raw)
    assert decoded(raw, max_expanded_nbytes=80 << 20).shape == (20 << 20,)


def test_a_file_of_none_is_not_handed_to_webdataset() -> None:
    """To webdataset, None means that a handler did not take a member: its own decoder would run whatever it reads there."""
    raw = zipped(b"\x80\x02Nr\x00\x00\x00\x08.")  # LONG_BINPUT at 2^27, for which pickle's unpickler takes 2 GB
    with little_memory(1_000_000):
        assert decoded(raw) is None
    for extension in ("pyd", "pkl", "pickle"):
        assert tc.decode()({"__key__": "k", extension: b"\x80\x04N."}) == {"__key__": "k", extension: None}


def test_classes_in_allow() -> None:
    assert decoded(saved(Point(1, 2)), allow=[Point]).x == 1
    with pytest.raises(tc.UnsafeSkeletonError, match="Point"):
        decoded(saved(Point(1, 2)))


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y
