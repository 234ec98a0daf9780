"""The structure of a sample as a tree of bounded size: containers, small values and tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import CONTAINERS
from wds_tensorcache.reading.description import shown_value

_MAX_ITEMS = 100  # of one container
_MAX_NODES = 2000
_MAX_DEPTH = 40
_VALUE_CHARS = 200
_FEW = 8  # items of a list of plain values that is shown as one value
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a sample. Names and texts may contain any character: escape them before a terminal or a browser gets them.

    Attributes:
        name: Key or index in the container; `""` for the whole sample.
        kind: `"tensor"` for a torch tensor, `"ndarray"` for a numpy array, `"value"` for a small value; the type of a
            container, such as `"dict"`; or `"more"` for values that are not shown.
        text: A tensor's dtype and shape, such as `bf16[77, 2048]`; the type and length of a container; a value in at most about
            300 characters.
        tensor: Name of the tensor in `cache.select` and in statistics; None for other values.
        children: Items of a container.
    """

    name: str
    kind: str
    text: str
    tensor: str | None = None
    children: tuple[Node, ...] = ()


def sample_tree(sample: Any) -> Node:
    """Return the structure of a sample from `cache[key]`; no tensor is read.

    The tree has at most 2,000 values, 100 items of each container, and 40 levels. A container that occurs again has no
    children.
    """
    return _Builder().visit("", sample, 0)


class _Builder:
    def __init__(self) -> None:
        self._num_nodes = 0
        self._met: dict[int, str] = {}

    def visit(self, name: str, value: Any, depth: int) -> Node:
        self._num_nodes += 1
        if isinstance(value, Lazy):
            return Node(name, value._reference.kind, tensor_text(value), value.name)
        if not isinstance(value, CONTAINERS) or _is_small(value):
            return Node(name, "value", _value_text(value))
        kind = type(value).__name__
        text = f"{kind} of {len(value):,}"
        if id(value) in self._met:
            return Node(name, kind, f"{text}: the same as {self._met[id(value)]}")
        self._met[id(value)] = repr(name) if name else "the whole sample"
        if depth == _MAX_DEPTH:
            return Node(name, kind, f"{text}: …")
        return Node(name, kind, text, None, tuple(self._children(value, depth)))

    def _children(self, value: Any, depth: int) -> Iterator[Node]:
        count = 0
        for name, item in islice(_items(value), _MAX_ITEMS):
            if self._num_nodes >= _MAX_NODES:
                break
            count += 1
            yield self.visit(name, item, depth + 1)
        if count < len(value):
            yield Node("", "more", f"… and {len(value) - count:,} more")


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((key[:_VALUE_CHARS] if isinstance(key, str) else shown_value(key), item) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(map(str, value._fields), value, strict=False)
    if isinstance(value, (list, tuple, deque)):
        return ((str(at), item) for at, item in enumerate(value))
    return (("", item) for item in value)


def _is_small(value: Any) -> bool:
    """Return whether a container is empty, or one line shows it: a few plain values without names."""
    return not value or (
        not isinstance(value, dict) and len(value) <= _FEW and all(type(item) in _PLAIN for item in value)
    )


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:_VALUE_CHARS]) + (f"… ({len(value):,} characters)" if len(value) > _VALUE_CHARS else "")
    if isinstance(value, CONTAINERS) and len(value) > 4:  # `shown_value` shows four items
        inner = ", ".join(map(shown_value, value))
        begin, end = {list: ("[", "]"), tuple: ("(", ")")}.get(type(value), (f"{type(value).__name__}([", "])"))
        return f"{begin}{inner}{end}"
    return shown_value(value)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_dtype(dtype: Any) -> str:
    """Return a short name of a dtype of torch or numpy: `bf16`, `f32`, `i64`, `bool`, `f8_e4m3fn`; text of numpy is `<U5`."""
    if isinstance(dtype, np.dtype) and dtype.kind in "SUMm":
        return str(dtype.str)
    name = dtype_name(dtype)
    stem = name.rstrip("0123456789") if "_" not in name else "float" if name.startswith("float") else name
    return name.replace(stem, _SHORT[stem], 1) if stem in _SHORT else name


def tensor_text(lazy: Lazy) -> str:
    """Return a tensor's dtype and shape, such as `bf16[77, 2048]`."""
    return f"{short_dtype(lazy.dtype)}[{', '.join(map(str, lazy.shape))}]"
