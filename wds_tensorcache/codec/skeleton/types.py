"""The listed types of FORMAT.md 2.5: each is written as one REDUCE of a stock global on plain arguments.

One row per type holds both directions, so that what is written is what is read. A row's arguments are canonical, the same
on every Python version, and `build` accepts nothing that could run code, open a file or allocate more than it was given.
"""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from fractions import Fraction
from itertools import product
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.skeleton.builders import Builder
from wds_tensorcache.codec.tree import shown

__all__ = ["BUILDERS", "FACTORIES", "LISTED", "Listed", "numpy_dtype_arguments", "torch_dtype_name"]

_DECIMALS = Context(capitals=1)  # str(Decimal) depends on the thread's context
MAX_BITS = 4096  # the greatest common divisor of longer numbers takes seconds, and the length of a range is a quotient


@dataclass(frozen=True, slots=True)
class Listed:
    """How one type is written: the global `module.name`, and the arguments it is called with."""

    module: str
    name: str
    arguments: Callable[[Any], tuple[Any, ...]]


def _checked(make: Callable[..., Any], *kinds: Any, optional: int = 0) -> Callable[[tuple[Any, ...]], Any]:
    """Return a `build` that calls `make` with arguments of exactly these classes; the last `optional` may be left out."""
    allowed = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    counts = range(len(allowed) - optional, len(allowed) + 1)
    signatures = {signature for count in counts for signature in product(*allowed[:count])}

    def build(args: tuple[Any, ...]) -> Any:
        if tuple(map(type, args)) not in signatures:
            expected = ", ".join(" or ".join(cls.__name__ for cls in classes) for classes in allowed)
            raise TypeError(f"arguments {', '.join(map(shown, args))}; expected {expected or 'none'}")
        return make(*args)

    return build


def _path(cls: type) -> Callable[[tuple[Any, ...]], Any]:
    def build(args: tuple[Any, ...]) -> Any:
        if len(args) > 255 or any(type(arg) is not str for arg in args):
            raise TypeError(f"a {cls.__name__} of {len(args)} parts, expected at most 255 texts")
        return cls(*args)

    return build


def _short(*numbers: int) -> tuple[int, ...]:
    if max(map(int.bit_length, numbers)) > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits; store the numbers that it is made of")
    return numbers


# datetime's own pickles hold its fields as bytes and the C constructor trusts them: they are read field by field instead
def _date(raw: bytes) -> date:
    _check_length(raw, 4)
    return date(raw[0] << 8 | raw[1], raw[2], raw[3])


def _time(raw: bytes, tz: timezone | None = None) -> time:
    _check_length(raw, 6)
    return time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:], "big"), tz, fold=raw[0] >> 7)


def _datetime(raw: bytes, tz: timezone | None = None) -> datetime:
    _check_length(raw, 10)
    day = raw[0] << 8 | raw[1], raw[2] & 0x7F, raw[3]
    return datetime(*day, raw[4], raw[5], raw[6], int.from_bytes(raw[7:], "big"), tz, fold=raw[2] >> 7)


def _check_length(raw: bytes, nbytes: int) -> None:
    if len(raw) != nbytes:
        raise TypeError(f"{len(raw)} bytes, expected {nbytes}")


def _tz_arguments(value: Any) -> tuple[Any, ...]:
    if value.tzinfo is not None and value.tzinfo.__class__ is not timezone:
        raise ValueError(
            f"{type(value.tzinfo).__name__} reads the host's time zones; use value.astimezone(timezone.utc)"
        )
    return tuple(value.__reduce_ex__(4)[1])


def _timedelta(days: int, seconds: int, microseconds: int) -> timedelta:
    if not (0 <= seconds < 86_400 and 0 <= microseconds < 1_000_000):
        raise ValueError("a timedelta has fewer seconds than a day, and fewer microseconds than a second")
    return timedelta(days, seconds, microseconds)


def _deque(*args: Any) -> deque[Any]:
    if len(args) == 1 or (args and args[0]):
        raise TypeError("a deque is built empty, with its maximal length")
    return deque(*args)


FACTORIES: dict[type, str] = {cls: cls.__name__ for cls in (list, dict, set, int, float, str, tuple, bool)}


def _build_defaultdict(args: tuple[Any, ...]) -> Any:
    if args and (len(args) > 1 or args[0].__class__ is not Builder or args[0].factory is None):
        raise TypeError(f"a defaultdict's factory is left out, or one of {', '.join(FACTORIES.values())}")
    return defaultdict(*(arg.factory for arg in args))


def _refuse_factory(args: tuple[Any, ...]) -> Any:
    raise TypeError("only a defaultdict's factory may be named here")


def _size(sizes: tuple[Any, ...]) -> torch.Size:
    if any(size.__class__ is not int for size in sizes):
        raise TypeError("a torch.Size is a tuple of ints")
    return torch.Size(sizes)


_DEVICE = re.compile(r"[a-z]{2,20}", re.ASCII)


def _device(kind: str, *index: int) -> torch.device:
    if not _DEVICE.fullmatch(kind) or (index and not 0 <= index[0] < 128):
        raise ValueError(f"unknown device {kind!r:.80}")
    return torch.device(kind, *index)


_UNIT = r"(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)"
_is_unit = re.compile(_UNIT, re.ASCII).fullmatch
_is_numpy_dtype = re.compile(
    rf"[<>|=]?(?:[?bB]|b1|[iu][1248]|f[248]|c8|c16|[SU]\d{{1,9}}|[mM]8\[{_UNIT}\])", re.ASCII
).fullmatch


def _numpy_dtype(text: str) -> Any:
    if not _is_numpy_dtype(text):
        raise ValueError(f"{shown(text)} is not a plain numpy dtype")
    return np.dtype(text)


def numpy_dtype_arguments(value: Any) -> tuple[str]:
    """Return the argument that `numpy.dtype` is called with.

    Raises:
        ValueError: A record, an object dtype, or one that carries metadata.
    """
    if not _is_numpy_dtype(value.str) or value.metadata is not None:
        raise ValueError(f"numpy dtype {value} is a record or an object dtype")
    return (value.str,)


def _scalar(cls: Any, kind: type) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        with np.errstate(over="raise", invalid="ignore"):
            scalar = cls(value)
        if kind is int and int(scalar) != value:  # numpy before 2 wraps around
            raise OverflowError(f"{value} in a {cls.__name__}")
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
    if unit == "generic":
        raise ValueError(f"{value!r} has no unit")
    return int(value.view("i8")), unit if count == 1 else f"{count}{unit}"


def _slice_arguments(value: slice) -> tuple[Any, ...]:
    parts = (value.start, value.stop, value.step)
    if any(part.__class__ not in (int, type(None)) for part in parts):
        raise TypeError("its start, stop and step are not all ints or None")
    return parts


def torch_dtype_name(value: torch.dtype) -> str:
    """Return the attribute of `torch` that `value` is."""
    return str(value).removeprefix("torch.")


# type, how it is named, its arguments, how it is built from them
_Row = tuple[Any, str, str, Callable[[Any], tuple[Any, ...]], Callable[[tuple[Any, ...]], Any]]


def _rows() -> Iterator[_Row]:
    yield complex, "builtins", "complex", lambda v: (v.real, v.imag), _checked(complex, float, float)
    yield slice, "builtins", "slice", _slice_arguments, _checked(slice, *[(int, type(None))] * 3)
    yield (
        range,
        "builtins",
        "range",
        lambda v: _short(v.start, v.stop, v.step),
        _checked(lambda *v: range(*_short(*v)), int, int, int),
    )
    yield Decimal, "decimal", "Decimal", lambda v: (_DECIMALS.to_sci_string(v),), _checked(Decimal, str)
    yield (
        Fraction,
        "fractions",
        "Fraction",
        lambda v: _short(v.numerator, v.denominator),
        _checked(lambda *v: Fraction(*_short(*v)), int, int),
    )
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


LISTED: dict[type, Listed] = {}
BUILDERS: dict[tuple[str, str], object] = {
    ("builtins", "bytearray"): Builder(_checked(bytearray, bytes)),  # protocol 4 has no opcode for it
    ("collections", "defaultdict"): Builder(_build_defaultdict),
    ("numpy", "dtype"): Builder(_checked(_numpy_dtype, str)),
    ("builtins", "Ellipsis"): ...,
}
for _cls, _module, _name, _arguments, _build in _rows():
    LISTED[_cls] = Listed(_module, _name, _arguments)
    BUILDERS.setdefault(
        (_module, _name), Builder(_build, is_deque=_cls is deque)
    )  # numpy.longlong is written, and comes back, as numpy.int64
for _cls, _name in FACTORIES.items():
    BUILDERS.setdefault(("builtins", _name), Builder(_refuse_factory, factory=_cls))
for _name, _value in vars(torch).items():
    if isinstance(_value, torch.dtype):
        BUILDERS["torch", _name] = _value
# where Python 3.13 and 3.14 say that these classes live
for _name in ("PurePosixPath", "PureWindowsPath"):
    BUILDERS["pathlib._local", _name] = BUILDERS["pathlib", _name]
