"""Templates for writing: a fast path for samples that differ from an earlier one only in plain values and tensors.

Most samples of a cache have the same structure. A template is the body of an earlier skeleton, without its plain values. If a
sample has the same structure, its body is the template's bytes with the sample's values between them, byte for byte what
`SkeletonWriter` writes. `SkeletonWriter` writes all other samples, and raises the errors of samples that cannot be written:

- A sample with anything but dicts with string keys, lists, tuples, plain values and tensors has no template.
- At its second occurrence, a container or tensor is fetched from the memo. So is a string or bytes object that is equal to an
  earlier one. Templates contain no such fetches, except of keys and of the strings in references.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TrueDtype
from wds_tensorcache.codec.header import plan_member
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.skeleton.limits import TEXTS
from wds_tensorcache.codec.skeleton.opcodes import ATOM_WRITERS, write_text
from wds_tensorcache.codec.skeleton.template import MAX_PARTS, item_getter
from wds_tensorcache.codec.skeleton.writer import SkeletonWriter
from wds_tensorcache.codec.tensor_bytes import PLAIN, describe_tensor, view_plain

__all__ = ["Family", "Written", "family_of"]

_MAX_FAMILIES = 256
_MAX_MISSES = 32  # after more misses in a row, the template is given up
_CONTAINERS = frozenset({dict, list, tuple})
_TENSORS = (torch.Tensor, np.ndarray, LazyTensor, LazyArray)
_FORMAT = ("builtins", "format")  # strings in each skeleton with tensors

# Position of a container among the parts, its type, and the number of parts up to its last item; see `WriteTemplate`.
Container = tuple[int, Any, int]
# Body of the skeleton; header without its digest, layout and buffers of the `.safetensors` member; strings of the references
# in the order of the tensors' bytes, None if readers of the skeleton need `allow=`.
Written = tuple[bytes, bytes, Layout, list[Any], "tuple[str, ...] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class WriteTemplate:
    """The structure of a sample, and the bytes of its skeleton around its plain values.

    The *parts* of a sample are the sample itself, then the items of the first container among the parts, then those of the
    second, and so on.

    Attributes:
        containers: All containers.
        keys: Keys of all dicts.
        select_values: Function that selects the plain values from the parts, in the order of the skeleton.
        select_tensors: Function that selects the tensors from the parts, in the order of their bytes in the member.
        select_unique: Function that selects the parts that must be different objects.
        num_unique: Number of these parts.
        tensors: For each tensor, in the order of their bytes: type, name, stored form of its dtype, and its torch dtype if
            `view_plain` accepts it, otherwise None.
        references: Strings of the references to the tensors, in the same order.
        segments: Bytes before each value, and bytes after the last value.
        texts: Keys and other constant strings of the skeleton that could be fetched from the memo.
    """

    containers: tuple[Container, ...]
    keys: list[str]
    select_values: Callable[[list[Any]], Iterable[Any]]
    select_tensors: Callable[[list[Any]], Iterable[Any]]
    select_unique: Callable[[list[Any]], Iterable[Any]]
    num_unique: int
    tensors: tuple[tuple[Any, str, TrueDtype, torch.dtype | None], ...]
    references: tuple[str, ...]
    segments: tuple[bytes, ...]
    texts: set[Any]

    def write(self, sample: Any, align: int) -> Written | None:
        """Return the content of both members, which aliases the sample's tensors; None if the sample does not match."""
        parts = self.take_apart(sample)
        body = None if parts is None else self.fill_in(parts)
        if parts is None or body is None:
            return None
        buffers: list[Any] = []
        shapes: list[Any] = []
        for value, (cls, _, true, plain) in zip(self.select_tensors(parts), self.tensors, strict=True):
            if type(value) is not cls:
                return None
            flat: Any = view_plain(value) if value.dtype is plain else None
            if flat is not None:
                shapes.append(value.shape)
            else:
                try:
                    stored = describe_tensor(value)
                except Exception:
                    return None  # `SkeletonWriter` raises the error
                if stored.true != true:
                    return None
                flat = stored.flat
                shapes.append(stored.shape)
            if len(flat):
                buffers.append(flat)
        header, layout = _plan(self, align, *shapes)
        return body, header, layout, buffers, self.references

    def take_apart(self, sample: Any) -> list[Any] | None:
        """Return the parts of a sample; None if their containers do not match."""
        parts: list[Any] = [sample]
        keys: list[Any] = []
        for number, kind, end in self.containers:
            value: Any = parts[number]
            if type(value) is not kind:
                return None
            if kind is dict:
                # Hazard: another thread may change the sample between two of these steps.
                value = value.copy()
                keys += value
                parts += value.values()
            else:
                parts += value
            if len(parts) != end:
                return None
        # The types come first: comparing keys of other types may run any code.
        if not TEXTS.issuperset(map(type, keys)) or keys != self.keys:
            return None
        return parts if len(set(map(id, self.select_unique(parts)))) == self.num_unique else None

    def fill_in(self, parts: list[Any]) -> bytes | None:
        """Return the body of the skeleton; None if a value does not match."""
        written: list[bytes] = []
        texts, segments = self.texts.copy(), iter(self.segments)
        # one step per value
        for value in self.select_values(parts):
            cls = type(value)
            write = ATOM_WRITERS.get(cls)
            if write is None:
                return None
            if (cls is str or cls is bytes) and len(value) > 1:
                text = value if cls is str else (value,)  # comparing a str with bytes may be a warning
                if text in texts:
                    return None
                texts.add(text)
            written += next(segments), write(value)
        written += segments
        return b"".join(written)


@lru_cache(1024)
def _plan(template: WriteTemplate, align: int, *shapes: tuple[int, ...]) -> tuple[bytes, Layout]:
    """Return the header and the layout of the member for tensors of these shapes."""
    entries = [
        (name, true.stored, tuple(shape), math.prod(shape) * true.itemsize)
        for shape, (_, name, true, _) in zip(shapes, template.tensors, strict=True)
    ]
    return plan_member(tuple(entries), align)


@dataclass(slots=True, eq=False)
class Family:
    """Samples whose outermost containers have the same type, and the same keys or the same length.

    Attributes:
        template: Template of an earlier sample; None if there is none.
        num_misses: Number of samples since the last one that matched the template.
    """

    template: WriteTemplate | None = None
    num_misses: int = 0

    def write(self, sample: Any, align: int) -> Written | None:
        """Return the content of both members, as `WriteTemplate.write` does; None if no template matches."""
        found = None if self.template is None else self.template.write(sample, align)
        if found is not None:
            self.num_misses = 0
        return found

    def miss(self, sample: Any, body: bytes) -> None:
        """Count a sample that did not match, and sometimes learn a template from it. Its skeleton has this `body`."""
        self.num_misses += 1
        # Learning takes as long as writing three samples. So it skips the first sample, which may be the only one or an
        # exception, and becomes rarer with each further miss.
        if self.num_misses > 1 and self.num_misses.bit_count() == 1:
            self.template = _learn(sample, body)
        elif self.num_misses > _MAX_MISSES:
            self.template = None


_FAMILIES: dict[tuple[Any, ...], Family] = {}


def family_of(sample: Any) -> Family | None:
    """Return the family of a sample; None if it cannot have a template."""
    cls = type(sample)
    if cls is dict:
        key = tuple(sample)
        if not TEXTS.issuperset(map(type, key)):
            return None
    elif cls is list or cls is tuple:
        key = (cls, len(sample))
    else:
        return None
    family = _FAMILIES.get(key)
    if family is None and len(sample) < MAX_PARTS:
        if len(_FAMILIES) >= _MAX_FAMILIES:
            _FAMILIES.clear()
        family = _FAMILIES.setdefault(key, Family())
    return family


def _learn(sample: Any, body: bytes) -> WriteTemplate | None:
    """Return the template of a sample whose skeleton has this body; None if the sample cannot have one."""
    parts: list[Any] = [sample]
    containers, keys = list[Container](), list[Any]()
    for number, part in enumerate(parts):  # `parts` grows until all containers have been visited
        if type(part) in _CONTAINERS:
            if type(part) is dict:
                parts[number] = part = part.copy()  # Hazard: another thread may change the sample.
                keys += part
            parts += part.values() if type(part) is dict else part
            containers.append((number, type(part), len(parts)))
        elif type(part) not in ATOM_WRITERS and not isinstance(part, _TENSORS):
            return None
        if len(parts) > MAX_PARTS:
            return None  # also a container that contains itself
    if not TEXTS.issuperset(map(type, keys)) or "\0" in "".join(keys):  # markers have a NUL
        return None
    order = _document_order(containers)
    values = [number for number in order if type(parts[number]) in ATOM_WRITERS]
    tensors = [number for number in order if isinstance(parts[number], _TENSORS)]
    # CPython has one empty tuple, which is written wherever it occurs.
    unique = [*tensors, *(number for number, kind, _ in containers if kind is not tuple or parts[number])]
    markers = {number: f"\0{number}\0" for number in values}
    writer = SkeletonWriter({})
    try:
        writer.save(_rebuild([markers.get(number, part) for number, part in enumerate(parts)], containers))
    except Exception:
        return None  # another thread has changed the sample, or a lazy tensor's file is gone
    if len(writer.tensors) != len(tensors):
        return None  # one occurs twice
    stored = zip(tensors, writer.tensors.values(), strict=True)
    pairs = sorted(stored, key=lambda pair: pair[1].true.itemsize, reverse=True)
    references = tuple([tensor.reference for _, tensor in pairs])
    template = WriteTemplate(
        containers=tuple(containers),
        keys=keys,
        select_values=item_getter(values),
        select_tensors=item_getter([number for number, _ in pairs]),
        select_unique=item_getter(unique),
        num_unique=len(unique),
        tensors=tuple([(type(parts[n]), tensor.name, tensor.true, _plain_dtype(parts[n])) for n, tensor in pairs]),
        references=references,
        segments=_split(writer.body(), map(write_text, markers.values())),
        texts={*keys, *references, *(_FORMAT if references else ())},
    )
    again = template.take_apart(sample)
    return template if again is not None and template.fill_in(again) == body else None


def _plain_dtype(tensor: Any) -> torch.dtype | None:
    return tensor.dtype if type(tensor) is torch.Tensor and tensor.dtype in PLAIN else None


def _document_order(containers: list[Container]) -> list[int]:
    """Return the positions of all parts in the order of the skeleton."""
    ends = [1, *(end for *_, end in containers)]
    items = {number: range(ends[index], end) for index, (number, _, end) in enumerate(containers)}
    order, todo = list[int](), [0]
    while todo:
        number = todo.pop()
        order.append(number)
        todo.extend(reversed(items.get(number, ())))
    return order


def _rebuild(parts: list[Any], containers: list[Container]) -> Any:
    """Return a sample built from `parts`, with new containers. Changes the list: each container replaces the old one."""
    ends = [1, *(end for *_, end in containers)]
    for begin, (number, kind, end) in zip(reversed(ends[:-1]), reversed(containers), strict=True):
        items = parts[begin:end]
        parts[number] = dict(zip(parts[number], items, strict=True)) if kind is dict else kind(items)
    return parts[0]


def _split(body: bytes, markers: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the bytes before, between and after the markers."""
    segments = list[bytes]()
    for marker in markers:
        segment, _, body = body.partition(marker)
        segments.append(segment)
    return *segments, body
