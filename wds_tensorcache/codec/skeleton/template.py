"""Templates: a fast path for samples with an earlier sample's structure.

Most samples of a cache have the same structure: the same opcodes, with different numbers and strings between them. A template
is the body of a skeleton without these numbers and strings.

- *Reading.* A body that equals the template everywhere else differs only in plain values from a body that the interpreter
  (`reader.py`) has read. So the interpreter would accept it, too.
- *Writing.* The body of a sample with the same structure is the template with the sample's values in it. `SkeletonWriter`
  would write the same bytes.

A template is learned from a sample and its body by writing the sample again, which needs no second parser of pickles. A sample
has no template if it contains anything but dicts whose keys are str or int, lists, tuples, plain values, tensors and *calls*. A
call is a value such as a numpy scalar or a date, which the body builds by calling its type with plain values. Templates with
calls are only read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from struct import Struct
from struct import error as StructError
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE, TrueDtype, stored_form
from wds_tensorcache.codec.header import Layout, keep_bounded, plan_member
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.skeleton.types import BUILDERS, LISTED
from wds_tensorcache.codec.skeleton.writer import SkeletonWriter
from wds_tensorcache.codec.storable import PLAIN, StorableTensor, describe_tensor, view_plain

MISS: Any = object()  # the result for a skeleton that does not match a template
MAX_ATTEMPTS = 16  # interpreted samples of a form, after which no template is learned; half of them are learned from
_MAX_PARTS = 1000  # containers and plain values
_MIN_NBYTES = 8  # of the body for each container and call, because a template takes 400 bytes for it
_FEW_TENSORS = 64
_MAX_FAMILIES = 256
_MAX_MISSES = 32  # after more misses in a row, a family gives up its template
_KEYS = frozenset({str, int})
_INT_KEY = -1  # takes the place of the position of a part
_TENSORS = (torch.Tensor, np.ndarray, LazyTensor, LazyArray)
_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
_Build = Callable[[tuple[Any, ...]], Any]
# Body of the skeleton; header without its digest, layout and buffers of the `.safetensors` member. Last, strings of the
# references in the order of the tensors' bytes, None if readers of the skeleton need `allow=`.
Written = tuple[bytes, bytes, Layout, list[Any], "tuple[str, ...] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A skeleton's body without its plain values.

    The *parts* of a sample are a list of objects. The first part is the sample. The items of the first container in the list
    follow, then the items of the second container, and so on.

    Attributes:
        segments: Bytes before each value, and bytes after the last value.
        calls: Calls, the last one of the body first. A call is the index of its first argument among the plain values, the
            number of its arguments, and a function. The function takes their tuple and returns the value.
        references: Strings of the references to tensors, in the order of the body.
        containers: For each container, inner containers first: its type, its keys if it is a dict, and a function that selects
            its items. The function gets a list of all values, then all tensors, then the containers built so far.
        outline: Containers in the order of the parts. A container is its position among them, its type, and the number of parts
            up to its last item. None if the body has calls or fetches a part from the memo: the template is for reading only.
        keys: Keys of all dicts, in the order of the parts.
        select_values: Function that selects the plain values from the parts, in the order of the body.
        select_tensors: Function that selects the tensors from the parts, in the order of their bytes in the member.
        tensors: For each tensor, in the order of the bytes: its type, its stored form, and its torch dtype if `view_plain`
            takes it.
        select_unique: Function that selects the parts that must be different objects.
        num_unique: Number of parts that must be different objects.
        texts: Keys and other constant strings of the body. A writer would fetch an equal value from the memo.
    """

    segments: tuple[bytes, ...]
    calls: tuple[tuple[int, int, _Build], ...]
    references: tuple[str, ...]
    containers: tuple[tuple[type, Any, Any], ...]
    outline: tuple[tuple[int, Any, int], ...] | None
    keys: list[str | int]
    select_values: Callable[[list[Any]], Iterable[Any]]
    select_tensors: Callable[[list[Any]], Iterable[Any]]
    tensors: tuple[tuple[Any, StorableTensor, torch.dtype | None], ...]
    select_unique: Callable[[list[Any]], Iterable[Any]]
    num_unique: int
    texts: set[Any]

    def match(self, body: bytes, pos: int) -> Any:
        """Return the values of a body that starts at `pos`, or `MISS`."""
        values: list[Any] = []
        append = values.append
        # one step per value
        try:
            for segment in self.segments[:-1]:
                if not body.startswith(segment, pos):
                    return MISS
                pos += len(segment)
                op = body[pos]
                if op == SHORT_BINUNICODE:
                    end = pos + 2 + body[pos + 1]
                    append(body[pos + 2 : end].decode())
                    pos = end
                elif op == BININT1:
                    append(body[pos + 1])
                    pos += 2
                elif op == BININT2:
                    append(body[pos + 1] | body[pos + 2] << 8)
                    pos += 3
                elif op == BINFLOAT:
                    append(_FLOAT(body, pos + 1)[0])
                    pos += 9
                elif op == BININT:
                    append(_INT32(body, pos + 1)[0])
                    pos += 5
                elif op in CONSTANTS:
                    append(CONSTANTS[op])
                    pos += 1
                elif op in SIZED and op != BYTEARRAY8:  # samples share values, so these are immutable
                    width, make = SIZED[op]
                    first = pos + 1 + width
                    pos = first + int.from_bytes(body[pos + 1 : first], "little")
                    append(make(body[first:pos]))
                else:
                    return MISS
            if body[pos:] != self.segments[-1]:
                return MISS
            for begin, count, build in self.calls:
                values[begin : begin + count] = [build(tuple(values[begin : begin + count]))]
        except (IndexError, StructError, ValueError, TypeError, ArithmeticError, RuntimeError):
            return MISS  # the interpreter raises the error of a truncated or damaged body
        return values

    @property
    def num_values(self) -> int:
        """Number of values that `match` returns."""
        return len(self.segments) - 1 - sum(count - 1 for _, count, _ in self.calls)

    def build(self, parts: list[Any]) -> Any:
        """Build a sample. `parts` has its values, then its tensors; new containers are appended."""
        return assemble(self.containers, parts)

    def write(self, sample: Any, align: int) -> Written | None:
        """Return the content of both members if the sample matches.

        Memory: aliases the sample's tensors.
        """
        if self.outline is None:
            return None
        parts: list[Any] = [sample]
        keys: list[Any] = []
        for position, kind, end in self.outline:
            value: Any = parts[position]
            if type(value) is not kind:
                return None
            if kind is dict:
                # another thread may change the sample between two of these steps
                value = value.copy()
                keys += value
                parts += value.values()
            else:
                parts += value
            if len(parts) != end:
                return None
        # The types come first: comparing keys of other types may run any code.
        if not _KEYS.issuperset(map(type, keys)) or keys != self.keys:
            return None
        # A writer fetches a container or tensor that occurs again from the memo.
        if len(set(map(id, self.select_unique(parts)))) < self.num_unique:
            return None
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
        buffers: list[Any] = []
        shapes: list[Any] = []
        for value, (cls, tensor, plain) in zip(self.select_tensors(parts), self.tensors, strict=True):
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
                if stored.true != tensor.true:
                    return None
                flat = stored.flat
                shapes.append(stored.shape)
            if len(flat):
                buffers.append(flat)
        plan = _plan_few if len(shapes) <= _FEW_TENSORS else _plan_many
        header, layout, references = plan(self, align, *shapes)
        return b"".join(written), header, layout, buffers, references


def _plan(template: Template, align: int, *shapes: tuple[int, ...]) -> tuple[bytes, Layout, tuple[str, ...]]:
    tensors = [tensor for _, tensor, _ in template.tensors]
    entries = [
        (tensor.name, tensor.true.stored, tuple(shape), math.prod(shape) * tensor.true.itemsize)
        for shape, tensor in zip(shapes, tensors, strict=True)
    ]
    return *plan_member(tuple(entries), align), tuple([tensor.reference for tensor in tensors])


_plan_few = lru_cache(1024)(_plan)
_plan_many = lru_cache(16)(_plan)  # takes up to a megabyte for each result


def assemble(containers: Iterable[tuple[type, Any, Any]], parts: list[Any]) -> Any:
    """Build containers, append each to `parts`, and return the last. For `containers`, see `Template`."""
    for kind, keys, select in containers:
        if kind is dict:
            parts.append(dict(zip(keys, select(parts), strict=True)))
        else:
            parts.append(kind(select(parts)))
    return parts[-1]


def _find_call(value: Any) -> tuple[int, _Build] | None:
    """Return the number of a call's plain values, and its builder."""
    if type(value) not in LISTED:
        return None
    module, name, list_arguments = LISTED[type(value)]
    builder: Any = BUILDERS[module, name]
    arguments, build = list_arguments(value), builder.build
    if type(value) is torch.Size:
        arguments, build = tuple(value), _build_size
    return (len(arguments), build) if arguments and all(type(item) in ATOM_WRITERS for item in arguments) else None


def _build_size(sizes: tuple[Any, ...]) -> Any:
    builder: Any = BUILDERS["torch", "Size"]
    return builder.build((sizes,))


def item_getter(indices: list[int]) -> Callable[[list[Any]], Iterable[Any]]:
    """Return a function that returns the items of a list at `indices`."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1) if indices else slice(0))


class _MarkingWriter(SkeletonWriter):
    """A writer that marks plain values, and reads no tensors."""

    def __init__(self) -> None:
        super().__init__({})
        self.marks: list[int] = []  # for each value, in the order of the body, its index among the parts of the body

    def _save_value(self, value: Any, cls: type, write: Callable[[Any], bytes]) -> None:
        self.marks.append(len(self._parts))
        super()._save_value(value, cls, write)

    def _describe(self, value: Any) -> StorableTensor:
        kind = "tensor" if isinstance(value.dtype, torch.dtype) else "ndarray"
        return StorableTensor(kind, stored_form(value.dtype), (), b"")

    def first_mark(self, mark: int) -> int:
        """Return the first mark of an equal value, or `mark` itself."""
        return self._gets.get(mark, mark + 1) - 1

    def has_constant_of(self, values: Iterable[int]) -> bool:
        """Return whether a key or constant is fetched from these marks."""
        constants = {self._gets[index] - 1 for index in self._gets.keys() - self.marks}
        return not constants.isdisjoint(values)

    def segments(self, marks: Iterable[int]) -> tuple[bytes, ...]:
        """Return the bytes before, between and after the values at these marks. Call `body` first."""
        edges = [-1, *marks, len(self._parts)]
        segments = [b"".join(self._parts[begin + 1 : end]) for begin, end in pairwise(edges)]
        return (*segments[:-1], segments[-1] + CODE[STOP])


def learn(sample: Any, body: bytes) -> Template | None:
    """Return the template for a sample and the body of its skeleton.

    Return None if a template cannot represent the sample, or if `SkeletonWriter` writes another body.
    """
    parts: list[Any] = [sample]
    outline: list[tuple[int, Any, int]] = []
    keys: list[Any] = []
    items: dict[int, range] = {}  # position of a container -> positions of its items
    calls: dict[int, tuple[int, _Build]] = {}  # position of a call -> result of `_find_call`
    for position, part in enumerate(parts):  # `parts` grows until all containers have been visited
        if type(part) in (dict, list, tuple):
            begin = len(parts)
            keys += part if type(part) is dict else ()
            parts += part.values() if type(part) is dict else part
            items[position] = range(begin, len(parts))
            outline.append((position, type(part), len(parts)))
        elif type(part) not in ATOM_WRITERS and not isinstance(part, _TENSORS):
            call = _find_call(part)
            if call is None:
                return None
            calls[position] = call
        if len(parts) > 2 * _MAX_PARTS:
            return None
    # CPython has one empty tuple, which is written wherever it occurs.
    unique = [position for position in items if type(parts[position]) is not tuple or items[position]]
    if (
        not items
        or len(body) < _MIN_NBYTES * (len(items) + len(calls))
        or len({id(parts[position]) for position in unique}) < len(unique)
    ):
        return None
    if not _KEYS.issuperset(map(type, keys)):
        return None
    writer = _MarkingWriter()
    try:
        writer.save(sample)
        if writer.body() != body:
            return None
    except ValueError:
        return None  # a tensor that cannot be stored: another thread has changed the sample
    values: dict[int, int] = {}  # mark of a value -> position of its first occurrence; for an argument, of its call
    spans: list[tuple[int, int, _Build]] = []  # `Template.calls`, the first one of the body first
    tensors: dict[int, int] = {}  # id of a tensor -> position of its first occurrence
    called: dict[int, int] = {}  # id of a call's value -> position of its first occurrence
    firsts: dict[int, int] = {}  # position of a value or tensor -> position of its first occurrence
    marks, todo = iter(writer.marks), [0]
    while todo:  # in the order of the body
        position = todo.pop()
        part = parts[position]
        if position == _INT_KEY:
            next(marks, None)
        elif position in items:
            # not strict, because another thread may change the sample
            for item, key in zip(reversed(items[position]), reversed([*part]), strict=False):
                todo += (item, _INT_KEY) if type(part) is dict and type(key) is int else (item,)
        elif position in calls:
            firsts[position] = called.setdefault(id(part), position)
            if firsts[position] == position:
                spans.append((len(values), *calls[position]))
                own = [next(marks, -1) for _ in range(calls[position][0])]
                if own != list(map(writer.first_mark, own)) or -1 in own:
                    return None  # a long argument that many calls fetch would be copied many times
                values |= dict.fromkeys(own, position)
        elif type(part) in ATOM_WRITERS:
            mark = next(marks, -1)
            first = writer.first_mark(mark)
            if mark < 0 or (first != mark and first not in values) or values.get(first) in calls:
                return None  # another thread has changed the sample; or a value is fetched from a key or from a call
            firsts[position] = values.setdefault(first, position)
        else:
            firsts[position] = tensors.setdefault(id(part), position)
    if len(values) + len(items) > _MAX_PARTS or len(tensors) != len(writer.tensors) or writer.has_constant_of(values):
        return None
    inner_first = list(reversed(items))
    placed_values = dict.fromkeys(values.values())  # each call once
    order = {position: at for at, position in enumerate((*placed_values, *tensors.values(), *inner_first))}
    references = tuple(tensor.reference for tensor in writer.tensors.values())
    placed = zip(tensors.values(), writer.tensors.values(), strict=True)
    wide_first = sorted(placed, key=lambda pair: pair[1].true.itemsize, reverse=True)
    return Template(
        segments=writer.segments(values),
        calls=tuple(reversed(spans)),
        references=references,
        containers=tuple(
            (
                type(parts[position]),
                tuple(parts[position]) if type(parts[position]) is dict else (),
                item_getter([order[firsts.get(item, item)] for item in items[position]]),
            )
            for position in inner_first
        ),
        outline=tuple(outline) if len(firsts) == len(values) + len(tensors) and not calls else None,
        keys=keys,
        select_values=item_getter(list(values.values())),
        select_tensors=item_getter([position for position, _ in wide_first]),
        tensors=tuple((type(parts[at]), tensor, _plain_dtype(parts[at], tensor.true)) for at, tensor in wide_first),
        select_unique=item_getter([*tensors.values(), *unique]),
        num_unique=len(tensors) + len(unique),
        texts={*keys, *references, *(("builtins", "format") if references else ())},
    )


def _plain_dtype(tensor: Any, true: TrueDtype) -> torch.dtype | None:
    is_plain = type(tensor) is torch.Tensor and tensor.dtype in PLAIN and TORCH_TRUE[tensor.dtype] == true
    return tensor.dtype if is_plain else None


def find_match(templates: Iterable[Template], body: bytes, pos: int) -> tuple[Template | None, Any]:
    """Return the first template that a body matches, and the plain values. None and `MISS` if there is none."""
    for template in templates:
        values = template.match(body, pos)
        if values is not MISS:
            return template, values
    return None, MISS


@dataclass(slots=True, eq=False)
class Family:
    """Samples with the same outermost type, and equal keys or length."""

    template: Template | None = None  # of an earlier sample
    num_misses: int = 0  # samples since the last match of the template

    def miss(self, sample: Any, body: bytes) -> None:
        """Count a sample that did not match the template.

        After some misses, learn a template from the sample and its body. After too many misses, drop the template.
        """
        self.num_misses += 1
        # Learning takes as long as writing three samples. So it skips the first sample, which may be the only one or an
        # exception, and becomes rarer with each further miss.
        if self.num_misses > 1 and self.num_misses.bit_count() == 1:
            template = learn(sample, body)
            written = None if template is None else template.write(sample, 64)
            # Another thread may have changed the sample after `body` was written.
            self.template = None if written is None or written[0] != body else template
        elif self.num_misses > _MAX_MISSES:
            self.template = None


_FAMILIES: dict[tuple[Any, ...], Family] = {}


def family_of(sample: Any) -> Family | None:
    cls = type(sample)
    if cls is dict:
        key = tuple(sample)
        if not _KEYS.issuperset(map(type, key)):
            return None
    elif cls is list or cls is tuple:
        key = (cls, len(sample))
    else:
        return None
    family = _FAMILIES.get(key)
    if family is None and len(sample) < _MAX_PARTS:
        family = keep_bounded(_FAMILIES, key, Family(), _MAX_FAMILIES)
    return family
