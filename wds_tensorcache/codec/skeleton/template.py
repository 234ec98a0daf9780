"""Templates: a fast path for skeletons, and samples, that differ from an earlier one only in plain values and tensors.

Most samples of a cache have the same structure: the same opcodes, with different numbers and strings between them. A template
is the body of a skeleton without these numbers and strings.

- *Reading.* A body that equals the template everywhere else has the same opcodes as one that the interpreter (`reader.py`)
  has read, so the interpreter would accept it, too.
- *Writing.* The body of a sample with the same structure is the template with the sample's values in it, byte for byte what
  `SkeletonWriter` writes.

Bodies and samples that contain anything but dicts with string keys, lists, tuples, plain values and tensors have no template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pickletools import genops
from struct import Struct
from struct import error as StructError
from typing import Any

from wds_tensorcache.codec.skeleton.limits import TEXTS
from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.skeleton.opcodes import ATOM_WRITERS

__all__ = ["MAX_ATTEMPTS", "MAX_PARTS", "MISS", "Template", "assemble", "item_getter", "learn"]

MISS: Any = object()  # the result for a skeleton that does not match a template
MAX_ATTEMPTS = 8  # after this many samples of a form without a template, none is sought any longer
MAX_PARTS = 100  # the interpreter is as fast for a larger body
_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
# opcodes of values whose length precedes their bytes -> the function that converts the bytes
SIZED: dict[int, Callable[[bytes], Any]] = {
    **dict.fromkeys((SHORT_BINUNICODE, BINUNICODE), bytes.decode),
    **dict.fromkeys((SHORT_BINBYTES, BINBYTES), bytes),
    LONG1: lambda raw: int.from_bytes(raw, "little", signed=True),
}


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A skeleton's body without its plain values.

    The *parts* of a sample are the sample itself, then the items of the first container among the parts, then those of the
    second, and so on.

    Attributes:
        segments: Bytes before each value, and bytes after the last value.
        references: Strings of the references to tensors, in the order of the body.
        containers: For each container, inner ones first: its type, its keys if it is a dict, and a function that selects its
            items from one list, which contains all values, then all tensors, then the containers built so far.
        outline: For each container, in the order of the parts: its position among them, its type, and the number of parts up
            to its last item. None if the body fetches a part again: the template is then for reading only.
        keys: Keys of all dicts, in the order of the parts.
        select_values: Function that selects the plain values from the parts, in the order of the body.
        tensors: Positions of the tensors among the parts, in the order of the body.
        select_unique: Function that selects the parts that must be different objects.
        num_unique: Number of these parts.
        texts: Keys and other constant strings of the body, from which a writer would fetch an equal value.
    """

    segments: tuple[bytes, ...]
    references: tuple[str, ...]
    containers: tuple[tuple[type, Any, Any], ...]
    outline: tuple[tuple[int, Any, int], ...] | None
    keys: list[str]
    select_values: Callable[[list[Any]], Iterable[Any]]
    tensors: tuple[int, ...]
    select_unique: Callable[[list[Any]], Iterable[Any]]
    num_unique: int
    texts: set[Any]

    def match(self, body: bytes, pos: int) -> Any:
        """Return the plain values of a skeleton whose body starts at `pos`, or `MISS` if it does not match."""
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
                elif op in SIZED:
                    first = pos + 1 + LENGTH_NBYTES[op]
                    pos = first + int.from_bytes(body[pos + 1 : first], "little")
                    append(SIZED[op](body[first:pos]))
                else:
                    return MISS
        except (IndexError, StructError, UnicodeDecodeError):
            return MISS  # the interpreter raises the error of a truncated or damaged body
        return values if body[pos:] == self.segments[-1] else MISS

    def build(self, parts: list[Any]) -> Any:
        """Return the object built from `parts`, all of its values followed by all of its tensors. Changes the list."""
        return assemble(self.containers, parts)

    def take_apart(self, sample: Any) -> list[Any] | None:
        """Return the parts of a sample; None if their containers do not match."""
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
        if not TEXTS.issuperset(map(type, keys)) or keys != self.keys:
            return None
        # A writer fetches a container or tensor that occurs again from the memo.
        return parts if len(set(map(id, self.select_unique(parts)))) == self.num_unique else None

    def fill(self, parts: list[Any]) -> bytes | None:
        """Return the body of the skeleton of a sample with these parts; None if a value does not match."""
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


def assemble(containers: Iterable[tuple[type, Any, Any]], parts: list[Any]) -> Any:
    """Build each container from `parts`, append it to them, and return the last; for `containers`, see `Template`."""
    for kind, keys, select in containers:
        if kind is dict:
            parts.append(dict(zip(keys, select(parts), strict=True)))
        else:
            parts.append(kind(select(parts)))
    return parts[-1]


def item_getter(indices: list[int]) -> Callable[[list[Any]], Iterable[Any]]:
    """Return a function of a list that returns a tuple of its items at `indices`."""
    if not indices:
        return lambda items: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda items: (items[index],)
    return itemgetter(*indices)


@dataclass(slots=True, eq=False)
class _Node:
    """A value, tensor or container of a body."""

    kind: Any  # `_VALUE`, `_TENSOR`, or the type of a container
    content: Any  # the value, the string of a reference to a tensor, or the items of a container
    begin: int = 0
    end: int = 0
    keys: tuple[str, ...] = ()


_VALUE, _TENSOR, _REFERENCE = object(), object(), object()


class _NotATemplate(Exception):
    """The body contains something that a template cannot represent."""


def learn(body: bytes, begin: int) -> Template | None:
    """Return the template of a valid body; None if the body contains something that a template cannot represent."""
    try:
        nodes, root = _parse_body(body, begin)
    except (_NotATemplate, IndexError):
        return None
    values = [node for node in nodes if node.kind is _VALUE]
    tensors = [node for node in nodes if node.kind is _TENSOR]
    containers = [node for node in nodes if node.kind in (dict, list, tuple)]
    if not containers or root is not containers[-1] or len(values) + len(containers) > MAX_PARTS:
        return None
    order = {id(node): index for index, node in enumerate([*values, *tensors, *containers])}
    if any(id(item) not in order for container in containers for item in container.content):
        return None  # a string that is both a key and a value
    cuts = [begin, *(edge for value in values for edge in (value.begin, value.end)), len(body)]
    parts: list[_Node] = [root]
    outline = []
    for position, part in enumerate(parts):  # `parts` grows until all containers have been visited
        if part.kind in (dict, list, tuple):
            parts += part.content
            outline.append((position, part.kind, len(parts)))
    positions = {id(part): position for position, part in enumerate(parts)}
    # CPython has one empty tuple, which is written wherever it occurs.
    unique = [node for node in (*tensors, *containers) if node.kind is not tuple or node.content]
    keys = [key for position, *_ in outline for key in parts[position].keys]
    references = tuple(tensor.content for tensor in tensors)
    return Template(
        segments=tuple(body[first:last] for first, last in zip(cuts[::2], cuts[1::2], strict=True)),
        references=references,
        containers=tuple(
            (node.kind, node.keys, item_getter([order[id(item)] for item in node.content])) for node in containers
        ),
        outline=tuple(outline) if len(positions) == len(parts) else None,
        keys=keys,
        select_values=item_getter([positions[id(node)] for node in values]),
        tensors=tuple(positions[id(node)] for node in tensors),
        select_unique=item_getter([positions[id(node)] for node in unique]),
        num_unique=len(unique),
        texts={*keys, *references, *(("builtins", "format") if references else ())},
    )


def _parse_body(body: bytes, begin: int) -> tuple[list[_Node], Any]:
    """Return all values, tensors and finished containers of a body in the order of its opcodes, and the outermost object."""
    nodes: list[_Node] = []
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    value: _Node | None = None
    operations: Iterable[tuple[Any, Any, Any]] = genops(body[begin:])
    for opcode, argument, at in operations:
        op = ord(opcode.code)
        if value is not None:
            value.end, value = begin + at, None
        if len(nodes) > 4 * MAX_PARTS:  # these include keys and names, which `learn` leaves out
            raise _NotATemplate
        if op in FIXED_NBYTES or op in SIZED:
            value = _Node(_VALUE, argument, begin + at)
            stack.append(value)
            nodes.append(value)
        elif op == MEMOIZE:
            if stack[-1].__class__ is _Node and stack[-1].kind in (dict, list, tuple):
                raise _NotATemplate  # the body may fetch the container again
            memo.append(stack[-1])
        elif op == BINGET:
            stack.append(memo[argument])
        elif op == MARK:
            marks.append(stack)
            stack = []
        elif op == STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            if (_claim_constant_text(module), _claim_constant_text(name)) != ("builtins", "format"):
                raise _NotATemplate
            stack.append(_REFERENCE)
        elif op == REDUCE:
            arguments = stack.pop()
            if stack.pop() is not _REFERENCE:
                raise _NotATemplate
            nodes.remove(arguments)
            stack.append(_Node(_TENSOR, _claim_constant_text(arguments.content[0])))
            nodes.append(stack[-1])
        elif op == EMPTY_DICT or op == EMPTY_LIST:
            stack.append(_Node(dict if op == EMPTY_DICT else list, ()))
            if body[begin + at + 1] != MARK:
                nodes.append(stack[-1])
        elif op == SETITEMS or op == APPENDS:
            items, stack = stack, marks.pop()
            target = stack[-1]
            if target.content or target in nodes:
                raise _NotATemplate
            if op == SETITEMS:
                target.keys = tuple(map(_claim_constant_text, items[::2]))
            target.content = items if op == APPENDS else items[1::2]
            nodes.append(target)
        elif op in (EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE):
            if op == TUPLE:
                items, stack = stack, marks.pop()
            else:
                first = len(stack) - (0 if op == EMPTY_TUPLE else op - TUPLE1 + 1)
                items = stack[first:]
                del stack[first:]
            stack.append(_Node(tuple, items))
            nodes.append(stack[-1])
        elif op != STOP or len(stack) != 1:
            raise _NotATemplate
    return nodes, stack[0]


def _claim_constant_text(part: Any) -> str:
    """Return the string of a part, and mark the part as constant: all skeletons of the template have the same string there."""
    if part.__class__ is not _Node or part.kind not in (_VALUE, None) or part.content.__class__ is not str:
        raise _NotATemplate
    part.kind = None
    return str(part.content)
