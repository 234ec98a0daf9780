"""What a skeleton may call: builders of listed types, and the classes in allow=, both ways (FORMAT.md 2.4, 2.7)."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from wds_tensorcache.codec.skeleton.opcodes import BUILD, NEWOBJ, NEWOBJ_EX, REDUCE
from wds_tensorcache.codec.skeleton.refusals import at
from wds_tensorcache.codec.tree import walk
from wds_tensorcache.errors import EncodeError, FormatError, UnsafeSkeletonError

__all__ = ["ALLOW_ONLY", "MAX_DEQUES", "Builder", "Operation", "allow_table", "reduction", "refuse_callables"]

MAX_DEQUES = 1000


class Builder:
    """A callable that a skeleton may REDUCE: `build` gets the argument tuple and checks every argument itself."""

    __slots__ = ("build", "cls", "factory", "is_deque")

    def __init__(
        self,
        build: Callable[[tuple[Any, ...]], Any],
        *,
        cls: type | None = None,
        factory: type | None = None,
        is_deque: bool = False,
    ) -> None:
        self.build = build
        self.cls = cls  # opted in by `allow=`: may be NEWOBJ'd
        self.factory = factory  # may be a defaultdict's factory, and nothing else
        self.is_deque = is_deque  # counted: freeing deques that hold deques overflows C's stack


def allow_table(allow: Iterable[type]) -> dict[tuple[str, str], type]:
    """Return the classes of an `allow=` argument by module and qualified name.

    Raises:
        TypeError: Something in it is not a class.
    """
    table = {}
    for cls in allow:
        if not isinstance(cls, type):
            raise TypeError(f"allow= takes classes, got {cls!r}")
        table[cls.__module__, cls.__qualname__] = cls
    return table


def _instantiate(stack: list[Any], kwargs: Any, callables: int) -> int:
    args = stack.pop()
    builder = stack[-1]
    if builder.__class__ is not Builder or builder.cls is None:
        raise UnsafeSkeletonError("NEWOBJ of something that is not a class in allow=")
    if args.__class__ is not tuple or kwargs.__class__ is not dict:
        raise FormatError("NEWOBJ needs a tuple of arguments")
    refuse_callables((args, kwargs), callables - 1)  # the class is one of them
    stack[-1] = builder.cls.__new__(builder.cls, *args, **kwargs)
    return 1


def _set_state(stack: list[Any], allow: Mapping[tuple[str, str], type], callables: int) -> int:
    state = stack.pop()
    target = stack[-1]
    refuse_callables(state, callables)
    # Hazard: classes and members of Enums belong to the process; a state would patch them for all of its code.
    if type(target) not in allow.values() or isinstance(target, Enum):
        raise UnsafeSkeletonError(f"BUILD on a {type(target).__name__}, which is not an instance of a class in allow=")
    setstate = getattr(type(target), "__setstate__", None)
    if setstate is not None:
        setstate(target, state)
        return 0
    slots = None
    if state.__class__ is tuple and len(state) == 2:
        state, slots = state
    for attributes in (state, slots):
        if attributes is None:
            continue
        if attributes.__class__ is not dict or any(key.__class__ is not str for key in attributes):
            raise FormatError(f"the state of a {type(target).__name__} is not a dict of attributes")
    if state:
        target.__dict__.update(state)
    for name, value in (slots or {}).items():
        if name.startswith("__"):
            raise UnsafeSkeletonError(f"the state of a {type(target).__name__} sets {name}")
        object.__setattr__(target, name, value)
    return 0


# gets the stack, `allow`, and how many callables are fetched and not yet called; returns how many it has called
Operation = Callable[[list[Any], Mapping[tuple[str, str], type], int], int]
ALLOW_ONLY: dict[int, Operation] = {
    NEWOBJ: lambda stack, allow, callables: _instantiate(stack, {}, callables),
    NEWOBJ_EX: lambda stack, allow, callables: _instantiate(stack, stack.pop(), callables),
    BUILD: _set_state,
}


def refuse_callables(arguments: Any, outstanding: int) -> None:
    """Raise UnsafeSkeletonError if a class in allow= would be handed a callable of this file.

    `outstanding` callables are fetched and not yet called: with none, none can be in any argument, and a walk over all that
    many objects share would only take long.
    """
    if outstanding and any(value.__class__ is Builder for value, _ in walk(arguments)):
        raise UnsafeSkeletonError("the skeleton uses a callable as a value")


def reduction(value: Any, path: str) -> tuple[int, Any, Any, Any, Any, Any]:
    """Return the opcode that makes `value`, which is at `path`, its arguments and keywords, and its state, items and pairs.

    Raises:
        EncodeError: Something other than its class makes it.
    """
    cls = type(value)
    reduced: Any = value.__reduce_ex__(4)
    parts: list[Any] = [*reduced, *[None] * 6] if type(reduced) is tuple else [None] * 6
    function, arguments, state, items, pairs, setter = parts[:6]
    keywords = None
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function, *arguments = arguments
        opcode = NEWOBJ
    elif function is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        function, arguments, keywords = arguments
        opcode = NEWOBJ_EX
    else:
        opcode = REDUCE
    if function is not cls or setter is not None:
        raise EncodeError(
            f"{at(path)}: {cls.__qualname__} is pickled by {function!r}, which allow= cannot cover; store its fields"
        )
    return opcode, arguments, keywords, state, items, pairs
