"""Walks over nested containers that no input can make slow or deep (FORMAT.md 2.6)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from wds_tensorcache.errors import FormatError

__all__ = ["ATOMS", "MAX_DEPTH", "Collisions", "check_depth", "key_cost", "shown", "walk"]

MAX_DEPTH = 200
MAX_COLLISIONS = 1000
_HASH_MODULUS = sys.hash_info.modulus
ATOMS = frozenset({str, int, bool, float, bytes, type(None), complex})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (part for item in value.items() for part in item)
    if isinstance(value, _CONTAINERS):
        return value
    return getattr(value, "__dict__", {}).values()


def shown(value: Any) -> str:
    """Return how an error shows a value of a file: containers by type alone, as their repr may take for ever."""
    return f"{value!r:.80}" if value.__class__ in ATOMS else f"a {type(value).__name__}"


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every object reachable through containers and its depth, in document order, each where it is first met."""
    seen: set[int] = set()
    todo = [(value, 1)]
    while todo:
        value, depth = todo.pop()
        if value.__class__ in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value, depth
        todo.extend((child, depth + 1) for child in reversed(list(_children(value))))


def check_depth(value: Any) -> None:
    """Raise FormatError if containers nest more than `MAX_DEPTH` deep, each counted where it is first met."""
    for part, depth in walk(value):
        if depth > MAX_DEPTH and isinstance(part, _CONTAINERS):
            raise FormatError(f"containers nest more than {MAX_DEPTH} deep")


def key_cost(key: Any, budget: int) -> int:
    """Return how many objects `hash(key)` visits, shared ones each time, because hashing does not memoise.

    Raises:
        FormatError: More than `budget`, or nested so deep that hashing would overflow C's stack.
    """
    cost = 0
    todo = [(key, 1)]
    while todo:
        value, depth = todo.pop()
        cost += 1
        if cost > budget or depth > MAX_DEPTH:
            raise FormatError("a dict key or set element is too deep, or shares its parts too often")
        if isinstance(value, (tuple, frozenset)):
            todo.extend((child, depth + 1) for child in value)
    return cost


class Collisions:
    """Counts long ints that share a hash: a dict of n such keys takes n * n comparisons to build."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def check(self, key: int) -> None:
        """Raise FormatError if more than `MAX_COLLISIONS` different keys so far have the hash of this one."""
        if -_HASH_MODULUS < key < _HASH_MODULUS:
            return
        count = self._counts[hash(key)] = self._counts.get(hash(key), 0) + 1
        if count > MAX_COLLISIONS:
            raise FormatError(f"more than {MAX_COLLISIONS} int keys that have one hash")
