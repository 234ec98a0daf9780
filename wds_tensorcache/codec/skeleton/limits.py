"""Limits on a reader's work (FORMAT.md 2.6): nesting, calls and keys.

A pickle can fetch an object from its memo again and again. So a short skeleton can pass one long string to many calls, or one
long key to many dicts. Keys other than str and bytes may have colliding hashes, so that building a dict takes quadratic time.
Costs of calls and keys are therefore counted before the call or the dict is built.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from decimal import Decimal
from pathlib import PurePath
from typing import Any

import torch

from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.tree import CONTAINERS, walk
from wds_tensorcache.errors import FormatError

MAX_DEPTH = 200  # nesting levels of containers
MAX_DEQUES, MAX_DEFAULTDICTS = 1000, 10_000  # in one skeleton
# For longer numbers, a Fraction's greatest common divisor and the division for the length of a range take seconds.
MAX_BITS = 4096
MAX_KEY_PARTS = 10_000  # in one skeleton
LONG_TEXT = 1000  # characters or bytes of a key that count as one part
TEXTS = frozenset({str})
_MAX_KEY_BITS = 512
_MAX_DECIMAL_NBYTES = 512  # in memory
_BY_IDENTITY = (LazyTensor, LazyArray, torch.Tensor)  # their hashes are their ids, which no file can choose
_FAST = frozenset({int, float, complex, bool, type(None), str, bytes})
_SLOW = 10  # parts; comparing two Fractions, Decimals, UUIDs or numpy times of equal hashes takes up to 3 us


def check_depth(value: Any) -> None:
    """Raise FormatError if containers nest deeper than `MAX_DEPTH`. A shared container counts at its first occurrence."""
    for part, depth in walk(value):
        if depth > MAX_DEPTH and isinstance(part, CONTAINERS):
            raise FormatError(f"containers nest more than {MAX_DEPTH} deep")


def call_budget(nbytes: int) -> int:
    """Return the limit on `call_cost` for a body of `nbytes` bytes. It applies to the sum over all calls."""
    return 1_000_000 + 10 * nbytes


def call_cost(arguments: Sequence[Any]) -> int:
    """Return the number of arguments, plus roughly the bytes copied from them."""
    return len(arguments) + sum(map(_argument_cost, arguments))


def _argument_cost(argument: Any) -> int:
    if argument.__class__ is int:
        return argument.bit_length() >> 3
    return len(argument) if argument.__class__ in (str, bytes, tuple) else 0


def add_key_parts(num_parts: int, keys: Collection[Any]) -> int:
    """Return `num_parts`, the skeleton's count so far, plus the parts of `keys`.

    Call this before `keys` are added to a dict, set or frozenset.

    Raises:
        FormatError: The sum exceeds `MAX_KEY_PARTS`, or a key contains a long number or nests too deeply.
    """
    for key in keys:
        if key.__class__ is str or key.__class__ is bytes:  # their hashes have a secret seed
            num_parts += len(key) // LONG_TEXT
        elif key.__class__ is int and -1 << 63 < key < 1 << 63:
            num_parts += 1
        else:
            num_parts += _count_parts(key, MAX_KEY_PARTS - num_parts)
        if num_parts > MAX_KEY_PARTS:
            raise FormatError(
                f"the dict keys and set elements that are not text or bytes have more than {MAX_KEY_PARTS:,} parts; "
                f"one container has {len(keys):,}"
            )
    return num_parts


def _count_parts(key: Any, limit: int) -> int:
    count = 0
    todo = [(key, 1)]
    while todo and count <= limit:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:  # hash() would overflow C's stack
            raise FormatError(f"a dict key or set element nests more than {MAX_DEPTH} deep")
        if isinstance(value, (tuple, frozenset)):
            count += 1
            if len(value) > limit:
                return count + len(value)
            todo.extend((child, depth + 1) for child in value)
            continue
        is_fast = value.__class__ in _FAST or isinstance(value, _BY_IDENTITY)
        count += 1 if is_fast else _SLOW
        if isinstance(value, (str, bytes)):
            count += len(value) // LONG_TEXT
        elif isinstance(value, PurePath):
            count += len(str(value)) // LONG_TEXT
        elif isinstance(value, (range, slice)):
            todo.extend((part, depth + 1) for part in (value.start, value.stop, value.step))
        # Hashing takes time linear in a number's length, and converting an int to a Decimal quadratic time.
        elif (isinstance(value, int) and value.bit_length() > _MAX_KEY_BITS) or (
            isinstance(value, Decimal) and sys.getsizeof(value) > _MAX_DECIMAL_NBYTES
        ):
            raise FormatError(f"a dict key or set element has a number of more than {_MAX_KEY_BITS} bits")
    return count
