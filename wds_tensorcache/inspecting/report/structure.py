"""The structure of samples as one tree: containers, tensors, and small values with an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, Holding
from wds_tensorcache.inspecting.report.texts import visible, words

_MAX_NODES = 800  # nodes of the tree in all
_MAX_DEPTH = 24
_MAX_ITEMS = 8  # items of a list or tuple that are shown each
_EXAMPLE_CHARS = 160


class _Node:
    """One place of the samples, and what they have there."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.types: Counter[str] = Counter()
        self.children: dict[Any, _Node] = {}
        self.num_items = 0
        self.tensor: str | None = None
        self.example: Any = None


def structure_of(samples: Iterable[Any]) -> dict[str, Any]:
    """Return the structure of lazy samples for JSON, with at most 800 places.

    Returns:
        A tree of dicts: `name`, `types`, `num_samples` and, depending on the place, `tensor` (its name), `example` (text) or
        `children` (a list). `num_more` counts the children that are left out.
    """
    tree = _Tree()
    for sample in samples:
        tree.add(tree.root, sample, (), 0)
    return _as_json("", tree.root)


class _Tree:
    """A walk over samples that merges places with one path; `map_leaves` decides alike which lists are containers."""

    def __init__(self) -> None:
        self.root = _Node()
        self._num_nodes = 1

    def add(self, node: _Node, value: Any, above: tuple[int, ...], depth: int) -> None:
        node.num_samples += 1
        node.types[_type_name(value)] += 1
        if isinstance(value, Lazy):
            node.tensor = value.name
            return
        cls = type(value)
        if id(value) in above or depth > _MAX_DEPTH:
            return
        if cls in DICTS:
            items = list(islice(value.items(), _MAX_NODES))
        elif cls in SEQUENCES and Holding()(value):
            items = list(islice(enumerate(value), _MAX_ITEMS))
        else:
            if node.example is None or node.example == "":
                node.example = words(value, _EXAMPLE_CHARS)
            return
        node.num_items = max(node.num_items, len(value))
        for key, item in items:
            if key not in node.children:
                if self._num_nodes >= _MAX_NODES:
                    continue
                self._num_nodes += 1
                node.children[key] = _Node()
            self.add(node.children[key], item, (*above, id(value)), depth + 1)


def _type_name(value: Any) -> str:
    if isinstance(value, Lazy):
        return "tensor"
    return "None" if value is None else type(value).__name__


def _as_json(name: str, node: _Node) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "types": list(islice(node.types, 4)), "num_samples": node.num_samples}
    if node.tensor is not None:
        found["tensor"] = visible(node.tensor)
    if node.children or node.num_items:
        found["children"] = [_as_json(words(key, 120), child) for key, child in node.children.items()]
        found["num_more"] = max(0, node.num_items - len(node.children))
    elif node.example is not None:
        found["example"] = node.example
    return found
