"""Descriptions of a cache's tensors, small values and members, for `Cache.describe`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import component
from wds_tensorcache.codec.tree import CONTAINERS, Path, map_leaves
from wds_tensorcache.errors import format_count, plain
from wds_tensorcache.reading.schema import Tensor, TensorSchema, format_tensor, merge_schema, merge_shapes
from wds_tensorcache.reading.structure import value_at

Array = np.ndarray[Any, Any]
NUM_EXAMINED = 64  # samples whose small values are examined
_MAX_SHAPES = 20  # shapes of a tensor with their counts
_MAX_VALUES = 1000  # small values of all samples together
_NUM_ITEMS = 1000  # items of a list whose types are examined
_MAX_LINES, _LINE_CHARS, _VALUE_CHARS = 100, 240, 60  # bounds of a repr
_NUMBER_CHARS = 24  # the repr of any float: a number is never cut
_SHOWN_SHAPES = 3
_MAX_DEPTH = 4
_MAX_BITS = 4096  # Python takes long to print a larger int, or refuses to
_BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}")}


@dataclass(frozen=True, slots=True)
class TensorDescription(TensorSchema):
    """The properties and shapes of one tensor across all samples.

    Attributes:
        shapes: Number of samples of each shape, most frequent shapes first, at most 20.
        num_shapes: Number of distinct shapes.
    """

    shapes: dict[tuple[int, ...], int]
    num_shapes: int

    def __str__(self) -> str:
        text = f"{format_tensor(self)}, {self.nbytes:,} bytes"
        if self.num_shapes > 1:
            shown = [f"{list(shape)} in {count:,}" for shape, count in islice(self.shapes.items(), _SHOWN_SHAPES)]
            text += f"; {self.num_shapes:,} shapes: {', '.join(shown)}" + ", …" * (self.num_shapes > _SHOWN_SHAPES)
        return text


@dataclass(frozen=True, slots=True)
class ValueDescription:
    """A value that is not a tensor, in the examined samples.

    Attributes:
        name: Path of the value in the samples, like the name of a tensor: `cond.0.1.prompt`.
        types: Number of examined samples of each type. Types are in words: `"str"`, `"tuple of 2 int"`, `"list of 3..7 str"`.
        example: First value that is neither None nor empty, or else the last value, in the examined samples.
        num_samples: Number of examined samples that have the value.
    """

    name: str
    types: dict[str, int]
    example: object
    num_samples: int

    def __str__(self) -> str:
        types = (f"{text} ({count:,})" if len(self.types) > 1 else text for text, count in self.types.items())
        return f"{', '.join(types)}" + f", for example {value_text(self.example, _VALUE_CHARS)}" * (
            self.example is not None
        )


@dataclass(frozen=True, slots=True, repr=False)
class Description:
    """The contents of a cache, made by `Cache.describe`. Its repr is a summary of bounded length.

    Attributes:
        num_samples: Number of samples.
        num_shards: Number of shards of the cache; for a view, of the whole cache.
        nbytes: Total bytes of the tensors of the counted samples.
        tensors: Dtype, shapes, bytes and number of samples of each tensor, by name.
        values: Types and an example of every other value, by name, in the examined samples; at most 1,000 values.
        members: Number of samples that have a member `KEY.suffix` outside all caches, by suffix.
        fingerprint: Description of how the cache was made, as in `Cache.fingerprint`.
        num_counted: Number of samples whose tensors were counted: all samples, or in a `SharedDataset` at most 1,000 of the
            samples in shared memory.
        num_examined: Number of samples whose values were examined, spread over the cache; at most 64.
    """

    num_samples: int
    num_shards: int
    nbytes: int
    tensors: dict[str, TensorDescription]
    values: dict[str, ValueDescription]
    members: dict[str, int]
    fingerprint: dict[str, object]
    num_counted: int
    num_examined: int

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        counts = f"{format_count(self.num_samples, 'sample')} in {format_count(self.num_shards, 'shard')}"
        yield f"Description: {counts}, {self.nbytes:,} bytes of tensors"
        if self.num_counted < self.num_samples:
            yield f"tensors of {format_count(self.num_counted, 'sample')} in memory:"
        elif self.tensors:
            yield "tensors:"
        yield from _entries(self.tensors, self.num_counted)
        if self.values:
            yield f"values of {format_count(self.num_examined, 'sample')}:"
            yield from _entries(self.values, self.num_examined)
        if self.members:
            yield "members:"
            members = self.members.items()
            lines = (f"  {suffix!r:.{_VALUE_CHARS}}: {format_count(count, 'sample')}" for suffix, count in members)
            yield from _limit_lines(lines, len(self.members))
        if self.fingerprint:
            yield f"fingerprint: {self.fingerprint!r:.1000}"


def _entries(described: Mapping[str, TensorDescription] | Mapping[str, ValueDescription], count: int) -> Iterator[str]:
    lines = (
        f"  {plain(name[:_VALUE_CHARS] + '…' * (len(name) > _VALUE_CHARS)) or '(the whole sample)'}: {description}"
        + f", in {description.num_samples:,} of {count:,} samples" * (description.num_samples != count)
        for name, description in described.items()
    )
    return _limit_lines(lines, len(described))


def _limit_lines(lines: Iterable[str], count: int) -> Iterator[str]:
    for line in islice(lines, _MAX_LINES):
        yield line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}…"
    if count > _MAX_LINES:
        yield f"  … and {count - _MAX_LINES:,} more"


def value_text(value: Any, limit: int = 200, depth: int = _MAX_DEPTH) -> str:
    """Return a text like a value's repr, in about `limit` characters."""
    # Hazard: a hostile container may contain itself, or one list many times, so that its repr is far larger than the container.
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:limit]) + "…" * (len(value) > limit)
    if isinstance(value, int) and value.bit_length() > min(_MAX_BITS, 3 * limit):  # so that no digits are cut off
        return f"an int of {value.bit_length():,} bits"
    if isinstance(value, Lazy):
        return f"tensor {value.name!r:.80}"
    is_dict = isinstance(value, Mapping)
    if not is_dict and not isinstance(value, CONTAINERS):
        return f"{value!r:.{limit}}"
    begin, end = _BRACKETS.get(type(value), (f"{type(value).__name__}([", "])"))
    if not depth:
        return f"{begin}…{end}"
    parts: list[str] = []
    size = 0
    for item in value.items() if is_dict else value:
        if size > limit or len(parts) > 100:
            parts.append("…")
            break
        pair = item if is_dict else (item,)
        parts.append(
            ": ".join(value_text(part, max(limit - size, _NUMBER_CHARS), depth - 1) for part in islice(pair, 2))
        )
        size += len(parts[-1]) + 2
    return f"{begin}{', '.join(parts)}{',' * (type(value) is tuple and len(value) == 1)}{end}"


def value_name(path: Path) -> str:
    """Return the name of the value at `path`, for example `cond.0.1.prompt`."""
    parts = (component(key, 0) if type(key) in (str, int) else value_text(key, _VALUE_CHARS) for key in path)
    return ".".join(parts)


def _describe_value(name: str, values: Sequence[Any]) -> ValueDescription:
    lengths: dict[str, list[int]] = {}  # by type in words, with `{}` in place of the length
    for value in values:
        text = _type_name(value)
        if isinstance(value, CONTAINERS):
            kinds = list(dict.fromkeys(map(_type_name, islice(value, _NUM_ITEMS))))
            text = f"{text} of {{}} {' or '.join(kinds[:3])}{' or …' * (len(kinds) > 3)}".rstrip()
        lengths.setdefault(text, []).append(len(value) if isinstance(value, CONTAINERS) else 0)
    types = {
        text.format("..".join(map(str, sorted({min(of_type), max(of_type)})))): len(of_type)
        for text, of_type in lengths.items()
    }
    with_contents = (v for v in values if v is not None and (v or not isinstance(v, (str, *CONTAINERS))))
    return ValueDescription(name, types, next(with_contents, values[-1]), len(values))


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


class Contents:
    """The tensors and values that `Cache.describe` has collected so far.

    Attributes:
        num_counted, num_examined: As in `Description`.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_counted, self.num_examined = num_samples, 0
        self._schemas: dict[str, TensorSchema] = {}
        self._shapes: dict[str, Counter[tuple[int, ...]]] = {}
        self._values: dict[str, list[Any]] = {}
        self._nbytes = 0

    def add_tensors(self, prefix: str, tensors: Iterable[Tensor]) -> None:
        """Add tensors; `prefix` precedes their names in a joined cache."""
        for tensor in tensors:
            name, reference, shapes, counts = tensor
            whole, schema = prefix + name, merge_shapes([tensor])[name]
            self._nbytes += schema.nbytes if name == reference.name else 0  # bytes under several names count once
            self._schemas[whole] = merge_schema(self._schemas.get(whole), schema)
            distinct, which = np.unique(shapes, axis=0, return_inverse=True)
            sums = np.bincount(which.reshape(-1), counts).astype(np.int64)
            added = zip(map(tuple, distinct.tolist()), sums.tolist(), strict=True)
            self._shapes.setdefault(whole, Counter()).update(dict(added))

    def add_values(self, prefix: str, samples: Iterable[Any]) -> None:
        """Add values of samples; `prefix` precedes their names in a joined cache."""
        count = 0
        for count, sample in enumerate(samples, 1):  # noqa: B007
            paths: deque[Path] = deque()
            map_leaves(sample, lambda lazy: None, paths.append)
            for path in islice(paths, _MAX_VALUES):
                name = prefix + value_name(path) if path else prefix.removesuffix(".")
                if name in self._values or len(self._values) < _MAX_VALUES:
                    self._values.setdefault(name, []).append(value_at(sample, path))
        self.num_examined = max(self.num_examined, count)

    def description(
        self, num_samples: int, num_shards: int, members: dict[str, int], fingerprint: dict[str, object]
    ) -> Description:
        tensors = {}
        for name, schema in self._schemas.items():
            properties = {field.name: getattr(schema, field.name) for field in fields(schema)} | {"name": name}
            shapes = self._shapes[name]
            most_frequent = dict(shapes.most_common(_MAX_SHAPES))
            tensors[name] = TensorDescription(**properties, shapes=most_frequent, num_shapes=len(shapes))
        values = {name: _describe_value(name, examined) for name, examined in self._values.items()}
        counts = (self.num_counted, self.num_examined)
        return Description(num_samples, num_shards, self._nbytes, tensors, values, members, fingerprint, *counts)
