"""Keys that take more than their bytes to hash, to place or to compare: at most 10,000 parts, counted before one is hashed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.hostile.pickles import PROTO, call, decode, integer, refused, text
from tests.shards.tars import build

MANY = "not text or bytes have more than 10,000 parts"
REAL = b"G" + bytes(8)


def long_text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


# opcodes of a key, and the number of its parts
KEYS: dict[str, tuple[bytes, int]] = {
    "int": (b"K\x05", 1),
    "long int": (integer(1 << 100), 1),
    "float": (REAL, 1),
    "complex": (call("builtins", "complex", REAL + REAL + b"\x86"), 1),
    "Fraction": (call("fractions", "Fraction", b"K\x05K\x01\x86"), 10),
    "Decimal": (call("decimal", "Decimal", text("5") + b"\x85"), 10),
    "UUID": (call("uuid", "UUID", text(f"{5:032x}") + b"\x85"), 10),
    "tuple": (b"K\x05\x85", 2),
    "tuple of tuples": (b"K\x01K\x05\x85\x85\x86", 5),
    "frozenset": (b"(\x91", 1),
    "range": (call("builtins", "range", b"K\x05K\x0eK\x03\x87"), 13),
    "Size": (call("torch", "Size", b"(" + b"K\x01" * 14 + b"t\x85"), 15),
    "float64": (call("numpy", "float64", REAL + b"\x85"), 10),
    "datetime64": (call("numpy", "datetime64", b"K\x05" + text("s") + b"\x86"), 10),
    "timedelta": (call("datetime", "timedelta", b"K\x01K\x01K\x00\x87"), 10),
    "path": (call("pathlib", "PurePosixPath", text("a") + b"\x85"), 10),
    "long text": (long_text("x" * 1000), 1),
}
ORDERED, DEFAULT = (call("collections", name, b")") for name in ("OrderedDict", "defaultdict"))
# opcodes of a container with the first object of the memo as its key, so many times
CONTAINERS: dict[str, Callable[[int], bytes]] = {
    "dict": lambda count: b"}(" + b"h\0N" * count + b"u",
    "dict, one at a time": lambda count: b"}" + b"h\0Ns" * count,
    "dict, in batches": lambda count: b"}(" + b"h\0N" * (count - 1) + b"u(h\0Nu",
    "OrderedDict": lambda count: ORDERED + b"(" + b"h\0N" * count + b"u",
    "defaultdict": lambda count: DEFAULT + b"(" + b"h\0N" * count + b"u",
    "set": lambda count: b"\x8f(" + b"h\0" * count + b"\x90",
    "set, in batches": lambda count: b"\x8f(" + b"h\0" * (count - 1) + b"\x90(h\0\x90",
    "frozenset": lambda count: b"(" + b"h\0" * count + b"\x91",
}


def memoize(key: bytes) -> bytes:
    return key + b"\x940"


@pytest.mark.parametrize(
    ("kind", "key"), [*(("dict", key) for key in KEYS), *((kind, "int") for kind in CONTAINERS if kind != "dict")]
)
def test_more_than_10000_parts_are_refused(kind: str, key: str) -> None:
    opcodes, num_parts = KEYS[key]
    count = 10_000 // num_parts
    assert len(decode(memoize(opcodes) + CONTAINERS[kind](count))) == 1
    refused(memoize(opcodes) + CONTAINERS[kind](count + 1), MANY)
    refused(memoize(opcodes) + b"](" + CONTAINERS[kind](count // 2 + 1) * 2 + b"e", MANY)


class Hashed:
    count = 0

    def __hash__(self) -> int:
        Hashed.count += 1
        return 0


@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "defaultdict", "set", "frozenset"])
def test_no_key_is_hashed_before_all_are_counted(kind: str) -> None:
    refused(memoize(call(__name__, "Hashed", b")")) + CONTAINERS[kind](1001), MANY, allow=[Hashed])
    assert not Hashed.count


def test_long_numbers() -> None:
    for key in (
        integer(1 << 400_000),
        integer(-1 << 512) + b"\x85",
        call("builtins", "slice", b"N" + integer(1 << 512) + b"N\x87"),
        call("builtins", "range", integer(1 << 4000) * 3 + b"\x87"),
        call("decimal", "Decimal", long_text("9" * 2000) + b"\x85"),
    ):
        refused(b"}" + key + b"Ns", "more than 512 bits")


@pytest.mark.long
def test_keys_that_overflow_or_exhaust_hash() -> None:
    refused(b"}" + b"N" + b"\x85" * 1_000_000 + b"Ns", "200 deep")
    assert len(decode(b"}" + b"N" + b"\x85" * 198 + b"Ns")) == 1
    shared = b"N\x85" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(100))  # hash() would visit 2**100 parts
    for body in (b"}" + shared + b"Ns", b"\x8f(" + shared + b"\x90", b"(" + shared + b"\x91"):
        refused(body, MANY)
    wide = b"(" + b"N" * 1_000_000 + b"t\x94"
    refused(b"](" + wide + b"}h\x00Ns" * 1000 + b"e", MANY)


@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset], ids=lambda make: make.__qualname__)
def test_writers_take_what_readers_take(make: Any) -> None:
    for keys in (range(10_000), [f"key {i}" for i in range(10_001)], [b"%d" % i for i in range(10_001)]):
        assert tc.decode_sample(*tc.encode_sample(make(keys))) == make(keys)
    with pytest.raises(tc.EncodeError, match=f"value at 'a.0': .*{MANY}; .* use texts as keys, a list of pairs"):
        tc.encode_sample({"a": [make((k,) for k in range(5001))]})
    with pytest.raises(tc.EncodeError, match=f"value at '1': .*{MANY}"):
        tc.encode_sample([make(range(6000)), make(range(6000))])
    with pytest.raises(tc.EncodeError, match="more than 512 bits"):
        tc.encode_sample(make([1 << 512]))


def test_a_shard_without_an_index(tmp_path: Path) -> None:
    """It is opened without building the sample."""
    skeleton = PROTO + memoize(b"K\x05") + CONTAINERS["dict"](10_001) + b"."
    shard = tmp_path / "a.tar"
    shard.write_bytes(build([("k.skel.pyd", skeleton), ("k.safetensors", tc.encode_sample(0)[1])]))
    tc.open(shard).close()
    assert MANY in str(tc.verify(shard).faults)
