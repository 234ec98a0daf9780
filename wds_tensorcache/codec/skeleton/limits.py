"""Limits on the work of a reader (FORMAT.md 2.6): nesting, bytes that calls copy, cost of dict keys and set elements.

Hazard: a pickle can fetch an object from its memo again and again, so a short skeleton can pass one long string to many
calls, or one long key to many dicts. The author of a file can also choose keys other than str and bytes whose hashes collide,
so that building a dict takes time quadratic in its length. Costs are therefore counted before anything is built, in the
steps that CPython's hash tables take.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from wds_tensorcache.codec.tree import CONTAINERS, walk
from wds_tensorcache.errors import FormatError

__all__ = [
    "CALLS_OF_ANY",
    "MAX_BITS",
    "MAX_DEPTH",
    "MAX_DEQUES",
    "PER_BYTE",
    "SHORT_TEXT",
    "SMALL_TABLE",
    "TEXTS",
    "KeyCosts",
    "are_few_texts",
    "call_budget",
    "call_cost",
    "check_depth",
]

MAX_DEPTH = 200  # of containers in containers
MAX_DEQUES = 1000  # of one skeleton
# Hazard: for longer numbers, a Fraction's greatest common divisor and the division for the length of a range take seconds.
MAX_BITS = 4096
CALLS_OF_ANY = 1_000_000  # cost of calls that a skeleton may have, whatever its length
PER_BYTE = 10  # additional cost for each byte of the skeleton
MAX_WORK = 128  # per key of one dict; for comparisons, per byte of the skeleton
MAX_SET_WORK = 48  # per element of one set
MAX_KEY_PARTS = 1000
SHORT_TEXT = 256  # characters; comparing strings up to this length is as fast as reading them
SMALL_TABLE = 512  # keys; up to this number, searching slots costs less than reading the keys
_FEW_KEYS = 8  # up to this number, keys are compared in pairs, without a table
_MIN_SLOTS = 1024
_NUM_NEIGHBORS = 10  # adjacent slots that a set tries before it jumps
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
# Comparing a longer number with a number of another type converts it, in time quadratic in its length.
_LONG_NUMBER_NBYTES = 512
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})
TEXTS = frozenset({str})
_NUMBERS = {Fraction: 16, Decimal: 8}  # cost of hashing one in Python code, or by a conversion


def check_depth(value: Any) -> None:
    """Raise FormatError if containers nest more than `MAX_DEPTH` deep, each counted at its first occurrence."""
    for part, depth in walk(value):
        if depth > MAX_DEPTH and isinstance(part, CONTAINERS):
            raise FormatError(f"containers nest more than {MAX_DEPTH} deep")


def call_budget(nbytes: int) -> int:
    """Return the limit on the total `call_cost` of the calls in a skeleton whose body has `nbytes` bytes."""
    return CALLS_OF_ANY + PER_BYTE * nbytes


def call_cost(arguments: Sequence[Any]) -> int:
    """Return the cost of a call: the number of its arguments, and roughly the number of bytes that it copies from them."""
    return len(arguments) + sum(map(_argument_cost, arguments))


def _argument_cost(argument: Any) -> int:
    if argument.__class__ is int:
        return argument.bit_length() >> 3
    return len(argument) if argument.__class__ in (str, bytes, tuple) else 0


def are_few_texts(keys: Sequence[Any], num_others: int) -> bool:
    """Return whether all keys are strings and, with `num_others` other keys of their container, at most `SMALL_TABLE`.

    Such keys cost nothing if they are short, too (`SHORT_TEXT`).
    """
    return len(keys) + num_others <= SMALL_TABLE and TEXTS.issuperset(map(type, keys))


class KeyCosts:
    """The total costs of all keys in one skeleton; `nbytes` is the length of its body, None while it is being written."""

    def __init__(self, nbytes: int | None = None) -> None:
        self._nbytes = sys.maxsize if nbytes is None else nbytes
        self._hashed = self._compared = 0
        # id -> (container, table); the container is kept so that its id is not reused
        self._tables: dict[int, tuple[Any, _Table]] = {}

    def add(self, container: Any, keys: Sequence[Any], is_set: bool) -> None:
        """Count the costs of keys before they are added to a dict or set; `container` is None if it does not exist yet.

        Raises:
            FormatError: The keys take too long to hash, compare or place.
        """
        self._count_hashing(keys)
        hashes = list(map(hash, keys))
        if not container and len(keys) <= SMALL_TABLE and len(set(hashes)) == len(keys):
            return
        if not isinstance(container, (dict, set, type(None))):
            return  # an instance of a class in allow=, which is trusted
        _, table = self._tables.get(id(container), (None, None))
        known = list(container or ()) if table is None else []
        if table is None and len(known) + len(keys) <= _FEW_KEYS:
            self._count_hashing(known)
            self._compared += _compare_pairs(known, keys, [*map(hash, known), *hashes])
        else:
            if table is None:
                table = _Table(is_set)
                table.add(known, list(map(hash, known)))
                if container is not None:
                    self._tables[id(container)] = container, table
            self._compared += table.add(keys, hashes)
        self.check(self._nbytes)

    def check(self, nbytes: int) -> None:
        """Raise FormatError if the keys cost more than a skeleton with a body of `nbytes` bytes may."""
        if self._hashed > 1000 + PER_BYTE * nbytes:
            raise FormatError("the dict keys and set elements take too long to hash")
        if self._compared > 1000 + MAX_WORK * nbytes:
            raise FormatError("the dict keys and set elements take too long to compare")

    def _count_hashing(self, keys: Sequence[Any]) -> None:
        classes = set(map(type, keys))
        if int not in classes and classes <= _PLAIN:
            return  # str and bytes objects store their hashes
        budget = 1000 + PER_BYTE * self._nbytes
        for key in keys:
            if key.__class__ is int:
                self._hashed += key.bit_length() >> 6
            elif key.__class__ not in _PLAIN:
                self._hashed += _hash_cost(key, min(MAX_KEY_PARTS, budget - self._hashed))
        self.check(self._nbytes)


def _hash_cost(key: Any, limit: int) -> int:
    """Return the cost of `hash(key)`: 1 for each part that it visits (shared parts each time), and more for long numbers.

    Raises:
        FormatError: The cost exceeds `limit`, or the key nests so deeply that hashing could overflow C's stack.
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
        if cost > limit or depth > MAX_DEPTH:
            raise FormatError(
                "a dict key or set element is nested too deeply, is too long, or shares its parts too often"
            )
    return cost


def _comparison_cost(key: Any) -> int:
    """Return what a key adds to the cost of comparing it with a key of the same hash; the unit is one slot tried."""
    cost = 0 if key.__class__ in _PLAIN else 16
    todo = [key]
    while todo:
        value = todo.pop()
        nbytes = sys.getsizeof(value)
        is_converted = nbytes > _LONG_NUMBER_NBYTES and isinstance(value, (int, Decimal))
        cost += 1 + ((nbytes >> 3) ** 2 if is_converted else nbytes >> 6)
        if isinstance(value, (tuple, frozenset)):
            todo.extend(value)
        elif isinstance(value, PurePath):
            cost += 100 + len(str(value))  # compared part by part; the object's size does not include its parts
        elif value.__class__ not in _PLAIN:
            cost += 100  # compared in Python code, or converted first
    return cost


def _compare_pairs(known: list[Any], keys: Sequence[Any], hashes: list[int]) -> int:
    """Return the cost of comparing each of `keys` with earlier keys of the same hash; an object with itself costs nothing."""
    both = [*known, *keys]
    return sum(
        _comparison_cost(both[earlier]) + _comparison_cost(both[number])
        for number in range(len(known), len(both))
        for earlier in range(number)
        if hashes[earlier] == hashes[number] and both[earlier] is not both[number]
    )


@dataclass
class _Chain:
    """Keys of a table that share a hash.

    In CPython, each of them tries the slots of all earlier ones. The model therefore starts the next key at the slot of the
    last one, and adds the steps up to this slot.
    """

    cost: int  # sum of the costs of comparing each key once
    slot: int  # slot of the last key
    home: int  # first of the adjacent slots around `slot`
    perturb: int  # bits of the hash that are not used up at `slot`
    steps: int = 0  # number of steps from the slot of the first key to `slot`
    length: int = 1


class _Table:
    """A model of CPython's hash table for one dict or set: which key is in which slot."""

    def __init__(self, is_set: bool) -> None:
        self.work = 0
        self._is_set = is_set
        self._keys: list[Any] = []
        self._hashes = array("q")
        self._costs: dict[int, int] = {}  # number of a key -> the cost of comparing it
        self._slots = array("i")  # the number of the key in each slot, -1 if the slot is free
        self._chains: dict[int, _Chain] = {}  # number of the first key with a hash -> all keys with it
        self._limit = 0

    def add(self, keys: Sequence[Any], hashes: Sequence[int]) -> int:
        """Add keys; return the cost of comparing them with each other and with earlier keys.

        Raises:
            FormatError: The work exceeds `MAX_WORK` per key, or `MAX_SET_WORK` per element.
        """
        first = len(self._keys)
        self._keys.extend(keys)
        self._hashes.extend(hashes)
        compared = 0
        while first < len(self._keys):
            if first >= self._limit:
                self._grow(first)
                self._place(0, first, is_new=False)
            last = min(self._limit, len(self._keys))
            compared += self._place(first, last, is_new=True)
            first = last
        return compared

    def _grow(self, used: int) -> None:
        size = _MIN_SLOTS
        if self._is_set:
            while size <= used * (2 if used > 50_000 else 4):
                size *= 2
            self._limit = -(-3 * (size - 1) // 5)
        else:
            while size < 3 * used:
                size *= 2
            self._limit = 2 * size // 3
        self._slots = array("i", b"\xff" * (4 * size))
        self._chains = {}

    def _place(self, first: int, last: int, *, is_new: bool) -> int:
        """Put the keys `[first, last)` into slots; return the cost of comparing them with earlier keys, 0 unless `is_new`."""
        slots, hashes, is_set, chains = self._slots, self._hashes, self._is_set, self._chains
        mask, compared = len(slots) - 1, 0
        self.work += last - first
        limit = (MAX_SET_WORK if is_set else MAX_WORK) * len(hashes)
        # one step per slot that CPython examines
        for number in range(first, last):
            value = hashes[number]
            home = slot = value & mask
            perturb = value & _ALL_BITS
            steps, chain = 0, None
            while (earlier := slots[slot]) >= 0:
                if chain is None and hashes[earlier] == value:
                    chain = chains.get(earlier) or _Chain(self._cost(earlier), slot, home, perturb)
                    chains[earlier] = chain
                    if is_new:
                        cost = chain.length * self._cost(number)
                        compared += cost + chain.cost
                        self.work += cost
                    before, steps = steps, steps + chain.steps
                    slot, home, perturb = chain.slot, chain.home, chain.perturb
                slot += 1
                if not is_set or home + _NUM_NEIGHBORS > mask + 1 or slot == home + _NUM_NEIGHBORS:
                    steps += 1
                    perturb >>= 5
                    home = slot = (5 * home + perturb + 1) & mask
                if self.work + steps > limit:
                    what = "elements of a set" if is_set else "keys of a dict"
                    raise FormatError(f"{len(hashes)} {what} share too many hashes or hash-table slots")
            slots[slot] = number
            self.work += steps
            if chain is not None:
                chain.slot, chain.home, chain.perturb, chain.steps = slot, home, perturb, steps - before
                chain.length += 1
                chain.cost += self._cost(number)
        return compared

    def _cost(self, number: int) -> int:
        if number not in self._costs:
            self._costs[number] = _comparison_cost(self._keys[number])
        return self._costs[number]
