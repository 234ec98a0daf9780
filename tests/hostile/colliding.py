"""Opcodes of keys that collide, by their type: `KEYS[kind](number)` gives the opcodes of the `number`-th key."""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from tests.hostile.pickles import call, text

MODULUS = sys.hash_info.modulus
HASHED_IN_PYTHON = (Fraction, PurePath, UUID)  # of what a skeleton may have as a key


def integer(value: int) -> bytes:
    raw = value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def _signs(number: int) -> bytes:
    """A tuple of -1 and -2, whose hashes are equal."""
    return b"(" + b"".join(integer(-1 - (number >> bit & 1)) for bit in range(14)) + b"t"


def _complex(number: int) -> bytes:
    # hash(real) + 1000003 * hash(imag), modulo 2**64; each is a float below 2**53
    return call("builtins", "complex", real(float(-1_000_003 * number)) + real(float(number)) + b"\x86")


def _rotated(number: int) -> bytes:
    """A float: 2**61 is 1 to a hash."""
    return real(3.0 * 2.0 ** (61 * (number % 16) + number // 16 % 2 - 400))


def _same(number: int) -> int:
    return 5 + number * MODULUS


KEYS: dict[str, Callable[[int], bytes]] = {
    "int": lambda n: integer(_same(n)),
    "negative int": lambda n: integer(-_same(n)),
    "float": _rotated,
    "complex": _complex,
    "Fraction": lambda n: call("fractions", "Fraction", integer(_same(n)) + b"K\x01\x86"),
    "Fraction of a large denominator": lambda n: call("fractions", "Fraction", b"K\x01" + integer(_same(n)) + b"\x86"),
    "Decimal": lambda n: call("decimal", "Decimal", text(str(_same(n))) + b"\x85"),
    "UUID": lambda n: call("uuid", "UUID", text(f"{_same(n):032x}") + b"\x85"),
    "tuple": lambda n: integer(_same(n)) + b"\x85",
    "tuple of tuples": lambda n: b"K\x01" + integer(_same(n)) + b"\x85\x85\x86",
    "tuple of -1 and -2": _signs,
    "frozenset": lambda n: b"(" + integer(_same(n)) + b"\x91",
    "range": lambda n: call("builtins", "range", integer(_same(n)) + integer(_same(n) + 9) + b"K\x03\x87"),
    "Size": lambda n: call("torch", "Size", _signs(n) + b"\x85"),
    "uint64": lambda n: call("numpy", "uint64", integer(5 + n % 8 * MODULUS) + b"\x85"),
    "float64": lambda n: call("numpy", "float64", _rotated(n) + b"\x85"),
    "datetime64": lambda n: call("numpy", "datetime64", integer(n << 44) + text("s") + b"\x86"),
    "timedelta": lambda n: call("datetime", "timedelta", integer(-1 - (n & 1)) + integer(n >> 1) + b"K\x00\x87"),
    "consecutive int": integer,
    "spaced int": lambda n: integer(n << 40),
    "bytes": lambda n: b"C\x08" + n.to_bytes(8, "little"),
    "text": lambda n: text(str(n)),
    "date": lambda n: call("datetime", "date", b"C\x04" + struct.pack(">HBB", 1 + n // 336, 1 + n // 28 % 12, 1 + n % 28) + b"\x85"),
    "path": lambda n: call("pathlib", "PurePosixPath", text(str(n)) + b"\x85"),
}  # fmt: skip

ORDERED = call("collections", "OrderedDict", b")")
DEFAULT = call("collections", "defaultdict", b")")
CONTAINERS = {
    "dict": lambda keys: b"}(" + b"N".join(keys) + b"Nu",
    "dict, one at a time": lambda keys: b"}" + b"Ns".join(keys) + b"Ns",
    "dict, in batches": lambda keys: b"}" + b"".join(b"(" + b"N".join(part) + b"Nu" for part in _batches(keys)),
    "OrderedDict": lambda keys: ORDERED + b"(" + b"N".join(keys) + b"Nu",
    "defaultdict": lambda keys: DEFAULT + b"(" + b"N".join(keys) + b"Nu",
    "set": lambda keys: b"\x8f(" + b"".join(keys) + b"\x90",
    "set, in batches": lambda keys: b"\x8f" + b"".join(b"(" + b"".join(part) + b"\x90" for part in _batches(keys)),
    "frozenset": lambda keys: b"(" + b"".join(keys) + b"\x91",
}


def _batches(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + 100] for at in range(0, len(keys), 100)]


def container(kind: str, keys: Sequence[bytes], copies: int = 1) -> bytes:
    """Return opcodes of a container of these keys; of more, a list of several that fetch the keys from the memo."""
    if copies == 1:
        return CONTAINERS[kind](keys)
    kept = b"".join(key + b"\x940" for key in keys)  # MEMOIZE, POP
    fetched = [b"j" + struct.pack("<I", at) for at in range(len(keys))]
    return kept + b"](" + CONTAINERS[kind](fetched) * copies + b"e"


def count_calls(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `call` returns, or the ValueError that it raises, and how often a `__hash__` or `__eq__` in Python ran.

    Only the methods of HASHED_IN_PYTHON are counted. A profile hook would see all other functions too, and take three times as long.
    """
    calls = itertools.count()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            next(calls)
            return method(*args)

        return wrapper

    with contextlib.ExitStack() as stack:
        for cls in HASHED_IN_PYTHON:
            for name in ("__hash__", "__eq__"):
                stack.callback(setattr, cls, name, vars(cls)[name])
                setattr(cls, name, counted(vars(cls)[name]))
        try:
            return call(), next(calls)
        except ValueError as exc:
            return exc, next(calls)
