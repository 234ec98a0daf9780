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

from wds_tensorcache.codec.skeleton.opcodes import *

__all__ = ["MAX_LEARNT", "MISS", "Template", "assemble", "learn", "taker"]

MISS: Any = object()
MAX_LEARNT = 8
MAX_PARTS = 100  # beyond, building from a template is no faster than interpreting
_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
_SIZED = {code: LENGTH_NBYTES[code] for code in (SHORT_BINUNICODE, BINUNICODE, SHORT_BINBYTES, BINBYTES, LONG1)}


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
            elif op in _SIZED:  # BINUNICODE, SHORT_BINBYTES, BINBYTES, LONG1
                first = pos + 1 + _SIZED[op]
                pos = first + int.from_bytes(body[pos + 1 : first], "little")
                raw = body[first:pos]
                append(
                    raw.decode()
                    if op == BINUNICODE
                    else int.from_bytes(raw, "little", signed=True)
                    if op == LONG1
                    else raw
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
        if op in FIXED_NBYTES or op in _SIZED:
            width = _SIZED.get(op, 0)
            size = (
                1
                + width
                + (FIXED_NBYTES[op] if not width else int.from_bytes(body[pos + 1 : pos + 1 + width], "little"))
            )
            stack.append(_Value(pos, pos + size))
            parts.append(stack[-1])
            pos += size
            continue
        pos += 1
        if op == MEMOIZE:
            if isinstance(stack[-1], _Container):
                raise _Unlike  # may be referred to twice
            memo.append(stack[-1])
        elif op == BINGET:
            stack.append(memo[body[pos]])
            pos += 1
        elif op == MARK:
            marks.append(stack)
            stack = []
        elif op == STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            if _constant(body, module) != "builtins" or _constant(body, name) != "format":
                raise _Unlike
            stack.append(_REFERENCE)
        elif op == REDUCE:
            arguments = stack.pop()
            if stack.pop() is not _REFERENCE:
                raise _Unlike
            parts.remove(arguments)
            stack.append(_Tensor(_constant(body, arguments.items[0])))
            parts.append(stack[-1])
        elif op == EMPTY_DICT or op == EMPTY_LIST:
            stack.append(_Container(dict if op == EMPTY_DICT else list, [], []))
            if body[pos] != MARK:
                parts.append(stack[-1])
        elif op == SETITEMS or op == APPENDS:
            items, stack = stack, marks.pop()
            target = stack[-1]
            if target.items or target in parts:
                raise _Unlike
            target.items = items if op == APPENDS else items[1::2]
            target.keys = [] if op == APPENDS else [_constant(body, key) for key in items[::2]]
            parts.append(target)
        elif op in (EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE):
            if op == TUPLE:
                items, stack = stack, marks.pop()
            else:
                count = 0 if op == EMPTY_TUPLE else op - TUPLE1 + 1
                items = stack[len(stack) - count :]
                del stack[len(stack) - count :]
            stack.append(_Container(tuple, items, []))
            parts.append(stack[-1])
        elif op == STOP and len(stack) == 1:
            return parts, stack[0]
        else:
            raise _Unlike


_REFERENCE = object()


def _constant(body: bytes, value: Any) -> str:
    """Return the text that `value` is in every skeleton of the template."""
    if not isinstance(value, _Value) or body[value.begin] != SHORT_BINUNICODE:
        raise _Unlike
    value.fixed = True
    return body[value.begin + 2 : value.end].decode()
