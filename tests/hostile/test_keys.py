"""Keys that take more than their bytes to hash, to place or to compare: rows of FORMAT.md's table of attacks."""

from __future__ import annotations

import itertools
import pickle
import struct
import subprocess
import sys
import uuid
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.hostile.colliding import CONTAINERS, KEYS, container, integer
from tests.hostile.pickles import PROTO, call, decode, refused, text
from tests.hostile.tables import HASHED_IN_PYTHON, MODULUS, count_calls, ints_on_one_orbit, work_of, work_of_keys
from tests.shards.tars import build
from wds_tensorcache.codec import layout as layouts
from wds_tensorcache.codec.layout import form_of, make_layout
from wds_tensorcache.codec.skeleton import limits
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder

COLLIDING = [
    "int", "negative int", "Fraction", "Decimal", "UUID", "tuple", "tuple of tuples", "tuple of -1 and -2", "frozenset",
    "range", "Size", "complex",
]  # fmt: skip
MANY = "too many hashes or hash-table slots"
N = 3000


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("key", COLLIDING)
def test_keys_of_one_hash(kind: str, key: str) -> None:
    found, calls = count_calls(lambda: decode(container(kind, [KEYS[key](number) for number in range(N)])))
    assert isinstance(found, tc.FormatError)
    assert MANY in str(found)
    assert calls < 3 * N


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("key", ["Fraction", "tuple of -1 and -2"])
@pytest.mark.parametrize(("num_keys", "copies"), [(12, 500), (64, 100), (400, 20)])
def test_few_keys_of_one_hash_in_many_containers(kind: str, key: str, num_keys: int, copies: int) -> None:
    body = container(kind, [KEYS[key](number) for number in range(num_keys)], copies)
    found, calls = count_calls(lambda: decode(body))
    assert calls <= 16 * num_keys * copies
    if num_keys >= 64 or key == "Fraction":
        assert isinstance(found, tc.FormatError)
        assert MANY in str(found)


@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset], ids=lambda make: make.__qualname__)
def test_the_writer_refuses_them_too(make: Any) -> None:
    for keys in ([Fraction(5 + k * MODULUS) for k in range(1000)], [(5 + k * MODULUS,) for k in range(1000)]):
        with pytest.raises(tc.EncodeError, match=f"value at 'a.0': .*{MANY}; use other keys, or a list"):
            tc.encode_sample({"a": [make(keys)]})


def test_ints_of_different_hashes_that_come_to_the_same_slots() -> None:
    keys = ints_on_one_orbit(12, 1300, 600)
    looks, equals = work_of_keys(keys, is_set=False)
    assert looks > 200 * len(keys), "the attack does not work"
    assert not equals
    for kind in ("dict", "dict, one at a time", "dict, in batches"):
        refused(container(kind, [integer(key) for key in keys]), MANY)
    with pytest.raises(tc.EncodeError, match=MANY):
        tc.encode_sample(dict.fromkeys(keys))


def test_a_shard_without_an_index(tmp_path: Path) -> None:
    body = container("dict", [KEYS["Fraction"](number) for number in range(N)])
    tensors = tc.encode_sample(0)[1]
    archive = build([("k.skel.pyd", PROTO + body + b"."), ("k.safetensors", tensors)])
    shard = tmp_path / "a.tar"
    shard.write_bytes(archive)
    _, calls = count_calls(lambda: tc.open(shard).close())
    assert calls < 3 * N
    report, calls = count_calls(lambda: tc.verify(shard, num_threads=1))
    assert not report.ok
    assert calls < 8 * N


def test_shapes_of_one_hash() -> None:
    """Tables of layouts, of a scan and of an index, by their shapes: hashes of tuples of numbers can be chosen."""
    builder = IndexBuilder()
    form = form_of((("x", "U8", 3),))
    for number in range(50):
        builder.add(str(number), [CacheEntry("", 0, 1, 512, make_layout(form, (0, 1, number), 64), 1, None)], [])
    for table in (builder._numbers_by_content, layouts._MADE):
        assert table
        assert not any(
            type(part) is tuple and all(type(dim) is int for dim in part) for place in table for part in place[:3]
        )
    assert len(builder.finish(1024).layouts) == 50


HONEST: dict[str, Any] = {
    "consecutive": range(100_000),
    "every 1,000th": range(0, 20_000_000, 1000),
    "every 2^20th": [k << 20 for k in range(30_000)],
    "every 2^40th": [k << 40 for k in range(20_000)],
    "every 2^60th": [k << 60 for k in range(10_000)],
    "halves": [k / 2 for k in range(20_000)],
    "1,024ths": [k / 1024 for k in range(20_000)],
    "powers of two": [2.0**k for k in range(-1074, 1024)],
    "hundredths": [k / 100 for k in range(20_000)],
    "timestamps": [1.7e9 + k / 25 for k in range(30_000)],
    "every float16": np.arange(31744, dtype=np.uint16).view(np.float16).tolist(),
    "negative": range(-20_000, 20_000),
    "UUIDs": [uuid.UUID(int=k * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128) for k in range(20_000)],
    "rows and columns": list(itertools.product(range(200), range(200))),
    "offsets": list(itertools.product(range(-5, 6), repeat=4)),
    "prices": [Decimal(k) / 100 for k in range(20_000)],
    "dates": [date(1950, 1, 1) + timedelta(k) for k in range(20_000)],
    "durations": [timedelta(seconds=k) for k in range(20_000)],
    "fractions": [Fraction(a, b) for a in range(1, 100) for b in range(1, 100)],
    "complex": [complex(a, b) for a in range(-50, 50) for b in range(-50, 50)],
    "combinations": [frozenset(c) for c in itertools.combinations(range(40), 3)],
    "texts": [f"key {k}" for k in range(20_000)],
    "numpy ints": [np.int64(k) for k in range(5_000)],
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a third of the work is allowed: none is near the limit."""
    for limit in ("MAX_WORK", "MAX_SET_WORK"):
        monkeypatch.setattr(limits, limit, getattr(limits, limit) * (2 if name == "powers of two" else 1) // 3)
    keys = list(dict.fromkeys(HONEST[name]))
    as_dict = dict.fromkeys(keys)
    assert list(tc.decode_sample(*tc.encode_sample(as_dict))) == keys
    assert tc.decode_sample(*tc.encode_sample(set(keys))) == set(keys)
    if name in ("every 2^20th", "hundredths", "rows and columns", "dates", "texts"):
        assert list(decode(pickle.dumps(as_dict, 4)[2:-1])) == keys  # stock pickle's batches


@pytest.mark.parametrize("is_set", [False, True])
def test_the_work_is_what_cpython_does(is_set: bool) -> None:
    """All at a time, one at a time, in batches; and as counted without the package, in a table of the final size."""
    random = np.random.default_rng(0)
    for keys in (
        random.integers(-(1 << 60), 1 << 60, 5000).tolist(),
        [k << 30 for k in range(3000)],
        (random.integers(0, 40, 3000) << random.integers(0, 55, 3000)).tolist(),
        ints_on_one_orbit(9, 150, 40),
    ):
        tables = []
        for step in (len(keys), 1, 37, 800):
            table = limits._Table(is_set)
            compared = sum(table.add(keys[at : at + step], keys[at : at + step]) for at in range(0, len(keys), step))
            tables.append((table.work, table._slots, compared))
        assert all(table == tables[0] for table in tables)
    distinct = list(dict.fromkeys(random.integers(-(1 << 60), 1 << 60, 600).tolist()))
    table = limits._Table(False)
    table.add(distinct, distinct)
    assert table.work == work_of_keys(distinct, False)[0]


def test_hashing_is_counted() -> None:
    long = integer((1 << 400_000) - 1)
    for body in (
        long + b"\x940](" + b"}h\x00Ns" * 20_000 + b"e",
        long + b"\x85\x940](" + b"}h\x00Ns" * 20_000 + b"e",
        b"(" + b"N" * 999 + b"t\x940](" + b"}h\x00Ns" * 20_000 + b"e",
        call("builtins", "range", integer(1 << 4000) * 3 + b"\x87") + b"\x940](" + b"}h\x00Ns" * 20_000 + b"e",
    ):  # fmt: skip
        refused(body, "too long|too long to hash")


def test_a_key_has_at_most_1000_parts() -> None:
    """As FORMAT.md 2.6 says; 20,000 were read, while the writer refused 1,001."""
    assert len(next(iter(decode(b"}(" + b"(" + b"N" * 999 + b"tNu")))) == 999
    padding = b"B" + struct.pack("<I", 100_000) + bytes(100_000)
    for parts in (1000, 20_000):
        refused(b"]" + padding + b"a0}(" + b"(" + b"N" * parts + b"tNu", "too long")
        with pytest.raises(tc.EncodeError, match="too long"):
            tc.encode_sample({(None,) * parts: bytes(100_000)})
    key = (None,) * 999
    assert tc.decode_sample(*tc.encode_sample({key: 1})) == {key: 1}


SCRIPT = """
import sys; sys.path[:0] = {path!r}
from tests.hostile.tables import work_of
import wds_tensorcache as tc, wds_tensorcache.codec.skeleton.limits as limits
keys, number, taken = [], 0, set()
while len(keys) < 1500:  # all in the first 16th of the table
    number += 1
    if hash(str(number)) % 4096 < 256:
        keys.append(str(number))
print(tc.decode_sample(*tc.encode_sample(dict.fromkeys(keys))) == dict.fromkeys(keys), end=" ")
limits.MAX_WORK = 3
try:
    tc.encode_sample(dict.fromkeys(keys))
except tc.EncodeError as exc:
    print("hash-table slots" in str(exc))
"""


def test_texts_are_counted_where_their_hashes_are_known() -> None:
    """With PYTHONHASHSEED=0, the author of a file knows them."""
    script = SCRIPT.format(path=sys.path)
    environment = {"PYTHONHASHSEED": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_counter_counts() -> None:
    """The judge of the reader sees the attack where nothing stops it."""
    keys = [Fraction(5 + k * MODULUS) for k in range(200)]
    built, calls = count_calls(lambda: dict.fromkeys(keys))
    assert calls == 200 + 199 * 200 // 2
    assert work_of([built]) == (200 * 201 // 2, 16 * 199 * 200 // 2)
    assert text("a") == b"\x8c\x01a"


@pytest.mark.parametrize("key", KEYS)
def test_the_counter_knows_every_type(key: str) -> None:
    """No type of keys has a `__hash__` or `__eq__` in Python that is not counted."""
    kind = type(decode(KEYS[key](3)))
    in_python = [name for name in ("__hash__", "__eq__") if isinstance(getattr(kind, name), FunctionType)]
    assert not in_python or issubclass(kind, HASHED_IN_PYTHON)


def test_a_set_is_refused_with_less_work_than_a_dict() -> None:
    """Each look of a set is at ten slots, and no honest one takes a third of the work."""
    keys = [1_000_003 * group + k * MODULUS for group in range(20) for k in range(90)]
    table = limits._Table(True)
    with pytest.raises(tc.FormatError, match=MANY):
        table.add(keys, list(map(hash, keys)))
    assert 48 * len(keys) < table.work < 64 * len(keys)
    for kind in ("set", "frozenset"):
        refused(container(kind, [integer(key) for key in keys]), MANY)


def test_old_keys_are_placed_within_their_own_limit() -> None:
    """FORMAT.md 2.6, placing: new keys do not add to the limit while the keys that came before them are placed."""
    colliding = [(*bits, *(0,) * 200) for bits in itertools.product((-1, -2), repeat=3)][:5]
    assert len(set(map(hash, colliding))) == 1
    limits.KeyCosts(10**6).add({}, [*colliding, *range(100)], False)
    costs = limits.KeyCosts(10**6)
    costs.add({}, colliding, False)
    with pytest.raises(tc.FormatError, match="5 keys of a dict share"):
        costs.add(dict.fromkeys(colliding), range(100), False)
