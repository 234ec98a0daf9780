"""Walks over nested containers that no input can make slow or deep (FORMAT.md 2.6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from wds_tensorcache.errors import FormatError

__all__ = ["ATOMS", "MAX_DEPTH", "check_depth", "shown", "walk"]

MAX_DEPTH = 200
ATOMS = frozenset({str, int, bool, float, bytes, type(None), complex})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, _CONTAINERS):
        return value
    # looked for in the class: a lazy tensor is asked for no attribute that it does not have
    return value.__dict__.values() if type(value).__dictoffset__ else ()


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
        children = [child for child in _children(value) if child.__class__ not in ATOMS]
        todo.extend((child, depth + 1) for child in reversed(children))


def check_depth(value: Any) -> None:
    """Raise FormatError if containers nest more than `MAX_DEPTH` deep, each counted where it is first met."""
    for part, depth in walk(value):
        if depth > MAX_DEPTH and isinstance(part, _CONTAINERS):
            raise FormatError(f"containers nest more than {MAX_DEPTH} deep")
