"""Rows of FORMAT.md's table of attacks, each in a shard: no reader takes it, and each says where it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import READERS, by_samples, by_stream, header, put
from tests.hostile.pickles import PROTO, fetch, little_memory, reference
from tests.shards.tars import build, build_with_tarfile, halves, pax, raw_header, record

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
    "a callable": (PROTO + fetch("os", "system") + b")R.", header({}, b"")),
    "no skeleton": (b"", header({"x": X})),
}


def refused(path: Path, reader: str) -> tc.TensorCacheError:
    with little_memory(20 * path.stat().st_size + 4_000_000), pytest.raises(tc.TensorCacheError) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    return caught.value


ONE, TWO = (tc.encode_sample(torch.full((3,), i)) for i in range(2))
# What all that open a shard refuse; `test_headers` has other headers.
OPENED: dict[str, tuple[dict[str, bytes], str]] = {
    "a header": ({"a.skel.pyd": SKELETON, "a.safetensors": header({"x": X}, length=1 << 63)}, "'a'"),
    "halves of two samples": ({"a.skel.pyd": ONE[0], "a.safetensors": TWO[1]}, "do not belong together"),
    "a skeleton alone": ({"a.skel.pyd": ONE[0]}, "is missing, but"),
    "tensors alone": ({"a.safetensors": ONE[1]}, "is missing, but"),
    "tensors of a named cache alone": ({"a.name.safetensors": ONE[1]}, "is missing, but"),
}


@pytest.mark.parametrize("case", OPENED)
def test_samples_that_are_refused_when_a_shard_is_opened(tmp_path: Path, case: str) -> None:
    members, message = OPENED[case]
    path = put(tmp_path / "x.tar", members)
    for reader in READERS:
        assert message in str(refused(path, reader))


@pytest.mark.parametrize("what", DECODED)
def test_skeletons_and_tensors(tmp_path: Path, what: str) -> None:
    skeleton, tensors = DECODED[what]
    path = put(tmp_path / "x.tar", {"a.skel.pyd": skeleton, "a.safetensors": tensors})
    for reader in ("samples", "batch", "stream"):
        if what == "no skeleton":
            assert "'a'" in str(refused(path, reader))
        else:
            with pytest.raises(
                tc.FormatError, match="other than 0 and 1|Unicode|not stored as I64|system.*not allowed"
            ):
                READERS[reader](path)


@pytest.mark.parametrize("again", ["a.skel.pyd", "a.SKEL.PYD", "a.safetensors", "a.txt"])
def test_a_member_twice(tmp_path: Path, again: str) -> None:
    (tmp_path / "x.tar").write_bytes(build([*halves("a", torch.ones(3)), ("a.txt", b"1"), (again, b"2")]))
    for reader in READERS:
        refused(tmp_path / "x.tar", reader)


def test_a_key_twice_apart(tmp_path: Path) -> None:
    """A stream has forgotten the first one: it gives two samples, each whole; an index refuses."""
    path = tmp_path / "x.tar"
    path.write_bytes(build([half for i, key in enumerate("aba", 1) for half in halves(key, torch.tensor([i]))]))
    for reader in set(READERS) - {"stream"}:
        assert "key 'a' occurs twice" in str(refused(path, reader))
    assert [int(found["tensorcache"]) for found in by_stream(path)] == [1, 2, 3]


# --- tars with what no writer of caches puts there: odd names and sizes, links, bombs of pax records

HALVES = halves("a", torch.arange(5))
TENSORS = HALVES[1][1]
GOOD, SKEL = (build(members)[:-1024] for members in (HALVES, HALVES[:1]))
END = bytes(1024)
SIZE = b"%011o" % len(TENSORS)
CONTENT = TENSORS + bytes(-len(TENSORS) % 512)


def tensors(size: bytes, *records: bytes, kind: bytes = b"0") -> bytes:
    """Return a shard whose tensors are in a member with this size field, after these pax records."""
    extended = pax(*records) if records else b""
    return SKEL + extended + raw_header(b"a.safetensors", kind, size) + CONTENT + END


REFUSED: dict[str, bytes] = {
    "underscore in the second size": raw_header(b"b.txt", b"0", b"0")
    + raw_header(b"c.txt", b"0", b"000_0000000")
    + GOOD
    + END,
    "size beyond the file": tensors(b"77777777777"),
    "pax size of a million digits": tensors(SIZE, record(b"size", b"9" * 1_000_000)),
    # for webdataset's own pattern, half an hour
    "pax path of a megabyte": tensors(SIZE, record(b"path", b"a/" * 500_000)),
    "extended header of 2 GiB": SKEL + raw_header(b"pax", b"x", b"20000000000") + CONTENT + END,
    "a path of a megabyte for all": pax(record(b"path", b"p" * 1_000_000), kind=b"g")
    + raw_header(b"b", b"0", b"0") * 20_000
    + END,
    "a key of 50,000 bytes": pax(record(b"path", b"k" * 50000 + b".txt")) + raw_header(b"b", b"0", b"0") + GOOD + END,
    "no end": GOOD,
    "the tensors are a link": tensors(SIZE, kind=b"2"),
    "the tensors are a hard link": SKEL + raw_header(b"a.safetensors", b"1", b"0") + END,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str, reader: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(REFUSED[what])
    peak = 10 * len(REFUSED[what]) + 80_000_000 * (reader == "stream") + 4_000_000
    with little_memory(peak), pytest.raises(tc.FormatError, match=r"x\.tar: "):
        READERS[reader](path)


def assert_right(path: Path) -> None:
    for found in (by_samples(path), [one["tensorcache"] for one in by_stream(path)]):
        assert [one.tolist() for one in found] == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("key", ["/etc/a", "../../a", "x/../a", "./a", "//a", "C:\\a", "a b", "a\nb", "é", "__a"])
def test_names_are_names_alone(tmp_path: Path, key: str) -> None:
    """Nothing is extracted: the key is what the tar has, but for a leading `./`, and no file but the shard is opened."""
    path = tmp_path / "x.tar"
    path.write_bytes(build_with_tarfile(halves(key, torch.arange(5))))
    assert_right(path)
    assert list(tc.open(path).keys()) == [key.removeprefix("./")]
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


def test_many_extended_headers(tmp_path: Path) -> None:
    """Each is read once, also if an index says that the member follows all of them."""
    bomb = pax(*[record(b"comment", b"c" * 90)] * 9_000)
    path = tmp_path / "x.tar"
    path.write_bytes(SKEL + bomb * 20 + raw_header(b"a.safetensors", b"0", SIZE) + CONTENT + END)
    started = time.process_time()
    assert_right(path)
    assert time.process_time() - started < 20
