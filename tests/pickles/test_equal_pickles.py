"""Files of `torch.save` whose pickles are equal but for texts and numbers: one is decoded, each has its own values."""

from __future__ import annotations

import io
import math
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import wds_tensorcache as tc
from tests.same import assert_same
from tests.strategies import samples
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.importers.safe_files import REMEDY, load_torch, max_expanded
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.pickles import pth_plans
from wds_tensorcache.integrations.pickles.arrays import ArrayReader
from wds_tensorcache.integrations.pickles.pth import load_pth
from wds_tensorcache.integrations.pickles.translate import find_fields


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plans of this process, of which none is made yet."""
    monkeypatch.setattr(pth_plans, "_PLANS", pth_plans._Plans())
    return pth_plans._PLANS


def other(leaf: Any) -> Any:
    """Return a tensor of the same shape and strides with other bytes, another text or another number."""
    if isinstance(leaf, torch.Tensor):
        if leaf.dtype is torch.bool:
            return leaf
        elements = leaf.untyped_storage().clone()
        return torch.empty(0, dtype=leaf.dtype).set_(elements, leaf.storage_offset(), leaf.size(), leaf.stride())
    if isinstance(leaf, str):
        return f"{leaf}\N{GRINNING FACE}"
    return leaf if isinstance(leaf, bool) else leaf + 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples())
def test_a_planned_file_is_as_one_that_is_decoded(sample: Any) -> None:
    for value in (sample, sample, rebuild(sample, other, (torch.Tensor, str, int, float)), sample):
        raw = saved(value)
        limit = max_expanded(len(raw))
        expected, error = outcome(lambda: decoded(raw, limit))  # noqa: B023
        found = outcome(lambda: pth_plans.view_pth(memoryview(bytearray(raw)), limit, REMEDY, ArrayReader))  # noqa: B023
        assert found[1] == error
        assert_same(expected, found[0])


def decoded(raw: bytes, limit: int) -> Any:
    return load_pth(io.BytesIO(raw), limit, {}, REMEDY, REMEDY, ArrayReader)


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call returns, or the error that it raises."""
    try:
        return call(), ""
    except tc.FormatError as exc:
        return None, repr(exc)


def numbered(number: int) -> dict[str, Any]:
    base = torch.arange(24.0).view(4, 6) + 100 * number
    return {
        "views": [base, base.t(), base[1:3, ::2]],
        "more": (torch.full((3,), number), None, "text"),
        "empty": base[:0],
    }


def test_each_file_has_its_own_tensors(tmp_path: Path, plans: Any) -> None:
    """Also its own containers; views of one storage still share it."""
    for number in range(3):
        torch.save(numbered(number), tmp_path / f"{number}.pt")
    folder = SourceFolder(str(tmp_path))
    found = [load_torch(folder, f"{number}.pt") for number in range(3)]
    assert len(plans._plans) == 1
    for number, value in enumerate(found):
        assert_same(numbered(number), value)
        base, transposed, part = value["views"]
        assert base.data_ptr() == transposed.data_ptr() == part.data_ptr() - 6 * 4
    found[0]["views"].clear()
    assert len(found[1]["views"]) == 3


def with_values(number: int, length: int = 2) -> dict[Any, Any]:
    text = f"prompt {number} " + "\N{GREEK SMALL LETTER ALPHA}" * number
    shared = (text, number)
    return {
        "prompt": text,
        "again": [text, shared, shared],
        "seeds": (number, number << 7, number << 15, -number, 1 << 40, number + 0.5, math.inf, number > 5),
        "sizes": OrderedDict(width=1024, height=number),
        7: {"x": torch.full((length,), number)},
        "bytes": b"abc",
        "complex": 2j,
    }


def test_texts_and_numbers_of_each_file(plans: Any) -> None:
    for number in (*range(300), 255, 65_536, 70_000, -5):
        expected = with_values(number)
        assert_same(expected, view(saved(expected)))
    # numbers of more than 32 bits, and bools, have no places, so they need other plans
    assert len(plans._plans) < 8


def test_other_shapes_and_keys_need_other_plans(plans: Any) -> None:
    for number in range(8):
        for length in (1, 2, 3):
            expected = {"prompt": f"{number}", f"x{length}": torch.full((length, 2), number), "n": length}
            assert_same(expected, view(saved(expected)))
    assert len(plans._plans) == 3


def test_few_plans_are_made_that_are_not_used(plans: Any) -> None:
    for number in range(200):
        expected = {f"x{number}": torch.full((3,), number)}
        assert_same(expected, view(saved(expected)))
    assert 16 <= len(plans._plans) < 24
    for number in range(100):
        expected = {"same": torch.full((3,), number)}
        assert_same(expected, view(saved(expected)))
    assert len(plans._plans[0].lengths) == 1
    assert plans._credit > 10


def test_cut_and_changed_pickles(plans: Any) -> None:
    """A pickle that a plan does not match exactly is decoded, and refused as without plans."""
    raw = saved({"prompt": "a" * 50, "x": torch.ones(2), "n": 5})
    view(raw)
    at, end = raw.index(b"\x80\x02}"), raw.index(b"PK\x07\x08")
    for position in range(at, end):
        for byte in (raw[position] ^ 1, 0xFF, 0x58):
            changed = bytearray(raw)
            changed[position] = byte
            limit = max_expanded(len(raw))
            expected = outcome(lambda: decoded(bytes(changed), limit))  # noqa: B023
            found = outcome(lambda: view(changed))  # noqa: B023
            assert found[1] == expected[1]
            assert_same(expected[0], found[0])


def view(raw: bytes | bytearray) -> Any:
    return pth_plans.view_pth(memoryview(bytearray(raw)), max_expanded(len(raw)), REMEDY, ArrayReader)


def rewritten(raw: bytes, name: str, content: bytes) -> bytes:
    """Return the zip with another content of a file in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive, zipfile.ZipFile(out, "w") as target:
        for file in archive.infolist():
            target.writestr(file.filename, content if file.filename == name else archive.read(file))
    return out.getvalue()


def test_equal_pickles_in_files_that_differ(tmp_path: Path) -> None:
    """A file that lacks a storage, or has a shorter one, is refused as if it were the first."""
    raw = saved(numbered(1))
    damaged = {
        "short": rewritten(raw, "archive/data/0", bytes(40)),
        "longer": rewritten(raw, "archive/data/0", bytes(200)),
        "without": raw.replace(b"archive/data/1", b"archive/data/7"),
        "big": raw.replace(b"little", b"bigger"),
        "cut": raw[:-300],
    }
    (tmp_path / "good.pt").write_bytes(raw)
    for name, content in damaged.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    folder = SourceFolder(str(tmp_path))
    for _ in range(2):
        assert_same(numbered(1), load_torch(folder, "good.pt"))
        assert_same(torch.zeros(4, 6), load_torch(folder, "longer.pt")["views"][0])
        for name in ("short", "without", "big", "cut"):
            with pytest.raises(tc.FormatError, match=rf"{name}\.pt: "):
                load_torch(folder, f"{name}.pt")


def test_bools_are_checked_in_each_file(tmp_path: Path) -> None:
    raw = saved([torch.tensor([True] * 64)])
    (tmp_path / "a.pt").write_bytes(raw)
    (tmp_path / "b.pt").write_bytes(raw.replace(b"\1" * 64, b"\2" * 64))
    folder = SourceFolder(str(tmp_path))
    assert load_torch(folder, "a.pt")[0].all()
    with pytest.raises(tc.FormatError, match=r"b\.pt: a bool tensor"):
        load_torch(folder, "b.pt")


def test_gradients_and_parameters_are_kept(tmp_path: Path) -> None:
    value = [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))]
    torch.save(value, tmp_path / "a.pt")
    folder = SourceFolder(str(tmp_path))
    for _ in range(2):
        grad, parameter = load_torch(folder, "a.pt")
        assert grad.requires_grad
        assert isinstance(parameter, torch.nn.Parameter)


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def tensor(location: bytes, numel: int = 2, gradient: bytes = b"\x89") -> bytes:
    """Return the opcodes of a tensor of the storage `data/0`."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + location + b"K%ctQ" % numel
    stride = b"K\x00K%c\x85K\x01\x85" % numel
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + stride + gradient + b"ccollections\nOrderedDict\n)RtR"


def zipped(opcodes: bytes, **records: bytes) -> bytes:
    """Return a file of a list with these opcodes between its brackets."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02](" + opcodes + b"e.")
        for name, content in records.items():
            target.writestr("archive/" + name.replace("_", "/"), content)
    return out.getvalue()


def encoded(value: str) -> bytes:
    return zipped(text(value) + b"q\x00c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R")


def key_and_value(value: str) -> bytes:
    return zipped(text(value) + b"q\x00}h\x00h\x00s")


ALONE, IN_METADATA = tensor(text("cpu")), b"ccollections\nOrderedDict\n)R}" + text("x") + tensor(text("cpu")) + b"sb"
EMPTY = tensor(text("cpu"), numel=0)
PAIRS = {
    "a text is also an argument": (encoded("a"), encoded("b")),
    "a text is also a key": (key_and_value("a"), key_and_value("b")),
    "a text is also the device of a storage, then a number": (
        zipped(text("cpu") + b"q\x00" + tensor(b"h\x00"), data_0=bytes(8)),
        zipped(b"K\x05q\x00" + tensor(b"h\x00"), data_0=bytes(8)),
    ),
    "the storage of a tensor that is not in the object": (zipped(IN_METADATA, data_0=bytes(8)), zipped(IN_METADATA)),
    "an empty storage beside another empty record": (zipped(EMPTY, data_0=b"", other=b""), zipped(EMPTY, data_0=b"")),
    "an empty storage, then none": (zipped(EMPTY, data_0=b""), zipped(EMPTY)),
    "None in place of a bool": (zipped(tensor(text("cpu"), gradient=b"N"), data_0=bytes(8)),) * 2,
}


@pytest.mark.parametrize("files", PAIRS.values(), ids=PAIRS)
def test_a_file_after_another_is_as_if_it_were_alone(files: tuple[bytes, bytes]) -> None:
    for raw in files:
        assert_as_decoded(raw)


def assert_as_decoded(raw: bytes) -> None:
    limit = max_expanded(len(raw))
    expected, error = outcome(lambda: decoded(raw, limit))
    found = outcome(lambda: view(raw))
    assert found[1] == error
    assert_same(expected, found[0])


VALUES = [
    b"K\x00",
    b"K\xff",
    b"M\x00\x01",
    b"J\xff\xff\xff\xff",
    b"G" + struct.pack(">d", -0.0),
    b"N",
    b"\x88",
    b"h\x00",
]
TEXTS = [
    *map(text, ("", "0", "cpu", "storage", "latin1", "\ud800")),
    b"\x8c\x02\xff\xff",
    b"\x8c\xff",
    b"X\xff\xff\xff\xff",
]


def test_other_values_in_any_place(plans: Any) -> None:
    """Any text, number, constant or object of the memo in place of any text or number, in files with shared objects."""
    chance = random.Random(5)
    base = torch.arange(6.0).view(2, 3)
    shared = ["a", 1, "cpu"]
    value = {"cpu": shared, "0": (shared, base, base.t()), 7: OrderedDict(n=2.5, x=base[:0]), "b": [b"bytes", 1j, "0"]}
    raw = saved(value)
    pickled = zipfile.ZipFile(io.BytesIO(raw)).read("archive/data.pkl")
    fields = find_fields(pickled)
    assert fields is not None
    for _ in range(600):
        changed, position = b"", 0
        for begin, end in fields:
            is_changed = chance.random() < 0.05
            changed += pickled[position:begin] + (chance.choice(VALUES + TEXTS) if is_changed else pickled[begin:end])
            position = end
        assert_as_decoded(rewritten(raw, "archive/data.pkl", changed + pickled[position:]))
    assert plans._plans


def test_a_damaged_file_does_not_spoil_the_plan_of_good_ones(plans: Any) -> None:
    """The first file lacks a storage, or its pickle names one that is not there."""
    with pytest.raises(tc.FormatError):
        view(zipped(text("a") + ALONE))
    for number in range(3):
        assert view(zipped(text(f"{number}") + ALONE, data_0=bytes(8)))[0] == f"{number}"
    assert len(plans._plans) == 1


def test_containers_that_nest_too_deeply_for_the_stack(plans: Any) -> None:
    """A plan was made near the start of a stack, and is used near its end."""
    nested: Any = "a"
    for _ in range(150):
        nested = (nested,)
    raw = saved([nested])
    view(raw)
    assert plans._plans

    def deep(depth: int) -> None:
        if depth:
            return deep(depth - 1)
        return assert_is_nested(view(raw))

    deep(450)


def assert_is_nested(value: Any) -> None:
    (value,) = value
    for _ in range(150):
        (value,) = value
    assert value == "a"
