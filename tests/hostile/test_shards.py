"""Rows of FORMAT.md's table of attacks, each in a shard: no reader takes it, and each says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import READERS, by_stream, header, put
from tests.hostile.pickles import PROTO, little_memory, reference
from tests.shards.tars import build

X = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
DAYS = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
BOOLS = {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}
WIDE = {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]}


def refer(name: str) -> bytes:
    return PROTO + b"(" + reference(name) + b"t."


SKELETON = refer("tensor:x")
# What all that decode the sample refuse; `test_skeletons` has other disagreements of the two members.
DECODED: dict[str, tuple[bytes, bytes]] = {
    "bools that are 7": (SKELETON, header({"x": BOOLS}, b"\x00\x07")),
    "bools of an array that are 2": (refer("ndarray:x"), header({"x": BOOLS}, b"\x00\x02")),
    "text beyond Unicode": (refer("ndarray:x?dtype=U1"), header({"x": WIDE}, b"\0\0\x11\0")),
    # numpy divides by such units, and the process dies
    "units of zero": (refer("ndarray:x?dtype=datetime64[0s]"), header({"x": DAYS}, bytes(8))),
    "no skeleton": (b"", header({"x": X})),
}


def refused(path: Path, reader: str) -> tc.TensorCacheError:
    with little_memory(20 * path.stat().st_size + 4_000_000), pytest.raises(tc.TensorCacheError) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize("reader", READERS)
def test_a_header(tmp_path: Path, reader: str) -> None:
    """All that open a shard refuse it; `test_headers` has other headers."""
    path = put(tmp_path / "x.tar", {"a.skel.pyd": SKELETON, "a.safetensors": header({"x": X}, length=1 << 63)})
    assert "'a'" in str(refused(path, reader))


@pytest.mark.parametrize("what", DECODED)
def test_skeletons_and_tensors(tmp_path: Path, what: str) -> None:
    skeleton, tensors = DECODED[what]
    path = put(tmp_path / "x.tar", {"a.skel.pyd": skeleton, "a.safetensors": tensors})
    for reader in ("samples", "batch", "stream"):
        if what == "no skeleton":
            assert "'a'" in str(refused(path, reader))
        else:
            with pytest.raises(tc.FormatError, match="other than 0 and 1|Unicode|code point|not stored as I64"):
                READERS[reader](path)


def test_halves_of_two_samples(tmp_path: Path) -> None:
    one, two = (tc.encode_sample(torch.full((3,), i)) for i in range(2))
    path = put(tmp_path / "x.tar", {"a.skel.pyd": one[0], "a.safetensors": two[1]})
    for reader in READERS:
        assert "do not belong together" in str(refused(path, reader))


@pytest.mark.parametrize("there", ["skel.pyd", "safetensors", "NAME.safetensors"])
def test_half_a_sample(tmp_path: Path, there: str) -> None:
    skeleton, tensors = tc.encode_sample(torch.ones(3))
    path = put(tmp_path / "x.tar", {f"a.{there.lower()}": skeleton if there == "skel.pyd" else tensors})
    for reader in READERS:
        assert "is missing, but" in str(refused(path, reader))


@pytest.mark.parametrize("again", ["a.skel.pyd", "a.SKEL.PYD", "a.safetensors", "a.txt"])
def test_a_member_twice(tmp_path: Path, again: str) -> None:
    skeleton, tensors = tc.encode_sample(torch.ones(3))
    members = [("a.skel.pyd", skeleton), ("a.safetensors", tensors), ("a.txt", b"1"), (again, b"2")]
    (tmp_path / "x.tar").write_bytes(build(members))
    for reader in READERS:
        refused(tmp_path / "x.tar", reader)


def test_a_key_twice_apart(tmp_path: Path) -> None:
    """A stream has forgotten the first one: it gives two samples, each whole; an index refuses."""
    members = []
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        skeleton, tensors = tc.encode_sample(torch.tensor([value]))
        members += [(f"{key}.skel.pyd", skeleton), (f"{key}.safetensors", tensors)]
    path = tmp_path / "x.tar"
    path.write_bytes(build(members))
    for reader in set(READERS) - {"stream"}:
        assert "key 'a' occurs twice" in str(refused(path, reader))
    assert [int(found["tensorcache"]) for found in by_stream(path)] == [1, 2, 3]
