"""Types that skeletons may name: listed types and `allow=` (FORMAT.md 2.5, 2.7).

A *listed* type is in the table of FORMAT.md 2.5. Its objects are written as calls of the type, except `Ellipsis` and dtypes of
torch. `_rows` has a row for each other type, except `defaultdict` and `numpy.dtype`. A row contains a function that returns the
arguments to write, which are the same on every Python version. It also contains the *builder*, which makes the object from the
arguments that were read. Builders refuse all arguments that could run code, open a file, or allocate more memory than the
arguments themselves take.
"""

from __future__ import annotations

import copyreg
import re
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from enum import Enum
from fractions import Fraction
from itertools import product
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TIME_UNIT
from wds_tensorcache.codec.skeleton.limits import MAX_BITS
from wds_tensorcache.codec.skeleton.opcodes import BUILD, NEWOBJ, NEWOBJ_EX, REDUCE
from wds_tensorcache.codec.tree import shown, walk
from wds_tensorcache.errors import FormatError, UnsafeSkeletonError

_DECIMALS = Context(capitals=1)  # str(Decimal) depends on the thread's context

Allowed = Mapping[tuple[str, str], type]
"""Classes that the caller trusts, by (module, qualified name)."""


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """A callable that a skeleton may name."""

    build: Callable[[tuple[Any, ...]], Any]  # function of the argument tuple; it checks every argument
    cls: type | None = None  # class in `allow=`, which NEWOBJ may instantiate
    factory: type | None = None  # class that a skeleton may name only as the factory of a defaultdict
    counted: type | None = None  # `deque` or `defaultdict`; freeing many nested objects overflows C's stack


# module and name of the global that is called to build an object of one type, and the function that returns the arguments
Listed = tuple[str, str, Callable[[Any], tuple[Any, ...]]]


def allow_table(allow: Iterable[type]) -> dict[tuple[str, str], type]:
    """Return classes in `allow=` by name, without listed types (FORMAT.md 2.7). Raise TypeError unless all are classes."""
    if isinstance(allow, type):
        raise TypeError(f"allow= takes a list of classes, got {allow!r}")
    table = {}
    for cls in allow:
        if not isinstance(cls, type):
            raise TypeError(f"allow= takes classes, got {cls!r}")
        key = cls.__module__, cls.__qualname__
        # A listed type in this table would be built without a check of its arguments.
        if not (key in BUILDERS or cls in LISTED or cls in _NEVER_CALLED or issubclass(cls, np.dtype)):
            table[key] = cls
    return table


def refuse_reference(text: Any) -> NoReturn:
    raise FormatError(f"the pickle is a skeleton: it refers to {text!r:.100}, but its tensors are missing")


REFERENCE = Builder(refuse_reference)  # `_run` resolves references itself


def find_global(module: Any, name: Any, builders: Mapping[tuple[str, str], object], allow: Allowed) -> Any:
    """Return the builder or value of a global in `builders` or `allow`.

    Raises:
        UnsafeSkeletonError: Neither `builders` nor `allow` contains the global, or its name is not a string.
    """
    if module.__class__ is not str or name.__class__ is not str:
        raise UnsafeSkeletonError("the module or the name of a global is not a string")
    key = (module, name)
    if key == ("builtins", "format"):
        return REFERENCE
    if key in builders:
        return builders[key]
    cls = allow.get(key)
    if cls is not None:
        return Builder(lambda args: cls(*args), cls=cls)
    needs = f"{module:.80}.{name:.80}"
    error = UnsafeSkeletonError(
        f"the skeleton needs {needs!r}, which is not allowed; pass allow=[…] only if you trust the file"
    )
    error.needs = needs
    raise error


def reduction(value: Any) -> tuple[int, Any, Any, Any, Any, Any]:
    """Return `value.__reduce_ex__` as opcode, arguments, keywords, state, items and pairs.

    Raises:
        ValueError: `__reduce_ex__` names a callable other than the class of `value`, or a function that sets the state.
    """
    cls = type(value)
    reduced: Any = value.__reduce_ex__(4)
    parts = (*(reduced if type(reduced) is tuple else ()), *[None] * 6)
    function, arguments, state, items, pairs, setter = parts[:6]
    opcode, keywords = REDUCE, None
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        opcode, (function, *arguments) = NEWOBJ, arguments
    elif function is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        opcode, (function, arguments, keywords) = NEWOBJ_EX, arguments
    if function is not cls or setter is not None:
        raise ValueError(f"{cls.__qualname__} is pickled by {function!r}, which allow= cannot cover; store its fields")
    return opcode, arguments, keywords, state, items, pairs


def refuse_callables(arguments: Any, num_callables: int) -> None:
    """Raise UnsafeSkeletonError if `arguments` of an allowed class contain a `Builder`.

    `num_callables` is the number of builders that were fetched but not called yet.
    """
    # without such builders, there is no walk: it would be slow if many calls share their arguments
    if num_callables and any(value.__class__ is Builder for value, _ in walk(arguments)):
        raise UnsafeSkeletonError("the skeleton uses a callable as a value")


def _instantiate(stack: list[Any], kwargs: Any, num_callables: int) -> int:
    args = stack.pop()
    builder = stack[-1]
    if builder.__class__ is not Builder or builder.cls is None:
        raise UnsafeSkeletonError("NEWOBJ must be called on a class in allow=")
    if args.__class__ is not tuple or kwargs.__class__ is not dict:
        raise FormatError("NEWOBJ must be called with a tuple of arguments, and NEWOBJ_EX also with a dict")
    refuse_callables((args, kwargs), num_callables - 1)  # not counting the class itself
    stack[-1] = builder.cls.__new__(builder.cls, *args, **kwargs)
    return 1


def _set_state(stack: list[Any], allow: Allowed, num_callables: int) -> int:
    state = stack.pop()
    target = stack[-1]
    refuse_callables(state, num_callables)
    name = type(target).__name__
    # The whole process shares classes and the members of Enums, so a state would change them for all of its code.
    if type(target) not in allow.values() or isinstance(target, Enum):
        raise UnsafeSkeletonError(f"BUILD on a {name}; expected an instance of a class in allow=, but not of an Enum")
    setstate = getattr(type(target), "__setstate__", None)
    if setstate is not None:
        setstate(target, state)
        return 0
    attributes, slots = state if state.__class__ is tuple and len(state) == 2 else (state, None)
    for part in (attributes, slots):
        if part is not None and (part.__class__ is not dict or any(key.__class__ is not str for key in part)):
            raise FormatError(f"the state of a {name} is not a dict of attributes")
    if attributes:
        target.__dict__.update(attributes)
    for slot, value in (slots or {}).items():
        if slot.startswith("__"):
            raise UnsafeSkeletonError(f"the state of a {name} sets {slot}")
        object.__setattr__(target, slot, value)
    return 0


# Function of the stack, `allow`, and the number of builders not called yet. Returns how many builders it called.
Operation = Callable[[list[Any], Allowed, int], int]
ALLOW_ONLY: dict[int, Operation] = {
    NEWOBJ: lambda stack, allow, num_callables: _instantiate(stack, {}, num_callables),
    NEWOBJ_EX: lambda stack, allow, num_callables: _instantiate(stack, stack.pop(), num_callables),
    BUILD: _set_state,
}


def _checked(make: Callable[..., Any], *kinds: Any, optional: int = 0) -> Callable[[tuple[Any, ...]], Any]:
    """Return a `Builder.build` that calls `make` if the arguments have these classes. The last `optional` may be missing."""
    allowed = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    counts = range(len(allowed) - optional, len(allowed) + 1)
    signatures = {signature for count in counts for signature in product(*allowed[:count])}

    def build(args: tuple[Any, ...]) -> Any:
        if tuple(map(type, args)) not in signatures:
            expected = ", ".join(" or ".join(cls.__name__ for cls in classes) for classes in allowed)
            raise TypeError(f"got the arguments ({', '.join(map(shown, args))}), expected ({expected})")
        return make(*args)

    return build


def _path(cls: type) -> Callable[[tuple[Any, ...]], Any]:
    def build(args: tuple[Any, ...]) -> Any:
        if len(args) > 255 or any(type(arg) is not str for arg in args):
            raise TypeError(f"a {cls.__name__} has {len(args)} arguments, expected at most 255 strings")
        return cls(*args)

    return build


def _short(*numbers: int) -> tuple[int, ...]:
    if max(map(int.bit_length, numbers)) > MAX_BITS:
        raise ValueError(f"one of its numbers has more than {MAX_BITS} bits; store the numbers themselves")
    return numbers


# C constructors trust the bytes of datetime's own pickles, so the fields are passed one by one, which checks them.
def _date(raw: bytes) -> date:
    high, low, month, day = raw
    return date(high << 8 | low, month, day)


def _time(raw: bytes, tz: timezone | None = None) -> time:
    hour, minute, second, a, b, c = raw
    return time(hour & 0x7F, minute, second, a << 16 | b << 8 | c, tz, fold=hour >> 7)


def _datetime(raw: bytes, tz: timezone | None = None) -> datetime:
    high, low, month, day, hour, minute, second, a, b, c = raw
    microsecond = a << 16 | b << 8 | c
    return datetime(high << 8 | low, month & 0x7F, day, hour, minute, second, microsecond, tz, fold=month >> 7)


def _tz_arguments(value: Any) -> tuple[Any, ...]:
    if value.tzinfo is not None and value.tzinfo.__class__ is not timezone:
        raise ValueError(
            f"its tzinfo, a {type(value.tzinfo).__name__}, reads the host's time zones; use value.astimezone(timezone.utc)"
        )
    return tuple(value.__reduce_ex__(4)[1])


def _timedelta(days: int, seconds: int, microseconds: int) -> timedelta:
    if not (0 <= seconds < 86_400 and 0 <= microseconds < 1_000_000):
        raise ValueError("the seconds of a timedelta must be 0 to 86,399, and its microseconds 0 to 999,999")
    return timedelta(days, seconds, microseconds)


def _deque(*args: Any) -> deque[Any]:
    if len(args) == 1 or (args and args[0]):
        raise TypeError("a deque must be created empty: with no arguments, or with () and its maxlen")
    return deque(*args)


FACTORIES: dict[type, str] = {cls: cls.__name__ for cls in (list, dict, set, int, float, str, tuple, bool)}


def _build_defaultdict(args: tuple[Any, ...]) -> Any:
    if args and (len(args) > 1 or args[0].__class__ is not Builder or args[0].factory is None):
        raise TypeError(f"a defaultdict's factory must be absent or one of {', '.join(FACTORIES.values())}")
    return defaultdict(*(arg.factory for arg in args))


def _refuse_factory(args: tuple[Any, ...]) -> Any:
    raise TypeError("this class may only be the factory of a defaultdict, and must not be called")


def _size(sizes: tuple[Any, ...]) -> torch.Size:
    if any(size.__class__ is not int or not -1 << 63 <= size < 1 << 63 for size in sizes):
        raise TypeError("the items of a torch.Size must be ints from -2^63 to 2^63 - 1")
    return torch.Size(sizes)


_DEVICE = re.compile(r"[a-z]{2,20}", re.ASCII)


def _device(kind: str, *index: int) -> torch.device:
    if not _DEVICE.fullmatch(kind) or (index and not 0 <= index[0] < 128):
        raise ValueError(f"unknown device {kind!r:.80}")
    return torch.device(kind, *index)


_is_unit = re.compile(TIME_UNIT, re.ASCII).fullmatch
_is_numpy_dtype = re.compile(
    rf"[<>|=]?(?:[?bB]|b1|[iu][1248]|f[248]|c8|c16|[SU]\d{{1,9}}|[mM]8\[{TIME_UNIT}\])", re.ASCII
).fullmatch


def _numpy_dtype(text: str) -> Any:
    if not _is_numpy_dtype(text):
        raise ValueError(f"{shown(text)} is not a plain numpy dtype")
    return np.dtype(text)


def _numpy_dtype_arguments(value: Any) -> tuple[str]:
    if not _is_numpy_dtype(value.str) or value.metadata:
        raise ValueError(f"the format cannot represent {value!r:.200}; store str(x)")
    return (value.str,)


# Not in `LISTED`, because each numpy dtype has its own class.
NUMPY_DTYPE: Listed = "numpy", "dtype", _numpy_dtype_arguments


def _scalar(cls: Any, kind: type) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        with np.errstate(over="raise", invalid="ignore"):
            scalar = cls(value)
        if kind is int and int(scalar) != value:  # numpy 1 wraps around without an error
            raise OverflowError(f"{value} does not fit into a numpy.{cls.__name__}")
        return scalar

    return make


def _time_scalar(cls: Any) -> Callable[[int, str], Any]:
    def make(count: int, unit: str) -> Any:
        if not _is_unit(unit):
            raise ValueError(f"unknown unit {unit!r:.80}")
        return cls(count, unit)

    return make


def _time_scalar_arguments(value: Any) -> tuple[int, str]:
    unit, count = np.datetime_data(value.dtype)
    unit = unit if count == 1 else f"{count}{unit}"
    if not _is_unit(unit):
        raise ValueError(
            f"{value!r} has no unit, or 10^9 units or more; give it another, for example x.astype('m8[s]')"
        )
    return int(value.view("i8")), unit


def _slice_arguments(value: slice) -> tuple[Any, ...]:
    parts = (value.start, value.stop, value.step)
    if any(part.__class__ not in (int, type(None)) for part in parts):
        raise TypeError("its start, stop and step are not all ints or None")
    return parts


# (type, module, name, function that returns the arguments to write, `Builder.build` that makes an object from them)
_Row = tuple[Any, str, str, Callable[[Any], tuple[Any, ...]], Callable[[tuple[Any, ...]], Any]]


def _rows() -> Iterator[_Row]:
    yield complex, "builtins", "complex", lambda v: (v.real, v.imag), _checked(complex, float, float)
    yield slice, "builtins", "slice", _slice_arguments, _checked(slice, *[(int, type(None))] * 3)
    bounds = _checked(lambda *v: range(*_short(*v)), int, int, int)
    yield range, "builtins", "range", lambda v: _short(v.start, v.stop, v.step), bounds
    yield Decimal, "decimal", "Decimal", lambda v: (_DECIMALS.to_sci_string(v),), _checked(Decimal, str)
    quotient = _checked(lambda *v: Fraction(*_short(*v)), int, int)
    yield Fraction, "fractions", "Fraction", lambda v: _short(v.numerator, v.denominator), quotient
    yield date, "datetime", "date", lambda v: v.__reduce__()[1], _checked(_date, bytes)
    yield time, "datetime", "time", _tz_arguments, _checked(_time, bytes, timezone, optional=1)
    yield datetime, "datetime", "datetime", _tz_arguments, _checked(_datetime, bytes, timezone, optional=1)
    days = _checked(_timedelta, int, int, int)
    yield timedelta, "datetime", "timedelta", lambda v: (v.days, v.seconds, v.microseconds), days
    zone = _checked(timezone, timedelta, str, optional=1)
    yield timezone, "datetime", "timezone", lambda v: v.__getinitargs__(), zone
    yield uuid.UUID, "uuid", "UUID", lambda v: (str(v),), _checked(uuid.UUID, str)
    for path in (PurePosixPath, PureWindowsPath):
        yield path, "pathlib", path.__name__, lambda v: (str(v),), _path(path)
    yield OrderedDict, "collections", "OrderedDict", lambda v: (), _checked(OrderedDict)
    empty = _checked(_deque, tuple, int, optional=2)
    yield deque, "collections", "deque", lambda v: () if v.maxlen is None else ((), v.maxlen), empty
    yield torch.Size, "torch", "Size", lambda v: (tuple(v),), _checked(_size, tuple)
    yield torch.device, "torch", "device", lambda v: v.__reduce__()[1], _checked(_device, str, int, optional=1)
    for kinds, cls in (("?", bool), ("bhilqBHILQ", int), ("efd", float), ("FD", complex), ("U", str), ("S", bytes)):
        for scalar in dict.fromkeys(np.dtype(kind).type for kind in kinds):
            name = scalar.__name__ if kinds in "?US" else np.dtype(scalar).name
            name = "bool_" if scalar is np.bool_ else name  # numpy 1 has no numpy.bool
            yield scalar, "numpy", name, lambda v: (v.item(),), _checked(_scalar(scalar, cls), cls)
    for scalar in (np.datetime64, np.timedelta64):
        build = _checked(_time_scalar(scalar), int, str)
        yield scalar, "numpy", scalar.__name__, _time_scalar_arguments, build


_NEVER_CALLED = frozenset({bytes, frozenset, type(None), type(...), torch.dtype})  # listed types that no global calls
LISTED: dict[type, Listed] = {}
BUILDERS: dict[tuple[str, str], object] = {
    ("builtins", "bytearray"): Builder(_checked(bytearray, bytes, optional=1)),  # protocol 4 has no opcode for it
    ("collections", "defaultdict"): Builder(_build_defaultdict, counted=defaultdict),
    ("numpy", "dtype"): Builder(_checked(_numpy_dtype, str)),
    ("builtins", "Ellipsis"): ...,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
for _cls, _module, _name, _arguments, _build in _rows():
    LISTED[_cls] = _module, _name, _arguments
    # numpy.longlong is written, and comes back, as numpy.int64
    BUILDERS.setdefault((_module, _name), Builder(_build, counted=deque if _cls is deque else None))
for _cls, _name in FACTORIES.items():
    BUILDERS.setdefault(("builtins", _name), Builder(_refuse_factory, factory=_cls))
# In pickles of Python 3.13, these classes have this module.
for _name in ("PurePosixPath", "PureWindowsPath"):
    BUILDERS["pathlib._local", _name] = BUILDERS["pathlib", _name]
