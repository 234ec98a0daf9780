"""The map of a GNU sparse member, filled."""

from __future__ import annotations

import tracemalloc

import pytest

from wds_tensorcache.shards.tar.expansion import MAX_EXPANDED_NBYTES
from wds_tensorcache.shards.tar.sparse import SparseMap


@pytest.mark.parametrize(
    ("parts", "nbytes", "expected"),
    [
        ([], 0, b""),
        ([], 3, b"\0\0\0"),
        ([(0, 2), (4, 2)], 6, b"ab\0\0cd"),
        ([(1, 4)], 7, b"\0abcd\0\0"),
        ([(2, 0)], 2, b"\0\0"),
    ],
)
def test_fill(parts: list[tuple[int, int]], nbytes: int, expected: bytes) -> None:
    assert SparseMap(parts, nbytes).expand(b"abcd") == expected


def test_holes_are_made_once() -> None:
    """A block of a tar may ask for as much as a member may become: no copy of it is made."""
    tracemalloc.start()
    content = SparseMap([(5, 3)], MAX_EXPANDED_NBYTES).expand(b"abc")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(content) == MAX_EXPANDED_NBYTES
    assert peak < 1.2 * MAX_EXPANDED_NBYTES
