"""What one key of a dict, or element of a set, costs to hash and to compare (FORMAT.md 2.6)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from wds_tensorcache.codec.tree import MAX_DEPTH
from wds_tensorcache.errors import FormatError

__all__ = ["ONLY_COMPARED", "SHORT_TEXT", "are_few_texts", "comparison_cost", "hash_cost"]

MAX_KEY_PARTS = 1000
ONLY_COMPARED = 512  # up to so many keys, slots that are taken cost less than reading the keys
SHORT_TEXT = 256  # comparing texts of so many characters takes no longer than reading the opcodes that bring them
_LONG_NUMBER = 512  # bytes; longer ones take the square of their length to be compared with a number of another type
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})
_TEXTS = frozenset({str})
_NUMBERS = {Fraction: 16, Decimal: 8}  # what their hashes cost beside a plain number's


def key_cost(key: Any, budget: int) -> int:
    """Return what `hash(key)` costs: the parts that it visits, shared ones each time, and 64 bits of a number each.

    Raises:
        FormatError: More than `budget`, or nested so deep that hashing would overflow C's stack.
    """
    cost = 0
    todo = [(key, 1)]
    while todo:
        value, depth = todo.pop()
        cost += 1
        if isinstance(value, (tuple, frozenset)):
            todo.extend((child, depth + 1) for child in value)
        elif isinstance(value, int):
            cost += value.bit_length() >> 6
        elif isinstance(value, (range, slice)):
            todo.extend((part, depth + 1) for part in (value.start, value.stop, value.step))
        elif value.__class__ in _NUMBERS:
            cost += _NUMBERS[value.__class__] + (sys.getsizeof(value) >> 6)
        if cost > budget or depth > MAX_DEPTH:
            raise FormatError("a dict key or set element is too deep, too long, or shares its parts too often")
    return cost


def comparison_cost(key: Any) -> int:
    """Return what comparing a key with one of the same hash costs, in slots; 64 bytes are one."""
    if key.__class__ in _PLAIN:
        return _part_cost(key)
    cost: int = 16
    todo = [key]
    while todo:
        value = todo.pop()
        cost += _part_cost(value)
        if isinstance(value, (tuple, frozenset)):
            todo.extend(value)
        elif isinstance(value, PurePath):
            cost += 100 + len(str(value))  # part by part, and they are not in its size
        elif value.__class__ not in _PLAIN:
            cost += 100  # compared in Python, as Fraction and UUID are, or converted first, as numpy's dates are
    return cost


def _part_cost(value: Any) -> int:
    nbytes = sys.getsizeof(value)
    if nbytes > _LONG_NUMBER and isinstance(value, (int, Decimal)):
        return 1 + (nbytes >> 3) ** 2  # converted between bases
    return 1 + (nbytes >> 6)


def hash_cost(keys: Sequence[Any], budget: int) -> int:
    """Return what hashing these keys costs, as `key_cost` counts it; text and bytes know their hash, floats are short.

    Raises:
        FormatError: One of them has too many parts, or all together cost more than `budget`.
    """
    classes = set(map(type, keys))
    if classes <= _PLAIN:
        ints = keys if len(classes) == 1 else [key for key in keys if isinstance(key, int)]
        return sum(map(int.bit_length, ints)) >> 6 if int in classes else 0
    cost = 0
    for key in keys:
        if key.__class__ not in _PLAIN:
            cost += key_cost(key, min(MAX_KEY_PARTS, budget - cost))
        elif key.__class__ is int:
            cost += key.bit_length() >> 6
    return cost


def are_few_texts(keys: Sequence[Any], num_others: int) -> bool:
    """Return whether these keys need no counting, beside `num_others`: as nearly all dicts' keys do not."""
    return len(keys) + num_others <= ONLY_COMPARED and _TEXTS.issuperset(map(type, keys))
