"""How an instance of a class in allow= is written (FORMAT.md 2.7)."""

from __future__ import annotations

import copyreg
from typing import Any

from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.refusals import at
from wds_tensorcache.errors import EncodeError

__all__ = ["reduction"]


def reduction(value: Any, path: str) -> tuple[bytes, Any, Any, Any, Any, Any]:
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
        opcode = op.NEWOBJ
    elif function is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        function, arguments, keywords = arguments
        opcode = op.NEWOBJ_EX
    else:
        opcode = op.REDUCE
    if function is not cls or setter is not None:
        raise EncodeError(
            f"{at(path)}: {cls.__qualname__} is pickled by {function!r}, which allow= cannot cover; store its fields"
        )
    return opcode, arguments, keywords, state, items, pairs
