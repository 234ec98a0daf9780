"""An interpreter of skeletons, for the pickle subset of FORMAT.md 2.4.

A skeleton is the pickle of a sample. Python's own unpickler is unsafe even if `find_class` allows only listed names. It builds
any object that its opcodes reach, allocates as much memory as the input claims to need, and lets callables escape as values.
Here, each fetched callable must be called, or be the factory of a defaultdict. Builders check their arguments, and a length
must not exceed the remaining bytes. To audit the reader, read this file, `types.py`, `limits.py` and `template.py`. A template
reads a body only if this file has accepted an equal body with other plain values.
"""

from __future__ import annotations

import pickletools
from collections import defaultdict, deque
from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Any, NoReturn

from wds_tensorcache.codec.skeleton.limits import (
    LONG_TEXT,
    MAX_DEFAULTDICTS,
    MAX_DEPTH,
    MAX_DEQUES,
    TEXTS,
    add_key_parts,
    call_budget,
    call_cost,
    check_depth,
)
from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.skeleton.types import (
    ALLOW_ONLY,
    BUILDERS,
    REFERENCE,
    Allowed,
    Builder,
    find_global,
    refuse_callables,
)
from wds_tensorcache.codec.tree import DICTS, shown
from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError

_FLOAT = Struct(">d").unpack_from
_INT32 = Struct("<i").unpack_from
_UINT32 = Struct("<I").unpack_from
_UINT64 = Struct("<Q").unpack_from
# Opcodes that create a container. A body with at most `MAX_DEPTH` such bytes cannot nest deeper, so it needs no walk.
_NESTING = bytes(
    (*SHORT_TUPLES.values(), TUPLE, EMPTY_LIST, EMPTY_DICT, EMPTY_SET, FROZENSET, REDUCE, NEWOBJ, NEWOBJ_EX)
)
_END_OF_REFERENCE = bytes((TUPLE1, REDUCE))
_TAKING = frozenset((SETITEMS, SETITEM, APPENDS, APPEND, TUPLE, FROZENSET, ADDITEMS, POP_MARK))
_LISTS = (list, deque)


def unpickle(pickled: bytes | memoryview, begin: int, reference: Callable[[str], object], allow: Allowed) -> Any:
    """Build the object that the body of a skeleton, `pickled[begin:]`, describes.

    `reference` returns the tensor for the string of a reference, for example `"tensor:image"`. The caller trusts the classes in
    `allow` with arbitrary arguments and state.

    Raises:
        UnsafeSkeletonError: An opcode or a global is outside the subset.
        FormatError: The bytes break any other rule.
    """
    body = bytes(pickled)
    try:
        result = _run(body, begin, reference, allow)
        if len(body) - len(body.translate(None, _NESTING)) > MAX_DEPTH:
            check_depth(result)
        return result
    except TensorCacheError:
        raise
    except (IndexError, StructError) as exc:
        raise FormatError(
            "the skeleton ends inside an opcode, or an opcode takes more than its stack or memo contains"
        ) from exc
    except Exception as exc:  # a builder refused its arguments, or a class in allow= refused its state
        raise FormatError(f"the objects of the skeleton cannot be built: {type(exc).__name__}: {exc}") from exc


def _run(body: bytes, pos: int, reference: Callable[[str], object], allow: Allowed) -> Any:
    size = len(body)
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each MARK
    memo: list[Any] = []
    more = ALLOW_ONLY if allow else {}
    callables = 0  # builders that were pushed but neither called nor passed to a defaultdict yet
    argument_budget = call_budget(size - pos)
    num_key_parts = num_deques = num_defaultdicts = 0
    has_long_texts = False
    push = stack.append

    # one loop step per opcode, common opcodes first
    while True:
        op = body[pos]
        pos += 1
        if op == SHORT_BINUNICODE:
            end = pos + 1 + body[pos]
            raw = body[pos + 1 : end]
            push(raw.decode() if raw.isascii() else read_text(raw))
            pos = end
        elif op == BININT1:
            push(body[pos])
            pos += 1
        elif op == BINGET or op == LONG_BINGET:
            if op == BINGET:
                value = memo[body[pos]]
                pos += 1
            else:
                value = memo[_UINT32(body, pos)[0]]
                pos += 4
            if (
                value is REFERENCE
                and body[pos] == SHORT_BINUNICODE
                and body[(end := pos + 2 + body[pos + 1]) : end + 2] == _END_OF_REFERENCE
            ):
                # a reference as our writer writes it (string, TUPLE1, REDUCE): one step instead of four
                push(reference(read_text(body[pos + 2 : end])))
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
                    f"REDUCE at byte {pos - 1} calls {shown(builder)} with {shown(args)}; "
                    "expected a listed callable and a tuple"
                )
            callables -= 1 + _is_factory(args)  # only the builder of defaultdict accepts a callable
            if builder is REFERENCE:
                if len(args) != 1 or args[0].__class__ is not str:
                    raise FormatError(f"a reference takes one string, got {', '.join(map(shown, args))}")
                stack[-1] = reference(args[0])
            else:
                argument_budget -= call_cost(args)
                if builder.counted is not None:
                    num_deques += builder.counted is deque
                    num_defaultdicts += builder.counted is defaultdict
                if argument_budget < 0 or num_deques > MAX_DEQUES or num_defaultdicts > MAX_DEFAULTDICTS:
                    raise FormatError(
                        f"the calls of the skeleton copy too much, or build more than {MAX_DEQUES} deques or "
                        f"{MAX_DEFAULTDICTS} defaultdicts"
                    )
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
        elif op in _TAKING:
            if op == SETITEM or op == APPEND:
                count = 2 if op == SETITEM else 1
                items = stack[-count:]
                del stack[-count:]
            else:  # all items since the last MARK
                items, stack = stack, outer.pop()
                push = stack.append
            if op == SETITEMS or op == SETITEM:
                target = stack[-1]
                if target.__class__ not in DICTS and target.__class__ not in allow.values():
                    raise FormatError(f"SETITEMS at byte {pos - 1} on a {type(target).__name__}; expected a dict")
                keys = items[::2]
                if not TEXTS.issuperset(map(type, keys)) or (
                    has_long_texts and max(map(len, keys), default=0) >= LONG_TEXT
                ):
                    num_key_parts = add_key_parts(num_key_parts, keys)
                for key, value in zip(keys, items[1::2], strict=True):
                    target[key] = value
            elif op == APPENDS or op == APPEND:
                target = stack[-1]
                if target.__class__ not in _LISTS and target.__class__ not in allow.values():
                    raise FormatError(
                        f"APPENDS at byte {pos - 1} on a {type(target).__name__}; expected a list or deque"
                    )
                extend = getattr(target, "extend", None)
                if extend is not None:
                    extend(items)
                else:  # an instance of a class in allow=, with `append` alone
                    for item in items:
                        target.append(item)
            elif op == TUPLE:
                push(tuple(items))
            elif op == FROZENSET:
                num_key_parts = add_key_parts(num_key_parts, items)
                push(frozenset(items))
            elif op == ADDITEMS:
                target = stack[-1]
                if target.__class__ is not set:
                    raise FormatError(f"ADDITEMS at byte {pos - 1} on a {type(target).__name__}; expected a set")
                num_key_parts = add_key_parts(num_key_parts, items)
                target.update(items)
        elif op == TUPLE2:
            stack[-2:] = [(stack[-2], stack[-1])]
        elif op == TUPLE3:
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif op == EMPTY_TUPLE:
            push(())
        elif op in CONSTANTS:
            push(CONSTANTS[op])
        elif op in SIZED:
            width, make = SIZED[op]
            begin = pos + width
            end = begin + int.from_bytes(body[pos:begin], "little")
            if end > size or begin > size:
                raise FormatError(
                    f"the opcode at byte {pos - 1} declares {end - begin} bytes, but {max(0, size - begin)} are left"
                )
            push(make(body[begin:end]))
            has_long_texts = has_long_texts or make is read_text
            pos = end
        elif op == EMPTY_SET:
            push(set())
        elif op == STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            value = find_global(module, name, BUILDERS, allow)
            if value.__class__ is Builder:
                callables += 1
            push(value)
        elif op == POP:
            stack.pop()
        elif op == FRAME:
            if pos + 8 + _UINT64(body, pos)[0] > size:
                raise FormatError(f"the frame at byte {pos - 1} ends after the skeleton")
            pos += 8
        elif op == STOP:
            break
        elif op in more:
            callables -= more[op](stack, allow, callables)
        else:
            _refuse(op, pos - 1)
    if pos != size:
        raise FormatError(
            f"{size - pos} bytes follow the end of the skeleton" if pos < size else "the skeleton is truncated"
        )
    if len(stack) != 1 or outer:
        raise FormatError("the stack must contain exactly one object, and no MARK, at the end of the skeleton")
    # each call uses up one fetched callable; the call of a defaultdict also uses up its factory
    if callables:
        raise UnsafeSkeletonError("the skeleton uses a callable as a value, or never calls it")
    return stack[0]


def _is_factory(args: tuple[Any, ...]) -> bool:
    """Return whether the only argument is a builder, a defaultdict's factory."""
    return len(args) == 1 and args[0].__class__ is Builder


def _refuse(op: int, pos: int) -> NoReturn:
    names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    hint = (
        "for classes that you trust, pass allow=[…]" if op in ALLOW_ONLY else "write the sample with tc.encode_sample"
    )
    raise UnsafeSkeletonError(
        f"opcode {names.get(op, hex(op))} at byte {pos} is not in the format (FORMAT.md 2.4); {hint}"
    )
