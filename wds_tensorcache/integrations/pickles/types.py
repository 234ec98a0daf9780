"""The types of FORMAT.md as pickles of the protocols 2 to 5 name them, which differs from the names in skeletons."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from wds_tensorcache.codec.skeleton.opcodes import NEWOBJ
from wds_tensorcache.codec.skeleton.types import ALLOW_ONLY, BUILDERS, FACTORIES, Allowed, Builder
from wds_tensorcache.codec.tree import shown
from wds_tensorcache.errors import FormatError, UnsafeSkeletonError

_PYTHON_2 = {"int": "long", "str": "unicode"}  # the names in protocol 2
_BITS = 128
_as_factory: Any = BUILDERS["builtins", "list"]


class UuidReader:
    """The opcodes that build UUIDs, which pickles contain as an object and its state. Threads: one reader a pickle."""

    def __init__(self) -> None:
        self._empty: dict[int, uuid.UUID] = {}  # by id; kept, so that no id is reused

    def create(self, stack: list[Any], allow: Allowed, num_callables: int) -> int:
        """Run NEWOBJ: replace a class and its arguments by an object without state; return how many builders were called."""
        if stack[-2] is not _UUID:
            return ALLOW_ONLY[NEWOBJ](stack, allow, num_callables)
        if stack.pop() != ():
            raise FormatError("a UUID is created with arguments, expected none")
        stack[-1] = made = object.__new__(uuid.UUID)
        self._empty[id(made)] = made
        return 1

    def fill(self, target: uuid.UUID, state: Any) -> None:
        """Run BUILD: set the state of an object that `create` has made."""
        if self._empty.pop(id(target), None) is None:
            raise UnsafeSkeletonError("the state of a UUID is set twice")
        number = state.get("int") if state.__class__ is dict and state.keys() <= {"int", "is_safe"} else None
        if number.__class__ is not int or not 0 <= number < 1 << _BITS:
            raise FormatError(f"the state of a UUID is {shown(state)}, expected a number of {_BITS} bits")
        # A UUID refuses changes, so its own `__init__` does this, too.
        object.__setattr__(target, "int", number)
        object.__setattr__(target, "is_safe", uuid.SafeUUID.unknown)

    def check(self) -> None:
        """Raise FormatError if an object has no state."""
        if self._empty:
            raise FormatError("a UUID has no number")


def _refuse_call(args: tuple[Any, ...]) -> Any:
    raise TypeError(f"a UUID is called with {', '.join(map(shown, args))}, expected NEWOBJ")


def _build_encoded(cls: Callable[[bytes], Any], args: tuple[Any, ...]) -> Any:
    """Build bytes or a bytearray from the Latin-1 text that pickles of protocol 2 contain in their place."""
    text, *encoding = args or ("", "latin1")
    if text.__class__ is bytes and not encoding:
        return cls(text)
    if text.__class__ is not str or encoding != ["latin1"]:
        raise TypeError(f"cannot build bytes from {shown(text)}, expected Latin-1 text")
    return cls(text.encode("latin1"))


_UUID = Builder(_refuse_call)
PICKLED_TYPES: dict[tuple[str, str], object] = {
    **BUILDERS,
    ("_codecs", "encode"): Builder(partial(_build_encoded, bytes)),
    ("__builtin__", "bytes"): Builder(partial(_build_encoded, bytes)),
    ("__builtin__", "bytearray"): Builder(partial(_build_encoded, bytearray)),
    ("__builtin__", "complex"): BUILDERS["builtins", "complex"],
    ("__builtin__", "slice"): BUILDERS["builtins", "slice"],
    ("__builtin__", "xrange"): BUILDERS["builtins", "range"],
    ("__builtin__", "Ellipsis"): ...,
    ("uuid", "UUID"): _UUID,
    **{
        ("__builtin__", _PYTHON_2.get(name, name)): Builder(_as_factory.build, factory=cls)
        for cls, name in FACTORIES.items()
    },
}
