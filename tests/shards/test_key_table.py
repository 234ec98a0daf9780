"""A key is found where it is, in shards of any keys in any order, in little memory."""

from __future__ import annotations

import random
import tracemalloc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wds_tensorcache.shards.index import MemberColumns, narrow
from wds_tensorcache.shards.key_table import Keys, KeyTable, match_unique_keys

Rows = "np.ndarray[Any, Any] | None"


def keys_of(raws: Sequence[bytes], kind: type[Keys] = Keys) -> Keys:
    ends = np.cumsum([0, *map(len, raws)])[1:]
    return kind(np.frombuffer(b"".join(raws), np.uint8), narrow(ends))


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


# words of eight bytes that are equal, that end in zeros, that have no end; and keys that are longer than words are compared
pieces = st.sampled_from([b"a", b"b", b"\0", b"\xff", b"0", b"9", "é".encode(), b"same/fo/", b"\0" * 8, b"x" * 130])
raws = st.lists(pieces, min_size=1, max_size=4).map(b"".join)
numbered = st.integers(0, 300).flatmap(
    lambda first: st.sampled_from(["%d", "%06d", "k%d", "a/long/folder/%08d", "%d/é"]).map(
        lambda form: [(form % i).encode() for i in range(first, first + 20)]
    )
)
orders: list[Callable[[list[bytes]], list[bytes]]] = [
    list,
    sorted,
    lambda keys: sorted(keys, key=lambda key: (len(key), key)),
    lambda keys: sorted(set(keys)),
    lambda keys: sorted(set(keys), key=lambda key: (len(key), key)),
    lambda keys: sorted(keys, reverse=True),
]
shards = st.lists(st.tuples(st.lists(raws, max_size=6) | numbered, st.sampled_from(orders)), max_size=5).map(
    lambda each: [order(keys) for keys, order in each]
)


@given(shards, st.randoms(use_true_random=False), st.booleans())
@example(
    [[b"a", b"z", b"c"], [b"z"]], random.Random(0), False
)  # the first and the last key of a shard say nothing of the other keys
@example([[b"b", b"c"], [], [b"a"]], random.Random(0), False)
@example([[b"a"], [b"a"]], random.Random(0), False)
@example([[b"a", b"a"]], random.Random(0), False)
@example([[b"9", b"10"], [b"11", b"12"]], random.Random(0), False)
@example([[b"9"], [b"10"], [b"8"]], random.Random(0), False)
@example([[b"a", b"a\0"], [b"a\0\0"]], random.Random(0), False)
def test_as_a_dictionary_finds_them(found: list[list[bytes]], rng: random.Random, has_rows: bool) -> None:
    parts: list[tuple[Keys, Any]] = []
    model: dict[bytes, list[int]] = {}
    count = 0
    for keys in found:
        rows = [row for row in range(len(keys)) if not has_rows or rng.random() < 0.7]
        parts.append((keys_of(keys), np.array(rows, np.uint16) if has_rows else None))
        for row in rows:
            model.setdefault(keys[row], []).append(count)
            count += 1
    table = KeyTable(parts)
    for key in {*model, *chain(*found), b"a", b"zz", b"\0", b"a/long/folder/00000007", b"7"}:
        for wanted in (key, key + b"\0", key[:-1]):
            assert table.find(text(wanted)) == model.get(wanted, []), wanted
    assert table.shared() == sorted(text(key) for key, places in model.items() if len(places) > 1)


@given(st.lists(raws, max_size=8), st.sampled_from(orders))
@example([b"a" * 200, b"a" * 199 + b"b"], list)
@example([b"a" * 200, b"a" * 200], list)
def test_ascending_is_that_of_single_keys(found: list[bytes], order: Callable[[list[bytes]], Any]) -> None:
    keys = keys_of(order(found))
    each = [keys.raw(row) for row in range(len(keys))]
    ranked = [(len(raw), raw) for raw in each]
    by_bytes, by_length = (all(a < b for a, b in pairwise(some)) for some in (each, ranked))
    assert (keys.is_ascending(False), keys.is_ascending(True)) == (by_bytes, by_length)
    assert keys.raws() == each
    assert list(keys) == list(map(text, each))


@given(st.lists(raws, max_size=30, unique=True), st.randoms(use_true_random=False), st.integers(0, 3))
def test_matched_keys(found: list[bytes], rng: random.Random, change: int) -> None:
    others = rng.sample(found, len(found))
    if change == 1 and others:
        others[-1] += b"?"
    if change == 2 and others:
        others[-1] = others[0]
    if change == 3:
        others.append(b"?")
    cut, other_cut = len(found) // 3, len(others) // 2
    parts = [(keys_of(found[:cut]), None), (keys_of(found[cut:]), None)]
    places = match_unique_keys(parts, [(keys_of(others[:other_cut]), None), (keys_of(others[other_cut:]), None)])
    if sorted(found) == sorted(others):
        assert places is not None
        assert [others[place] for place in places.tolist()] == found
    else:
        assert places is None


@given(st.sets(st.integers(0, 300)), st.lists(st.integers(0, 70_000), max_size=9))
@example({0}, [256, 65_536])
def test_members_of_rows(having: set[int], asked: list[int]) -> None:
    rows = sorted(having)
    columns = MemberColumns(narrow(rows), narrow(rows), narrow(rows))
    asked = [*asked, *rows[:3]]
    expected = [rows.index(row) if row in having else -1 for row in asked]
    assert columns.find(np.array(asked, np.int64)).tolist() == expected


# --- what it costs ---


def peak(make: Callable[[], Any]) -> int:
    """Return the bytes of memory that a call takes at its peak."""
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Counting(Keys):
    """Keys that count how many of them were looked at one by one."""

    num_read = 0

    def raw(self, row: int) -> bytes:
        Counting.num_read += 1
        return super().raw(row)


@pytest.mark.parametrize("form", ["%08d", "k%d", "a/folder/with/a/name/%09d"])
def test_keys_that_ascend_take_no_memory_and_few_reads(form: str) -> None:
    names = [[(form % i).encode() for i in range(at, at + 2000)] for at in range(0, 100_000, 2000)]
    parts: list[tuple[Keys, Any]] = [(keys_of(names_of_shard, Counting), None) for names_of_shard in reversed(names)]
    for keys, _ in parts:
        keys.is_ascending(False)  # once for each shard, in memory that is free again
    assert peak(lambda: KeyTable(parts).find(form % 77_777)) < 64 << 10
    table = KeyTable(parts)
    Counting.num_read = 0
    assert table.find(form % 77_777) == [(100_000 - 78_000) + 1777]
    assert table.find(form % 100_000) == []
    assert Counting.num_read < 50


def test_other_keys_take_few_bytes_each() -> None:
    names = [b"%08d" % (i * 7919 % 100_003) for i in range(100_003)]
    parts: list[tuple[Keys, Any]] = [(keys_of(names[at : at + 2000]), None) for at in range(0, len(names), 2000)]
    tables: list[KeyTable] = []
    assert peak(lambda: tables.append(KeyTable(parts))) < 12 * len(names)
    assert tables[0].find("00007919") == [1]


@given(st.sets(raws, max_size=40), st.integers(1, 5), raws, st.sampled_from([None, len]))
def test_neighbors(keys: set[bytes], num_shards: int, wanted: bytes, by: Callable[[bytes], int] | None) -> None:
    """Next to a key are those that come right before and after it in its shard."""

    def order(key: bytes) -> tuple[int, bytes]:
        return (by(key) if by else 0, key)

    ordered = sorted(keys, key=order)
    cuts = [len(ordered) * number // num_shards for number in range(num_shards + 1)]
    table = KeyTable([(keys_of(ordered[begin:end]), None) for begin, end in pairwise(cuts)])
    found = table.neighbors(text(wanted), 4)
    assert len(found) <= 4
    assert found == list(range(found[0], found[-1] + 1)) if found else not keys
    if num_shards == 1 and by is None and wanted not in keys:
        place = bisect_left(ordered, wanted)
        assert found == list(range(len(ordered)))[max(0, place - 2) : place + 2]
    assert KeyTable([(keys_of([b"b", b"a"]), None)]).neighbors("a", 4) == []
