"""Skeletons and shards that are after time, memory or the stack: rows of FORMAT.md's table of attacks."""

from __future__ import annotations

import collections
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.hostile.pickles import call, decode, fetch, integer, little_memory, num_calls, refused, text
from tests.hostile.test_skeletons import Node
from tests.shards.damage import flip, members, write
from tests.shards.tars import pax, raw_header, record
from wds_tensorcache.shards.tar import BLOCK, names_of
from wds_tensorcache.storage.files import ShardFile

FORMAT = Path(tc.__file__).parent / "codec" / "FORMAT.md"
BAD_ARGUMENTS = {
    "a Fraction that takes minutes": ("fractions", "Fraction", integer((1 << 72_000) - 1) + b"K\x03\x86"),
    "a Fraction of a text": ("fractions", "Fraction", text("1e2000000") + b"\x85"),
    "a list of a range": ("builtins", "list", call("builtins", "range", b"J\x80\x96\x98\x00\x85") + b"\x85"),
    "a deque of a range": ("collections", "deque", call("builtins", "range", b"J\x80\x96\x98\x00\x85") + b"\x85"),
    "a bytearray of a size": ("builtins", "bytearray", b"J\xff\xff\xff\x7f\x85"),
    "bytes of a size": ("builtins", "bytes", b"J\xff\xff\xff\x7f\x85"),
    "a Size of a range": ("torch", "Size", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01\x87") + b"\x85"),
    "a record dtype": ("numpy", "dtype", text("V500000000") + b"\x85"),
    "a dtype of fields": ("numpy", "dtype", text("f4,O") + b"\x85"),
    "an OrderedDict of something": ("collections", "OrderedDict", b"]\x85"),
    "a factory that is a value": ("collections", "defaultdict", b"N\x85\x85"),
    "a factory with arguments": ("builtins", "list", b"(K\x01t\x85"),
    "a date out of range": ("datetime", "date", b"C\x04\xff\xff\xff\xff\x85"),
    "an hour out of range": ("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01\xff\x00\x00\x00\x00\x00\x85"),
    "a zone that is none": ("datetime", "time", b"C\x06" + bytes(6) + b"N\x85\x86"),
    "a device that is none": ("torch", "device", text("x" * 30) + b"\x85"),
    "a scalar that overflows": ("numpy", "int8", b"M\xff\xff\x85"),
    "a float that overflows": ("numpy", "float32", b"G\x7f\xe0" + bytes(6) + b"\x85"),
    "a scalar of a list": ("numpy", "float64", b"]\x85"),
    "a complex of texts": ("builtins", "complex", text("1") + text("2") + b"\x86"),
    "a Decimal of a list": ("decimal", "Decimal", b"]\x85"),
    "a slice of lists": ("builtins", "slice", b"]]]\x87"),
    "a UUID of anything": ("uuid", "UUID", text("zz") + b"\x85"),
    "a path of parts that are none": ("pathlib", "PurePosixPath", b"N\x85"),
    # numpy divides by units of zero, and the process dies
    "a datetime64 in units of zero": ("numpy", "datetime64", b"K\x01" + text("0s") + b"\x86"),
    "a dtype in units of zero": ("numpy", "dtype", text("M8[0s]") + b"\x85"),
}


ANNOUNCED = {
    "BINUNICODE8": b"\x8d" + b"\xff" * 8,
    "BYTEARRAY8": b"\x96\x00\x00\x00\x00\x01\x00\x00\x00",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "FRAME": b"\x95" + b"\xff" * 8 + b"N",
    "LONG_BINPUT": b"Nr\xff\xff\xff\x00",  # for which pickle's unpickler takes 256 MB
}
REFUSED = {name: call(*arguments) for name, arguments in BAD_ARGUMENTS.items()} | ANNOUNCED


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_and_sizes_that_are_only_announced(name: str) -> None:
    with little_memory(1_000_000):
        refused(REFUSED[name])


def test_nesting() -> None:
    for depth in (201, 100_000):
        refused(b"N" + b"\x85" * depth, "200 deep")
        refused(b"]" * depth + b"a" * (depth - 1), "200 deep")
        links = b"".join(b"0]\x94j" + struct.pack("<I", i) + b"a" for i in range(depth))  # each holds the one before
        refused(b"]\x94" + links, "200 deep")
    assert decode(b"N" + b"\x85" * 200) is not None


DEFAULTDICT = fetch("collections", "defaultdict") + b"\x940"


def test_defaultdicts_that_hold_defaultdicts() -> None:
    """Freeing them overflows C's stack, also when they are dropped before anything is returned."""
    n = 300_000
    nested = DEFAULTDICT + b"h\x00)R" + b"C\x00h\x00)R" * n + b"s" * n
    refused(nested, "10000 defaultdicts")
    refused(nested + b"0N", "10000 defaultdicts")
    with pytest.raises(tc.FormatError, match="10000 defaultdicts"):
        tc.decode()({"__key__": "k", "pkl": b"\x80\x05" + nested + b"."})
    many = [collections.defaultdict(list) for _ in range(10_001)]
    with pytest.raises(tc.EncodeError, match="10001 defaultdicts, and at most 1000 and 10000"):
        tc.encode_sample(many)
    assert tc.decode_sample(*tc.encode_sample(many[:-1])) == many[:-1]


DEQUE = fetch("collections", "deque") + b"\x940"


def test_deques_that_hold_deques() -> None:
    """Freeing them overflows C's stack, also when they are dropped before anything is returned."""
    n = 200_000
    refused(DEQUE + b"h\x00)R" * n + b"a" * (n - 1), "more than 1000 deques")
    refused(DEQUE + b"h\x00)R" * n + b"a" * (n - 1) + b"0N", "more than 1000 deques")
    links = b"".join(b"h\x00)R\x94j" + struct.pack("<I", i + 1) + b"a" for i in range(n))
    refused(DEQUE + b"(h\x00)R\x94" + links + b"t", "more than 1000 deques")
    with pytest.raises(tc.EncodeError, match="1001 deques and 0 defaultdicts, and at most 1000"):
        tc.encode_sample([collections.deque() for _ in range(1001)])


def test_lists_that_share_their_parts_are_neither_printed_nor_walked_as_trees() -> None:
    shared = b"]\x94" + b"".join(b"0]\x94(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60))
    refused(shared + b")R", "calls a list .*expected a listed callable")
    for name in ("builtins.format", "builtins.range", "torch.device", "numpy.dtype", "numpy.datetime64"):
        refused(call(*name.split("."), shared + b"\x85"))
        refused(call(*name.split("."), shared + b"N\x86"))
    assert tc.decode_sample(*tc.encode_sample(tc.realize(decode(shared))))


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("builtins", "bytearray", b"B" + struct.pack("<I", 200_000) + bytes(200_000)),
        ("numpy", "str_", b"X" + struct.pack("<I", 50_000) + b"x" * 50_000),
    ],
)
def test_one_text_copied_by_many_calls(module: str, name: str, argument: bytes) -> None:
    body = argument + b"\x940" + fetch(module, name) + b"\x940(" + b"h\x01h\x00\x85R" * 28_000 + b"t"
    with little_memory(100 * len(body)):
        refused(body, "copy too much")


def test_values_that_a_reader_would_not_build_are_refused() -> None:
    with pytest.raises(tc.EncodeError, match="to build, and most of them are shared; store their texts"):
        tc.encode_sample([PurePosixPath("x" * 9000) for _ in range(200)])


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


def test_shared_objects_are_walked_once() -> None:
    shared = [[number] for number in range(300)]
    written = tc.encode_sample([Node(str(number), shared) for number in range(300)], allow=[Node])
    found: list[Any] = []
    assert num_calls(lambda: found.extend(tc.decode_sample(*written, allow=[Node])), "walk") < 3000
    assert len(found) == 300
    cls = fetch(Node.__module__, "Node") + b"\x94"
    body = b"](" + b"]" * 300 + b"e\x940](" + cls + b"h\x00\x85R" + b"h\x01h\x00\x85R" * 300 + b"e"
    assert num_calls(lambda: found.extend(decode(body, allow=[Node])), "walk") < 3000
    assert len(found) == 300 + 301


SMALL = {
    "empty sets": b"\x8f",
    "empty dicts": b"}",
    "empty frozensets": b"(\x91",
    "marks": b"(N1",
    "dicts of one": b"}C\x00Ns",
    "sets of five": b"\x8f(C\x00\x8c\x00C\x01aC\x01bC\x01c\x90",
    "OrderedDicts": b"h\x00)R",
    "empty bytearrays": b"\x96" + bytes(8),
    "dates": b"h\x01h\x02\x85R",
}


@pytest.mark.parametrize("name", SMALL)
def test_small_objects_take_bounded_memory(name: str) -> None:
    """At most 400 bytes of memory for each byte, as FORMAT.md 2.6 says; sets take 330."""
    memo = fetch("collections", "OrderedDict") + b"\x94" + b")R0"
    memo += fetch("datetime", "date") + b"\x94" + b"C\x04\x07\xe8\x01\x01\x94\x85R0"
    body = memo + b"(" + SMALL[name] * (10_000 // len(SMALL[name])) + b"t"
    with little_memory(400 * len(body)):
        found = decode(body)
    assert len(found) == 10_000 // len(SMALL[name]) * (name != "marks")
    assert "400 bytes" in " ".join(FORMAT.read_text().split())


def test_names_of_thousands_of_parts(tmp_path: Path) -> None:
    """A pattern that tries each number of `./` at the beginning takes 4 seconds a name, and half an hour for the shard."""
    path, name = tmp_path / "a.tar", b"./" * 8190 + b"x"
    path.write_bytes((pax(name + b"\0", kind=b"L") + raw_header(b"x", b"0", b"0")) * 400 + bytes(1024))
    assert len(tc.write_index(path).keys) == len(list(tc.tarfile_to_samples()([{"url": str(path)}]))) == 0


# --- shards that make a tool repeat its work: only counters inside the package show that, in reasonable time ---


@pytest.mark.parametrize("blocks", range(2, 10))
def test_extended_headers_that_are_read_for_each_member(blocks: int) -> None:
    """Some blocks before a member is a header, too, of records that are a megabyte long."""
    size = (1 << 20) - BLOCK
    large = raw_header(b"pax", b"x", b"%011o" % size)
    front = large + bytes((blocks - 2) * BLOCK)
    content = front + raw_header(b"a.json", b"0", b"0") + record(b"comment", b"x" * 2000) + bytes(1 << 20)
    reads: list[int] = []

    def read(begin: int, end: int) -> bytes:
        reads.append(end - begin)
        return content[begin:end]

    assert [name for name, *_ in names_of(read, len(front) + BLOCK, len(content))] == [b"a.json"]
    assert max(reads) == BLOCK


def test_an_index_is_not_read_twice_for_each_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is damaged, the headers that an index lists are looked at a few times."""
    path = write(tmp_path, 100, dali_index=False, manifest=False)
    for name, (begin, _) in members(path).items():
        if name.endswith(("jpg", "json")):
            flip(path, begin - 300)
    count, read = 0, ShardFile.read

    def counted(self: ShardFile, begin: int, end: int) -> bytes:
        nonlocal count
        count += 1
        return read(self, begin, end)

    monkeypatch.setattr(ShardFile, "read", counted)
    assert tc.verify(path, num_threads=1).num_samples == 100
    assert count <= 10 * 400
