"""Ranks of one build whose arguments differ: the rank that ends last says so, and honest ranks are never refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import finish, start
from tests.writing.test_build_by_position import COUNT, SOURCES, Indexed, build, encode, values

ITEMS = list(range(COUNT))


def build_rank(out: Path, rank: int, source: Any = ITEMS, fn: Any = encode, **options: Any) -> Any:
    return build(source, out, fn, **{"rank": rank, "world_size": 2, "batch_size": 4} | options)


def keyed(item: int) -> str:
    return f"n{item}"


@pytest.mark.parametrize("keys", [None, "position", keyed], ids=["numbers", "position", "function"])
@pytest.mark.parametrize("kind", SOURCES)
def test_other_batch_sizes(tmp_path: Path, kind: str, keys: Any) -> None:
    """Neither rank computes some of the items; one process then computes them."""
    source = SOURCES[kind](ITEMS)
    build_rank(tmp_path, 0, source, keys=keys).close()
    for _ in range(2):  # also if the rank is called again
        with pytest.raises(ValueError, match=r"r0of2-000000\.tar .*'(000000|n)\d+'.*batch_size.*world_size=1"):
            build_rank(tmp_path, 1, source, keys=keys, batch_size=6)
    with tc.open(tmp_path) as cache:
        assert len(cache) == 38
    assert values(build_rank(tmp_path, 0, source, keys=keys, world_size=1)) is not None
    with tc.open(tmp_path) as cache:
        assert sorted(values(cache)) == ITEMS
    for rank in range(2):  # nothing is missing any more
        build_rank(tmp_path, rank, source, keys=keys).close()


@pytest.mark.parametrize("batch_sizes", [(4, 6), (6, 4), (8, 2)], ids=str)
def test_another_batch_size_after_an_error(tmp_path: Path, batch_sizes: tuple[int, int]) -> None:
    """For example after the memory of a GPU was too small: both ranks continue with the other batch size."""

    def failing(items: list[Any]) -> Any:
        if ITEMS[24] < items[0]:
            raise MemoryError
        return encode(items)

    for rank in range(2):
        with pytest.raises(MemoryError):
            build_rank(tmp_path, rank, fn=failing, batch_size=batch_sizes[0])
    for rank in range(2):
        build_rank(tmp_path, rank, batch_size=batch_sizes[1]).close()
    with tc.open(tmp_path) as cache:
        assert values(cache) == ITEMS


@pytest.mark.parametrize("kind", ["list", "tuple", "dataset"])
def test_another_order(tmp_path: Path, kind: str) -> None:
    build_rank(tmp_path, 0, SOURCES[kind](ITEMS)).close()
    match = r"item \d+ is not the one .*r0of2-000000\.tar.*same items in the same order"
    with pytest.raises(tc.StaleCacheError, match=match):
        build_rank(tmp_path, 1, SOURCES[kind](ITEMS[::-1]))
    build_rank(tmp_path, 1, SOURCES[kind](ITEMS)).close()
    with tc.open(tmp_path) as cache:
        assert values(cache) == ITEMS


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        ({"source": ITEMS[::-1]}, tc.StaleCacheError, "r0of2-000000.*same items in the same order"),
        ({"batch_size": 6}, ValueError, "r0of2-000000.*batch_size"),
    ],
    ids=["order", "batch size"],
)
def test_at_the_same_time(tmp_path: Path, other: dict[str, Any], error: Any, match: str) -> None:
    """Rank 0 begins and ends while rank 1 computes."""
    done = []

    def meanwhile(items: list[Any]) -> Any:
        if not done:
            done.append(finish([start(lambda: build_rank(tmp_path, 0))]))
        return encode(items)

    with pytest.raises(error, match=match):
        build_rank(tmp_path, 1, fn=meanwhile, **other)
    assert done == [[0]]


def test_few_items_of_other_ranks_are_read(tmp_path: Path) -> None:
    items = list(range(1000))
    build_rank(tmp_path, 0, items).close()
    source = Indexed(items)
    cache = build_rank(tmp_path, 1, source)
    assert len(cache) == 1000
    num_own = len(tc.open(tmp_path / "r1of2-*.tar"))
    assert num_own + 2 <= len(set(source.read)) <= num_own + 64
    cache.close()


class Random(Indexed):
    """A source that returns other values each time it is read, as with random crops."""

    def __getitem__(self, i: int) -> Any:
        return torch.rand(2), super().__getitem__(i)


def test_random_values_show_nothing_of_other_ranks(tmp_path: Path) -> None:
    def fn(items: list[Any]) -> Any:
        return encode([item for _, item in items])

    for rank in range(2):
        build_rank(tmp_path, rank, Random(ITEMS), fn).close()
    with tc.open(tmp_path) as cache:
        assert sorted(values(cache)) == ITEMS
    with pytest.warns(UserWarning, match="nothing shows whether items"):
        build_rank(tmp_path, 0, Random(ITEMS), fn).close()
