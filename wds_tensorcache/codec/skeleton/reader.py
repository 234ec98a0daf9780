"""Skeleton bytes to objects: an interpreter of the pickle subset in FORMAT.md 2.4, with nothing else in it.

Python's own unpickler is not used. Allow-listing its `find_class` is not safety: it builds any object that its opcodes can
reach, reserves memory that the input only announces, and lets callables escape as values. Here a callable never leaves
this file: whatever is fetched must be called by the next REDUCE, each builder checks its arguments, and lengths are
compared with the bytes that are there before anything is built. This file is meant to be audited alone.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from struct import Struct
from struct import error as StructError
from typing import Any, NoReturn

from wds_tensorcache.codec.skeleton.builders import ALLOW_ONLY, MAX_DEQUES, Builder, Operation, refuse_callables
from wds_tensorcache.codec.skeleton.calls import call_budget, call_cost
from wds_tensorcache.codec.skeleton.hashing import KeyTables
from wds_tensorcache.codec.skeleton.key_costs import SHORT_TEXT, are_few_texts
from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.tree import MAX_DEPTH, check_depth, shown
from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError

__all__ = ["unpickle"]

_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
_UINT32 = Struct("<I").unpack_from
_UINT64 = Struct("<Q").unpack_from
# every opcode that can put one container into another; absent or rare ones cannot have nested 200 deep
_NESTING = bytes(
    (*SHORT_TUPLES.values(), TUPLE, EMPTY_LIST, EMPTY_DICT, EMPTY_SET, FROZENSET, REDUCE, NEWOBJ, NEWOBJ_EX)
)
_END_OF_REFERENCE = bytes((TUPLE1, REDUCE))
_DICTS = (dict, OrderedDict, defaultdict)


def unpickle(
    pickled: bytes | memoryview,
    begin: int,
    reference: Callable[[str], object],
    builders: Mapping[tuple[str, str], object],
    allow: Mapping[tuple[str, str], type],
    more: Mapping[int, Operation] | None = None,
) -> Any:
    """Return the object that `pickled[begin:]` describes.

    Args:
        pickled: The skeleton; `begin` is behind its PROTO opcode or its preamble.
        reference: Called with the text of each tensor reference, `"tensor:NAME"`.
        builders: (module, name) to a `Builder`, or to an immutable value that the name stands for.
        allow: Classes that the caller trusts to be built from arbitrary arguments and state.
        more: Opcodes that are not always in the subset; None for those of classes in `allow`, if there are any.

    Raises:
        UnsafeSkeletonError: An opcode or a global outside the subset.
        FormatError: Anything else that is not a skeleton.
    """
    body = bytes(pickled)
    try:
        result = _run(body, begin, reference, builders, allow, (ALLOW_ONLY if allow else {}) if more is None else more)
        if len(body) - len(body.translate(None, _NESTING)) > MAX_DEPTH:
            check_depth(result)
        return result
    except TensorCacheError:
        raise
    except (IndexError, StructError) as exc:
        raise FormatError("the skeleton ends inside an opcode, or its stack or memo is too short") from exc
    except Exception as exc:  # a builder refused its arguments, or a class in allow= its state
        raise FormatError(f"the skeleton cannot be built: {type(exc).__name__}: {exc}") from exc


def _run(
    body: bytes,
    pos: int,
    reference: Callable[[str], object],
    builders: Mapping[tuple[str, str], object],
    allow: Mapping[tuple[str, str], type],
    more: Mapping[int, Operation],
) -> Any:
    size = len(body)
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each MARK
    memo: list[Any] = []
    callables = 0  # Builders pushed and not yet called, alone or as the one argument that a defaultdict takes
    tables = KeyTables(size - pos)
    argument_budget = call_budget(size - pos)
    num_deques = 0
    has_long_texts = False
    push = stack.append

    # one Python loop step per opcode, the commonest opcodes first
    while True:
        op = body[pos]
        pos += 1
        if op == SHORT_BINUNICODE:
            end = pos + 1 + body[pos]
            raw = body[pos + 1 : end]
            push(raw.decode() if raw.isascii() else _text(raw))
            pos = end
        elif op == BININT1:
            push(body[pos])
            pos += 1
        elif op == BINGET:
            value = memo[body[pos]]
            pos += 1
            if (
                value is REFERENCE
                and body[pos] == SHORT_BINUNICODE
                and body[(end := pos + 2 + body[pos + 1]) : end + 2] == _END_OF_REFERENCE
            ):
                # a reference as it is written: its text, TUPLE1, REDUCE; four steps in one
                push(reference(_text(body[pos + 2 : end])))
                pos = end + 2
                continue
            if value.__class__ is Builder or (value.__class__ is tuple and _is_factory(value)):
                callables += 1
            push(value)
        elif op == MARK:
            outer.append(stack)
            stack = []
            push = stack.append
        elif op == MEMOIZE:
            memo.append(stack[-1])
        elif op == TUPLE1:
            stack[-1] = (stack[-1],)
        elif op == REDUCE:
            args = stack.pop()
            builder = stack[-1]
            if builder.__class__ is not Builder or args.__class__ is not tuple:
                raise UnsafeSkeletonError(
                    f"REDUCE at byte {pos - 1} calls {shown(builder)}, which is not a listed callable"
                )
            callables -= 1 + _is_factory(args)  # no builder but a defaultdict's takes a callable
            if builder is REFERENCE:
                if len(args) != 1 or args[0].__class__ is not str:
                    raise FormatError(f"a reference takes one string, got {', '.join(map(shown, args))}")
                stack[-1] = reference(args[0])
            else:
                argument_budget -= call_cost(args)
                num_deques += builder.is_deque
                if argument_budget < 0 or num_deques > MAX_DEQUES:
                    raise FormatError(f"calls with too much to copy, or more than {MAX_DEQUES} deques")
                if builder.cls is not None:
                    refuse_callables(args, callables + _is_factory(args))
                stack[-1] = builder.build(args)
        elif op == BINFLOAT:
            push(_FLOAT(body, pos)[0])
            pos += 8
        elif op == BININT2:
            push(body[pos] | body[pos + 1] << 8)
            pos += 2
        elif op == BININT:
            push(_INT32(body, pos)[0])
            pos += 4
        elif op == EMPTY_DICT:
            push({})
        elif op == EMPTY_LIST:
            push([])
        elif op == SETITEMS or op == SETITEM:
            if op == SETITEMS:
                items, stack = stack, outer.pop()
                push = stack.append
            else:
                items = stack[-2:]
                del stack[-2:]
            target = stack[-1]
            if target.__class__ not in _DICTS and target.__class__ not in allow.values():
                raise FormatError(f"SETITEMS at byte {pos - 1} on a {type(target).__name__}")
            keys = items[::2]
            if not are_few_texts(keys, len(target) if isinstance(target, dict) else 0) or (
                has_long_texts and max(map(len, keys), default=0) > SHORT_TEXT
            ):
                tables.add(target, keys)
            for key, value in zip(keys, items[1::2], strict=True):
                target[key] = value
        elif op == APPENDS or op == APPEND:
            if op == APPENDS:
                items, stack = stack, outer.pop()
                push = stack.append
            else:
                items = [stack.pop()]
            target = stack[-1]
            if (
                target.__class__ is not list
                and target.__class__ is not deque
                and target.__class__ not in allow.values()
            ):
                raise FormatError(f"APPENDS at byte {pos - 1} on a {type(target).__name__}")
            target.extend(items)
        elif op == TUPLE2:
            stack[-2:] = [(stack[-2], stack[-1])]
        elif op == TUPLE3:
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif op == TUPLE:
            items, stack = stack, outer.pop()
            push = stack.append
            push(tuple(items))
        elif op == EMPTY_TUPLE:
            push(())
        elif op == NONE:
            push(None)
        elif op == NEWTRUE:
            push(True)
        elif op == NEWFALSE:
            push(False)
        elif op in _LENGTH_FIELDS:
            width, make = _LENGTH_FIELDS[op]
            begin = pos + width
            end = begin + int.from_bytes(body[pos:begin], "little")
            if end > size or begin > size:
                raise FormatError(
                    f"the opcode at byte {pos - 1} announces {end - begin} bytes, {size - begin} are left"
                )
            push(make(body[begin:end]))
            has_long_texts = has_long_texts or make is _text
            pos = end
        elif op == LONG_BINGET:
            value = memo[_UINT32(body, pos)[0]]
            pos += 4
            if value.__class__ is Builder or (value.__class__ is tuple and _is_factory(value)):
                callables += 1
            push(value)
        elif op == EMPTY_SET:
            push(set())
        elif op == ADDITEMS or op == FROZENSET:
            items, stack = stack, outer.pop()
            push = stack.append
            if op == FROZENSET:
                tables.add(None, items)
                push(frozenset(items))
            elif stack[-1].__class__ is set:
                tables.add(stack[-1], items)
                stack[-1].update(items)
            else:
                raise FormatError(f"ADDITEMS at byte {pos - 1} on a {type(stack[-1]).__name__}")
        elif op == STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            value = _find(module, name, builders, allow)
            if value.__class__ is Builder:
                callables += 1
            push(value)
        elif op == POP:
            stack.pop()
        elif op == POP_MARK:
            stack = outer.pop()
            push = stack.append
        elif op == FRAME:
            if pos + 8 + _UINT64(body, pos)[0] > size:
                raise FormatError(f"the frame at byte {pos - 1} is longer than the skeleton")
            pos += 8
        elif op == STOP:
            break
        elif op in more:
            callables -= more[op](stack, allow, callables)
        else:
            _refuse(op, pos - 1)
    if pos != size:
        raise FormatError(
            f"{size - pos} bytes behind the end of the skeleton" if pos < size else "the skeleton is cut short"
        )
    if len(stack) != 1 or outer:
        raise FormatError("the skeleton leaves more or less than one object")
    # every call has used up one of the callables that were fetched, and a defaultdict's its factory
    if callables:
        raise UnsafeSkeletonError("the skeleton uses a callable as a value, or never calls it")
    return stack[0]


def _is_factory(args: tuple[Any, ...]) -> bool:
    """Return whether these are the arguments of a defaultdict, its factory."""
    return len(args) == 1 and args[0].__class__ is Builder


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


_MAKERS: dict[int, Callable[[bytes], Any]] = {
    **dict.fromkeys((BINUNICODE, BINUNICODE8), _text),
    **dict.fromkeys((SHORT_BINBYTES, BINBYTES, BINBYTES8), bytes),
    **dict.fromkeys((LONG1, LONG4), _integer),
    BYTEARRAY8: bytearray,
}
_LENGTH_FIELDS = {code: (LENGTH_NBYTES[code], make) for code, make in _MAKERS.items()}


def _find(
    module: Any, name: Any, builders: Mapping[tuple[str, str], object], allow: Mapping[tuple[str, str], type]
) -> Any:
    if module.__class__ is not str or name.__class__ is not str:
        raise UnsafeSkeletonError("a global is named by something other than strings")
    key = (module, name)
    if key == ("builtins", "format"):
        return REFERENCE
    cls = allow.get(key)
    if cls is not None:
        return Builder(lambda args: cls(*args), cls=cls)
    if key in builders:
        return builders[key]
    needs = f"{module:.80}.{name:.80}"
    error = UnsafeSkeletonError(
        f"the skeleton needs {needs!r}, which is not allowed; pass allow=[…] only if you trust the file"
    )
    error.needs = needs
    raise error


def _refuse(op: int, pos: int) -> NoReturn:
    names = {ord(known.code): known.name for known in pickletools.opcodes}
    hint = (
        "for classes that you trust, pass allow=[…]" if op in ALLOW_ONLY else "write the sample with tc.encode_sample"
    )
    raise UnsafeSkeletonError(
        f"opcode {names.get(op, hex(op))} at byte {pos} is outside the format, FORMAT.md 2.4; {hint}"
    )


def _build_reference(args: tuple[Any, ...]) -> NoReturn:
    raise FormatError("a reference has no place here")


REFERENCE = Builder(_build_reference)
