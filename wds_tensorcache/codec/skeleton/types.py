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
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.skeleton.builders import Builder
from wds_tensorcache.codec.tree import shown

__all__ = ["BUILDERS", "FACTORIES", "LISTED", "Listed", "numpy_dtype_arguments", "torch_dtype_name"]

_DECIMALS = Context(capitals=1)  # str(Decimal) depends on the thread's context
MAX_FRACTION_BITS = 4096  # the greatest common divisor of longer numbers takes seconds
MAX_RANGE_BITS = 4096  # the length of a range is a quotient


@dataclass(frozen=True, slots=True)
class Listed:
    """How one type is written: the global `module.name`, and the arguments it is called with."""

    module: str
    name: str
    arguments: Callable[[Any], tuple[Any, ...]]


def _plain(*classes: type) -> Callable[[tuple[Any, ...]], None]:
    def check(args: tuple[Any, ...]) -> None:
        for arg in args:
            if arg.__class__ not in classes:
                raise TypeError(f"{shown(arg)} is not one of {', '.join(cls.__name__ for cls in classes)}")

    return check


def _checked(cls: type, *classes: type, counts: tuple[int, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """Return a `build` that calls `cls` with arguments of exactly these classes, and as many as `counts` has."""
    check = _plain(*classes)

    def build(args: tuple[Any, ...]) -> Any:
        if len(args) not in counts:
            raise TypeError(f"{cls.__name__} with {len(args)} arguments")
        check(args)
        return cls(*args)

    return build


def _build_fraction(args: tuple[Any, ...]) -> Fraction:
    numerator, denominator = args
    _plain(int)(args)
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a Fraction of more than {MAX_FRACTION_BITS} bits")
    return Fraction(numerator, denominator)


def _fraction_arguments(value: Fraction) -> tuple[int, int]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a Fraction of more than {MAX_FRACTION_BITS} bits; store its numerator and denominator")
    return value.numerator, value.denominator


def _range_arguments(value: range) -> tuple[int, int, int]:
    parts = (value.start, value.stop, value.step)
    if max(map(int.bit_length, parts)) > MAX_RANGE_BITS:
        raise ValueError(f"a range of numbers of more than {MAX_RANGE_BITS} bits; store its three numbers")
    return parts


def _build_range(args: tuple[Any, ...]) -> range:
    start, stop, step = args
    _plain(int)(args)
    if max(map(int.bit_length, args)) > MAX_RANGE_BITS:
        raise ValueError(f"a range of numbers of more than {MAX_RANGE_BITS} bits")
    return range(start, stop, step)


# datetime's own pickles hold its fields as bytes and the C constructor trusts them: they are read field by field instead
def _build_date(args: tuple[Any, ...]) -> date:
    (raw,) = args
    if raw.__class__ is not bytes or len(raw) != 4:
        raise TypeError("a date is 4 bytes")
    return date(raw[0] << 8 | raw[1], raw[2], raw[3])


def _build_time(args: tuple[Any, ...]) -> time:
    raw, tz = _clock(args, 6)
    return time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:6], "big"), tz, fold=raw[0] >> 7)


def _build_datetime(args: tuple[Any, ...]) -> datetime:
    raw, tz = _clock(args, 10)
    microsecond = int.from_bytes(raw[7:10], "big")
    return datetime(
        raw[0] << 8 | raw[1], raw[2] & 0x7F, raw[3], raw[4], raw[5], raw[6], microsecond, tz, fold=raw[2] >> 7
    )


def _clock(args: tuple[Any, ...], nbytes: int) -> tuple[bytes, timezone | None]:
    raw, *zones = args
    tz = zones[0] if zones else None
    if (
        raw.__class__ is not bytes
        or len(raw) != nbytes
        or len(zones) > 1
        or any(z.__class__ is not timezone for z in zones)
    ):
        raise TypeError(f"expected {nbytes} bytes and a datetime.timezone")
    return raw, tz


def _tz_arguments(value: Any) -> tuple[Any, ...]:
    if value.tzinfo is not None and value.tzinfo.__class__ is not timezone:
        raise ValueError(
            f"{type(value.tzinfo).__name__} reads the host's time zones; use value.astimezone(timezone.utc)"
        )
    return tuple(value.__reduce_ex__(4)[1])


def _build_timedelta(args: tuple[Any, ...]) -> timedelta:
    days, seconds, microseconds = args
    _plain(int)(args)
    if not (0 <= seconds < 86_400 and 0 <= microseconds < 1_000_000):
        raise ValueError("a timedelta has fewer seconds than a day, and fewer microseconds than a second")
    return timedelta(days, seconds, microseconds)


def _build_timezone(args: tuple[Any, ...]) -> timezone:
    offset, *name = args
    if offset.__class__ is not timedelta or len(name) > 1:
        raise TypeError("a timezone is a timedelta and a name")
    _plain(str)(tuple(name))
    return timezone(offset, *name)


def _build_deque(args: tuple[Any, ...]) -> Any:
    if args and (len(args) != 2 or args[0].__class__ is not tuple or args[0] or args[1].__class__ is not int):
        raise TypeError("a deque is built empty, with its maximal length")
    return deque(*args)


FACTORIES: dict[type, str] = {cls: cls.__name__ for cls in (list, dict, set, int, float, str, tuple, bool)}


def _build_defaultdict(args: tuple[Any, ...]) -> Any:
    if not args:
        return defaultdict()
    (factory,) = args
    if factory.__class__ is not Builder or factory.factory is None:
        raise TypeError(f"a defaultdict's factory is left out, or one of {', '.join(FACTORIES.values())}")
    return defaultdict(factory.factory)


def _refuse_factory(args: tuple[Any, ...]) -> Any:
    raise TypeError("only a defaultdict's factory may be named here")


def _build_size(args: tuple[Any, ...]) -> torch.Size:
    (sizes,) = args
    if sizes.__class__ is not tuple:
        raise TypeError("a torch.Size is a tuple of ints")
    _plain(int)(sizes)
    return torch.Size(sizes)


_DEVICE = re.compile(r"[a-z]{2,20}", re.ASCII)


def _build_device(args: tuple[Any, ...]) -> torch.device:
    kind, *index = args
    _plain(int)(tuple(index))
    if kind.__class__ is not str or not _DEVICE.fullmatch(kind) or (index and not 0 <= index[0] < 128):
        raise ValueError("no device is called so")
    return torch.device(*args)


_NUMPY_DTYPE = re.compile(
    r"[<>|=]?(?:[?bB]|b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,9}|[mM]8\[(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])",
    re.ASCII,
)


def _build_dtype(args: tuple[Any, ...]) -> Any:
    (text,) = args
    if text.__class__ is not str or not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a plain numpy dtype")
    return np.dtype(text)


def numpy_dtype_arguments(value: Any) -> tuple[str]:
    """Return the argument that `numpy.dtype` is called with.

    Raises:
        ValueError: A record, an object dtype, or one that carries metadata.
    """
    if not _NUMPY_DTYPE.fullmatch(value.str) or value.metadata is not None:
        raise ValueError(f"numpy dtype {value} is a record or an object dtype")
    return (value.str,)


def _build_scalar(cls: type, classes: tuple[type, ...]) -> Callable[[tuple[Any, ...]], Any]:
    check = _plain(*classes)

    def build(args: tuple[Any, ...]) -> Any:
        check(args)
        (value,) = args
        with np.errstate(over="raise", invalid="ignore"):
            scalar = cls(value)
        if classes == (int,) and int(scalar) != value:  # numpy before 2 wraps around
            raise OverflowError(f"{value} in a {cls.__name__}")
        return scalar

    return build


_UNIT = re.compile(r"(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)", re.ASCII)


def _build_time_scalar(cls: type) -> Callable[[tuple[Any, ...]], Any]:
    def build(args: tuple[Any, ...]) -> Any:
        value, unit = args
        if value.__class__ is not int or unit.__class__ is not str or not _UNIT.fullmatch(unit):
            raise TypeError("expected a count and a unit")
        return cls(value, unit)

    return build


def _time_scalar_arguments(value: Any) -> tuple[int, str]:
    unit, count = np.datetime_data(value.dtype)
    if unit == "generic":
        raise ValueError(f"{value!r} has no unit")
    return int(value.view("i8")), unit if count == 1 else f"{count}{unit}"


def torch_dtype_name(value: torch.dtype) -> str:
    """Return the attribute of `torch` that `value` is."""
    return str(value).removeprefix("torch.")


# type, how it is named, its arguments, how it is built from them
_Row = tuple[Any, str, str, Callable[[Any], tuple[Any, ...]], Callable[[tuple[Any, ...]], Any]]


def _rows() -> Iterator[_Row]:
    yield complex, "builtins", "complex", lambda v: (v.real, v.imag), _checked(complex, float, counts=(2,))
    yield slice, "builtins", "slice", _slice_arguments, _checked(slice, int, type(None), counts=(3,))
    yield range, "builtins", "range", _range_arguments, _build_range
    yield Decimal, "decimal", "Decimal", lambda v: (_DECIMALS.to_sci_string(v),), _checked(Decimal, str, counts=(1,))
    yield Fraction, "fractions", "Fraction", _fraction_arguments, _build_fraction
    yield date, "datetime", "date", lambda v: v.__reduce__()[1], _build_date
    yield time, "datetime", "time", _tz_arguments, _build_time
    yield datetime, "datetime", "datetime", _tz_arguments, _build_datetime
    yield timedelta, "datetime", "timedelta", lambda v: (v.days, v.seconds, v.microseconds), _build_timedelta
    yield timezone, "datetime", "timezone", lambda v: v.__getinitargs__(), _build_timezone
    yield uuid.UUID, "uuid", "UUID", lambda v: (str(v),), _checked(uuid.UUID, str, counts=(1,))
    for path in (PurePosixPath, PureWindowsPath):
        parts = _checked(path, str, counts=tuple(range(256)))
        yield path, "pathlib", path.__name__, lambda v: (str(v),), parts
    yield OrderedDict, "collections", "OrderedDict", lambda v: (), _checked(OrderedDict, counts=(0,))
    yield deque, "collections", "deque", lambda v: () if v.maxlen is None else ((), v.maxlen), _build_deque
    yield torch.Size, "torch", "Size", lambda v: (tuple(v),), _build_size
    yield torch.device, "torch", "device", lambda v: v.__reduce__()[1], _build_device
    for kinds, cls in (("?", bool), ("bhilqBHILQ", int), ("efd", float), ("FD", complex)):
        for scalar in dict.fromkeys(np.dtype(kind).type for kind in kinds):
            name = "bool_" if scalar is np.bool_ else np.dtype(scalar).name  # numpy 1 has no numpy.bool
            yield scalar, "numpy", name, lambda v: (v.item(),), _build_scalar(scalar, (cls,))
    for scalar, text in ((np.str_, str), (np.bytes_, bytes)):
        yield scalar, "numpy", scalar.__name__, lambda v: (v.item(),), _build_scalar(scalar, (text,))
    for scalar in (np.datetime64, np.timedelta64):
        yield scalar, "numpy", scalar.__name__, _time_scalar_arguments, _build_time_scalar(scalar)


def _slice_arguments(value: slice) -> tuple[Any, ...]:
    parts = (value.start, value.stop, value.step)
    _plain(int, type(None))(parts)
    return parts


LISTED: dict[type, Listed] = {}
BUILDERS: dict[tuple[str, str], object] = {
    ("builtins", "bytearray"): Builder(_checked(bytearray, bytes, counts=(1,))),  # protocol 4 has no opcode for it
    ("collections", "defaultdict"): Builder(_build_defaultdict),
    ("numpy", "dtype"): Builder(_build_dtype),
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
