"""Skeletons that differ from an earlier one in plain values alone: compared with it instead of being interpreted.

The samples of a cache mostly have one structure: the same opcodes, with other numbers and texts between them. A template
is a skeleton that the interpreter has read, cut at those values. One that agrees with it byte for byte everywhere else has
the same opcodes and so passes the same checks; its containers are built anew from its own values. Anything that does not
agree, or holds more than dicts, lists, tuples, plain values and references, is left to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from struct import error as StructError
from typing import Any

__all__ = ["MAX_LEARNT", "MISS", "Template", "assemble", "learn", "taker"]

MISS: Any = object()
MAX_LEARNT = 8
MAX_PARTS = 100  # beyond, building from a template is no faster than interpreting
_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_FIXED = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1}  # opcodes of plain values by their length
_SIZED = {0x8C: 1, 0x58: 4, 0x43: 1, 0x42: 4, 0x8A: 1}  # … and by the width of their length field


@dataclass(frozen=True, slots=True)
class Template:
    """A skeleton's body without its plain values.

    Attributes:
        segments: The bytes before each value, and those behind the last.
        references: Their texts, in order.
        containers: (type, keys of a dict, which of what was made so far it takes), inner ones first. Values come first
            in that count, then the tensors, then the containers.
    """

    segments: tuple[bytes, ...]
    references: tuple[str, ...]
    containers: tuple[tuple[type, Any, Any], ...]

    def match(self, body: bytes, pos: int) -> Any:
        """Return the values of a skeleton, whose preamble ends at `pos`; `MISS` if it is not of this template."""
        try:
            return self._match(body, pos)
        except (IndexError, StructError, UnicodeDecodeError):
            return MISS  # cut short, or damaged: for the interpreter to say

    def build(self, made: list[Any]) -> Any:
        """Return the object whose values and then tensors are in `made`, which is used up."""
        return assemble(self.containers, made)

    def _match(self, body: bytes, pos: int) -> Any:
        values: list[Any] = []
        append = values.append
        segments = self.segments
        # one step per value
        for segment in segments[:-1]:
            if not body.startswith(segment, pos):
                return MISS
            pos += len(segment)
            op = body[pos]
            if op == 0x8C:  # SHORT_BINUNICODE
                end = pos + 2 + body[pos + 1]
                append(body[pos + 2 : end].decode())
                pos = end
            elif op == 0x4B:  # BININT1
                append(body[pos + 1])
                pos += 2
            elif op == 0x4D:  # BININT2
                append(body[pos + 1] | body[pos + 2] << 8)
                pos += 3
            elif op == 0x47:  # BINFLOAT
                append(_FLOAT(body, pos + 1)[0])
                pos += 9
            elif op == 0x4A:  # BININT
                append(_INT32(body, pos + 1)[0])
                pos += 5
            elif op in _CONSTANTS:
                append(_CONSTANTS[op])
                pos += 1
            elif op in _SIZED:  # BINUNICODE, SHORT_BINBYTES, BINBYTES, LONG1
                first = pos + 1 + _SIZED[op]
                pos = first + int.from_bytes(body[pos + 1 : first], "little")
                raw = body[first:pos]
                append(
                    raw.decode() if op == 0x58 else int.from_bytes(raw, "little", signed=True) if op == 0x8A else raw
                )
            else:
                return MISS
        return values if body[pos:] == segments[-1] else MISS


def assemble(containers: Iterable[tuple[type, Any, Any]], made: list[Any]) -> Any:
    """Make each container of what is in `made`, to which it is added; return the last. As `Template.containers`."""
    for kind, keys, take in containers:
        if kind is dict:
            made.append(dict(zip(keys, take(made), strict=True)))
        else:
            made.append(kind(take(made)))
    return made[-1]


@dataclass(slots=True, eq=False)
class _Value:
    """An opcode of a plain value while a body is taken apart; `fixed` if it is a key, or names a global or a tensor."""

    begin: int
    end: int
    fixed: bool = False


@dataclass(slots=True, eq=False)
class _Tensor:
    text: str


@dataclass(slots=True, eq=False)
class _Container:
    kind: type
    items: list[Any]
    keys: list[Any]


class _Unlike(Exception):
    """The body holds more than a template can."""


def learn(body: bytes, begin: int) -> Template | None:
    """Return the template of a body that the interpreter has read; None if it holds more than a template can."""
    try:
        parts, root = _take_apart(body, begin)
    except (_Unlike, IndexError, UnicodeDecodeError):
        return None
    values = [part for part in parts if isinstance(part, _Value) and not part.fixed]
    tensors = [part for part in parts if isinstance(part, _Tensor)]
    containers = [part for part in parts if isinstance(part, _Container)]
    if not containers or root is not containers[-1] or len(values) + len(containers) > MAX_PARTS:
        return None
    order = {id(part): index for index, part in enumerate([*values, *tensors, *containers])}
    if any(id(item) not in order for container in containers for item in container.items):
        return None  # a text that is a key here and a value there
    cuts = [begin, *(edge for value in values for edge in (value.begin, value.end)), len(body)]
    segments = tuple(body[first:last] for first, last in zip(cuts[::2], cuts[1::2], strict=True))
    steps = tuple((part.kind, tuple(part.keys), taker([order[id(item)] for item in part.items])) for part in containers)
    return Template(segments, tuple(tensor.text for tensor in tensors), steps)


def taker(indices: list[int]) -> Callable[[list[Any]], Iterable[Any]]:
    """Return what takes the items at `indices` out of a list."""
    if not indices:
        return lambda made: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda made: (made[index],)
    return itemgetter(*indices)


def _take_apart(body: bytes, pos: int) -> tuple[list[Any], Any]:
    """Return every value, tensor and finished container of a body in order, and the one that is the sample."""
    parts: list[Any] = []
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    while True:
        if len(parts) > 4 * MAX_PARTS:  # keys and names count too, until they are known to be
            raise _Unlike
        op = body[pos]
        if op in _FIXED or op in _SIZED:
            width = _SIZED.get(op)
            size = _FIXED.get(op) or 1 + width + int.from_bytes(body[pos + 1 : pos + 1 + width], "little")  # type: ignore[operator]
            stack.append(_Value(pos, pos + size))
            parts.append(stack[-1])
            pos += size
            continue
        pos += 1
        if op == 0x94:  # MEMOIZE
            if isinstance(stack[-1], _Container):
                raise _Unlike  # may be referred to twice
            memo.append(stack[-1])
        elif op == 0x68:  # BINGET
            stack.append(memo[body[pos]])
            pos += 1
        elif op == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if _constant(body, module) != "builtins" or _constant(body, name) != "format":
                raise _Unlike
            stack.append(_REFERENCE)
        elif op == 0x52:  # REDUCE
            arguments = stack.pop()
            if stack.pop() is not _REFERENCE:
                raise _Unlike
            parts.remove(arguments)
            stack.append(_Tensor(_constant(body, arguments.items[0])))
            parts.append(stack[-1])
        elif op == 0x7D or op == 0x5D:  # EMPTY_DICT, EMPTY_LIST
            stack.append(_Container(dict if op == 0x7D else list, [], []))
            if body[pos] != 0x28:
                parts.append(stack[-1])
        elif op == 0x75 or op == 0x65:  # SETITEMS, APPENDS
            items, stack = stack, marks.pop()
            target = stack[-1]
            if target.items or target in parts:
                raise _Unlike
            target.items = items if op == 0x65 else items[1::2]
            target.keys = [] if op == 0x65 else [_constant(body, key) for key in items[::2]]
            parts.append(target)
        elif op in (0x29, 0x85, 0x86, 0x87, 0x74):  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
            if op == 0x74:
                items, stack = stack, marks.pop()
            else:
                count = 0 if op == 0x29 else op - 0x84
                items = stack[len(stack) - count :]
                del stack[len(stack) - count :]
            stack.append(_Container(tuple, items, []))
            parts.append(stack[-1])
        elif op == 0x2E and len(stack) == 1:  # STOP
            return parts, stack[0]
        else:
            raise _Unlike


_REFERENCE = object()


def _constant(body: bytes, value: Any) -> str:
    """Return the text that `value` is in every skeleton of the template."""
    if not isinstance(value, _Value) or body[value.begin] != 0x8C:
        raise _Unlike
    value.fixed = True
    return body[value.begin + 2 : value.end].decode()
