"""Keys that take more than their bytes to hash, to place or to compare: rows of FORMAT.md's table of attacks."""

from __future__ import annotations

import struct
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.hostile.colliding import CONTAINERS, KEYS, container, count_calls, integer
from tests.hostile.pickles import PROTO, call, decode, refused
from tests.shards.tars import build

MANY = "not text or bytes have more than 10,000 parts"
# number of parts of one key
PARTS = {
    "int": 1,
    "negative int": 1,
    "float": 1,
    "complex": 1,
    "Fraction": 10,
    "Decimal": 10,
    "UUID": 10,
    "tuple": 2,
    "tuple of tuples": 5,
    "tuple of -1 and -2": 15,
    "frozenset": 2,
    "range": 13,
    "Size": 15,
    "float64": 10,
    "datetime64": 10,
    "timedelta": 10,
    "path": 10,
}


@pytest.mark.parametrize(
    ("kind", "key"), [*(("dict", key) for key in PARTS), *((kind, "Fraction") for kind in CONTAINERS if kind != "dict")]
)
def test_more_than_10000_parts_are_refused_before_a_key_is_hashed(kind: str, key: str) -> None:
    keys = [KEYS[key](number) for number in range(20)]
    copies = 9_980 // (20 * PARTS[key])
    assert len(decode(container(kind, keys, copies))) == copies
    count = 10_000 // PARTS[key] + 1
    if "one at a time" not in kind and "batches" not in kind:
        found, calls = count_calls(lambda: decode(container(kind, [KEYS[key](number) for number in range(count)])))
        assert f"{MANY}; one container has {count:,}" in str(found)
        assert calls == 0
    refused(container(kind, keys, copies + 2), MANY)


def test_as_many_colliding_keys_as_are_read() -> None:
    """The reason for the number: building them takes about a second at most."""
    found, calls = count_calls(lambda: decode(container("dict", [KEYS["Fraction"](number) for number in range(1000)])))
    assert len(found) == 1000
    assert calls < 3_000_000


def long_text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def test_long_numbers() -> None:
    for key in (
        integer(1 << 400_000),
        integer(-1 << 512) + b"\x85",
        call("builtins", "slice", b"N" + integer(1 << 512) + b"N\x87"),
        call("builtins", "range", integer(1 << 4000) * 3 + b"\x87"),
        call("decimal", "Decimal", long_text("9" * 2000) + b"\x85"),
    ):
        refused(b"}" + key + b"Ns", "more than 512 bits")


def test_keys_that_overflow_or_exhaust_hash() -> None:
    refused(b"}" + b"N" + b"\x85" * 1_000_000 + b"Ns", "200 deep")
    assert len(decode(b"}" + b"N" + b"\x85" * 198 + b"Ns")) == 1
    shared = b"N\x85" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(100))  # hash() would visit 2**100 parts
    for body in (b"}" + shared + b"Ns", b"\x8f(" + shared + b"\x90", b"(" + shared + b"\x91"):
        refused(body, MANY)
    wide = b"(" + b"N" * 1_000_000 + b"t\x94"
    refused(b"](" + wide + b"}h\x00Ns" * 1000 + b"e", MANY)


HONEST: dict[str, Any] = {
    "ints": range(10_000),
    "dates": [date(1950, 1, 1) + timedelta(number) for number in range(1000)],
    "texts": [f"key {number}" for number in range(20_000)],
    "bytes": [b"key %d" % number for number in range(20_000)],
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_keys(name: str) -> None:
    keys = list(HONEST[name])
    assert list(tc.decode_sample(*tc.encode_sample(dict.fromkeys(keys)))) == keys
    assert tc.decode_sample(*tc.encode_sample(set(keys))) == set(keys)


@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset], ids=lambda make: make.__qualname__)
def test_the_writer_refuses_what_no_reader_takes(make: Any) -> None:
    with pytest.raises(tc.EncodeError, match=f"value at 'a.0': .*{MANY}; .* use texts as keys, a list of pairs"):
        tc.encode_sample({"a": [make((k,) for k in range(5001))]})
    with pytest.raises(tc.EncodeError, match="more than 512 bits"):
        tc.encode_sample(make([1 << 512]))


def test_the_parts_of_all_containers_are_added() -> None:
    with pytest.raises(tc.EncodeError, match=f"value at '1': .*{MANY}"):
        tc.encode_sample([dict.fromkeys(range(6000)), dict.fromkeys(range(6000))])


def test_a_shard_without_an_index(tmp_path: Path) -> None:
    body = container("dict", [KEYS["Fraction"](number) for number in range(3000)])
    tensors = tc.encode_sample(0)[1]
    shard = tmp_path / "a.tar"
    shard.write_bytes(build([("k.skel.pyd", PROTO + body + b"."), ("k.safetensors", tensors)]))
    _, calls = count_calls(lambda: tc.open(shard).close())
    assert not calls
    report, calls = count_calls(lambda: tc.verify(shard, num_threads=1))
    assert not calls
    assert MANY in str(report.faults)
