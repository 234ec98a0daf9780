"""What to tell somebody whose value the format cannot hold."""

from __future__ import annotations

import io
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wds_tensorcache.errors import EncodeError

__all__ = ["at", "checked_arguments", "remedy"]

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def remedy(value: Any) -> str:
    """Return why `value` is refused, and what to store instead."""
    cls = type(value)
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, _CODE):
        return f"{value!r:.80} is code; store its name and look it up when reading"
    if isinstance(value, io.IOBase):
        return f"an open file, {name}; store its path or its bytes"
    if isinstance(value, os.PathLike):
        return f"a {name} belongs to one system; store str(x), or PurePosixPath(x)"
    if isinstance(value, (Iterator, *_VIEWS)):
        return f"a {name} is used up by one reading; store list(x)"
    if isinstance(value, memoryview):
        return "a memoryview belongs to other memory; store bytes(x)"
    if cls.__module__.split(".")[0] == "PIL":
        return f"a {name} is an image; write it as a member of its own, e.g. 'png', or store np.asarray(x)"
    for base in (dict, list, tuple, set, frozenset, str, bytes, int, float):
        if isinstance(value, base):
            return f"{name} is no plain {base.__name__}; store {base.__name__}(x), or pass allow=[{cls.__name__}]"
    if isinstance(value, Mapping):  # NumPy's NpzFile, say
        return f"{name} is no dict; store dict(x)"
    return f"{name} is not a type of the format; store plain values, or pass allow=[{cls.__name__}] when writing and reading"


def at(path: str) -> str:
    """Return how an error names the place it is about."""
    return f"value at {path!r}" if path else "the sample"


def checked_arguments(arguments: Callable[[Any], tuple[Any, ...]], value: Any, path: str) -> tuple[Any, ...]:
    """Return what `arguments` makes of `value`, which is at `path`; raise EncodeError where it refuses."""
    try:
        return arguments(value)
    except (TypeError, ValueError) as exc:
        raise EncodeError(f"{at(path)}: {type(value).__name__} cannot be stored: {exc}") from exc
