"""The structure of samples as a tree of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, Holding, map_leaves
from wds_tensorcache.inspecting.text import tensor_text
from wds_tensorcache.reading.description import value_name, value_text
from wds_tensorcache.reading.structure import value_at

_MAX_ITEMS = 100  # of one container
_MAX_NODES = 2000
_MAX_DEPTH = 40


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the structure of samples, with its values. Escape the texts before you show them.

    Attributes:
        name: Key or index in the container; `""` for the whole sample.
        kind: Type of a container, such as `"dict"`. Otherwise `"tensor"` for a torch tensor, `"ndarray"` for a numpy array,
            `"value"` for a small value, or `"more"` for places that are not listed.
        text: Dtype and shape of a tensor, such as `bf16[77, 2048]`, type and length of a container, or an example of a value in
            about 200 characters.
        types: Types of the values there, such as `"tensor"`, `"str"` and `"None"`.
        num_samples: Number of samples that contain this place.
        tensor: Name of the tensor in `cache.select` and in statistics; None for other values.
        children: Items of a container.
    """

    name: str
    kind: str
    text: str
    types: tuple[str, ...] = ()
    num_samples: int = 0
    tensor: str | None = None
    children: tuple[Node, ...] = ()


def describe_samples(samples: Sequence[Any], tensors: Mapping[str, Any] | None = None) -> Node:
    """Return the structure of one or more lazy samples.

    No tensor is read. The tree has at most 2,000 places, 100 items of each container, and 40 levels. A container that occurs
    again has no children. Containers are dicts that are not empty, and lists, tuples and deques that contain a tensor. All
    other objects are values. `tensors` contains schemas by name, with the shapes and dtypes in all samples of the cache.
    """
    return _Builder(tensors or {}).visit("", samples, 0)


class _Builder:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._holds = Holding()
        self._num_nodes = 0
        self._met: set[int] = set()  # ids of containers, which the samples keep alive

    def visit(self, name: str, values: Sequence[Any], depth: int) -> Node:
        self._num_nodes += 1
        types, num = tuple(dict.fromkeys(map(_type_name, values))), len(values)
        containers = [value for value in values if self._is_container(value)]
        if containers:
            new = [value for value in containers if id(value) not in self._met]
            text = f"{' or '.join(types[:4])} of {max(map(len, containers)):,}"
            if not new or depth == _MAX_DEPTH:
                return Node(name, _type_name(containers[0]), f"{text}: {'…' if new else 'shown above'}", types, num)
            return Node(name, _type_name(containers[0]), text, types, num, None, tuple(self._children(new, depth)))
        lazy = next((value for value in values if isinstance(value, Lazy)), None)
        if lazy is not None:
            text = tensor_text(self._tensors.get(lazy.name, lazy))
            return Node(name, lazy._reference.kind, text, types, num, lazy.name)
        return Node(name, "value", value_text(next(filter(_is_example, values), values[-1])), types, num)

    def _is_container(self, value: Any) -> bool:
        return (type(value) in DICTS and bool(value)) or (type(value) in SEQUENCES and self._holds(value))

    def _children(self, containers: Sequence[Any], depth: int) -> Iterator[Node]:
        items: dict[Any, list[Any]] = {}
        for value in containers:
            self._met.add(id(value))
            for key, item in islice(value.items() if type(value) in DICTS else enumerate(value), _MAX_ITEMS):
                items.setdefault(key, []).append(item)
        count = 0
        for key, values in islice(items.items(), _MAX_ITEMS):
            if self._num_nodes >= _MAX_NODES:
                break
            count += 1
            yield self.visit(key[:200] if isinstance(key, str) else value_text(key), values, depth + 1)
        if left_out := max(len(items), *map(len, containers)) - count:
            yield Node("", "more", f"… and {left_out:,} more")


def _type_name(value: Any) -> str:
    return "tensor" if isinstance(value, Lazy) else "None" if value is None else type(value).__name__


def _is_example(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def small_values(sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield a lazy sample's small values by name, such as `text.prompt`."""
    paths: list[tuple[Any, ...]] = []
    map_leaves(sample, lambda lazy: None, paths.append)
    for path in paths:
        yield value_name(path), value_at(sample, path)
