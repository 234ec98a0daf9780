"""Walks over nested containers: depth, and copies with other tensors in them (FORMAT.md 2.6).

Both walks visit each object once, so shared and cyclic parts make them neither slow nor endless.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.errors import FormatError

__all__ = ["ATOMS", "MAX_DEPTH", "check_depth", "realize", "rebuild", "shown", "walk"]

MAX_DEPTH = 200
ATOMS = frozenset({str, int, bool, float, bytes, type(None), complex})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LEAVES = (LazyTensor, LazyArray, torch.Tensor, np.ndarray, bytearray)


def realize(obj: Any, device: torch.device | str | None = None) -> Any:
    """Return `obj` with every lazy tensor loaded; `obj` itself is not changed.

    Containers are rebuilt with their own types. Shared objects stay shared, and containers that contain themselves still
    do. Loaded tensors are kept, or moved if `device` is given; numpy arrays stay in memory.

    Objects of other classes are kept as they are, with the lazy tensors in them.

    Args:
        obj: A decoded sample, a lazy tensor, or any nesting of containers, namedtuples and dataclasses with some inside.
        device: Where the tensors go; the CPU by default.

    Raises:
        RuntimeError: `device` is not there.

    Memory: loaded tensors are fresh and the caller's own; everything that is not a container is shared with `obj`.
    """
    check_device(device)

    def load(leaf: Any) -> Any:
        if isinstance(leaf, LazyTensor):
            return leaf.load(device)
        if isinstance(leaf, LazyArray):
            return leaf.load()
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and device is not None else leaf

    return rebuild(obj, load)


def rebuild(obj: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `obj`, as `realize` does, with each tensor, array (lazy or not) and bytearray replaced once."""
    return _Rebuilder(replace).visit(obj)


class _Rebuilder:
    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: the object, which keeps its id, and its copy

    def visit(self, value: Any) -> Any:
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        result = self._build(value)
        # a tuple that contains itself was finished while its items were visited
        return self._done.setdefault(id(value), (value, result))[1]

    def _build(self, value: Any) -> Any:
        cls = type(value)
        result: Any
        if isinstance(value, _LEAVES):
            return self._replace(value)
        if cls is list or cls is deque:
            result = [] if cls is list else deque(maxlen=value.maxlen)
            self._done[id(value)] = (value, result)
            result.extend(self.visit(item) for item in value)
            return result
        if cls in (dict, OrderedDict, defaultdict):
            result = defaultdict(value.default_factory) if cls is defaultdict else cls()
            self._done[id(value)] = (value, result)
            for key, item in value.items():
                result[self.visit(key)] = self.visit(item)
            return result
        if cls is set:
            result = set()
            self._done[id(value)] = (value, result)
            result.update([self.visit(item) for item in value])
            return result
        if isinstance(value, (tuple, frozenset)):
            items = [self.visit(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return cls._make(items) if hasattr(cls, "_make") else cls(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._build_dataclass(value)
        return value

    def _build_dataclass(self, value: Any) -> Any:
        result = copy.copy(value)
        self._done[id(value)] = (value, result)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(result, field.name, self.visit(getattr(value, field.name)))
        return result


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, _CONTAINERS):
        return value
    # looked up in the class, so that no `__getattr__` of the value runs
    return value.__dict__.values() if type(value).__dictoffset__ else ()


def shown(value: Any) -> str:
    """Return how an error shows a value of a file. Hazard: the repr of a container may take for ever."""
    return f"{value!r:.80}" if value.__class__ in ATOMS else f"a {type(value).__name__}"


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield each object that containers hold, once, and its depth, in document order."""
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
