"""Nested structures with other tensors in them: with every lazy one loaded, say."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.lazy_array import LazyArray

__all__ = ["realize", "rebuild"]

_LEAVES = (LazyTensor, LazyArray, torch.Tensor, np.ndarray, bytearray)


def realize(obj: Any, device: torch.device | str | None = None) -> Any:
    """Return `obj` with every lazy tensor loaded; `obj` itself is not changed.

    Containers are rebuilt with their own types; one object referred to twice, and containers that hold themselves, stay
    so. Loaded tensors that are there already are kept, or moved if `device` is given; numpy arrays stay in memory.

    Objects of other classes are kept as they are, with what is lazy in them.

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
    """Return `obj` with every tensor and array, lazy or not, and bytearray replaced, each once; as of `realize`."""
    return _Rebuilder(replace).visit(obj)


class _Rebuilder:
    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: (the object, so that the id stays its own; what it became)

    def visit(self, value: Any) -> Any:
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        result = self._build(value)
        # a tuple that holds itself was finished while its items were visited
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
