"""Keys that collide, and what CPython's tables do with them, counted one slot after another and without the package."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

MODULUS = sys.hash_info.modulus
HASHED_IN_PYTHON = (Fraction, PurePath, UUID)  # of what a skeleton may have as a key
_IN_C = frozenset({str, bytes, int, float, complex, bool, type(None)})


def path(value: int, mask: int, is_set: bool) -> Iterator[int]:
    """Yield the slots that CPython looks at for a hash, for ever; of a set's ten neighbors, each."""
    perturb = value & (1 << 64) - 1
    slot = value & mask
    while True:
        for near in range(10 if is_set and slot + 9 <= mask else 1):
            yield slot + near
        perturb >>= 5
        slot = (slot * 5 + perturb + 1) & mask


def work_of_keys(hashes: Sequence[int], is_set: bool) -> tuple[int, int]:
    """Return how many slots CPython looks at until these are in a table of their final size, and how many hashes are equal."""
    mask = 7
    while (is_set and 5 * len(hashes) >= 3 * mask) or (not is_set and 3 * len(hashes) > 2 * (mask + 1)):
        mask = 2 * mask + 1
    slots: dict[int, int] = {}
    looks = equals = 0
    for value in hashes:
        for slot in path(value, mask, is_set):
            looks += 1
            if slot not in slots:
                slots[slot] = value
                break
            equals += slots[slot] == value
    return looks, equals


def work_of(value: Any) -> tuple[int, int]:
    """Return the same for all dicts, sets and frozensets in `value` together.

    Two equal hashes count as one slot where the keys are texts, bytes or builtin numbers, which C compares as fast as it looks at
    a slot, and as 16 where they are anything else.
    """
    looks = equals = 0
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (dict, set, frozenset)):
            more = work_of_keys([hash(key) for key in part], not isinstance(part, dict))
            weight = 1 if all(type(key) in _IN_C for key in part) else 16
            looks, equals = looks + more[0], equals + weight * more[1]
        if isinstance(part, (dict, set, frozenset, list, tuple, deque)):
            todo.extend(part)
            todo.extend(part.values() if isinstance(part, dict) else ())
    return looks, equals


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


def ints_on_one_orbit(bits: int, num_taken: int, num_walkers: int) -> list[int]:
    """Return ints of different hashes: the first fill slots that the last then look at, nearly all of them.

    When the upper bits of a hash are used up, CPython goes from slot i to 5 * i + 1 of 2**bits. The first ints are such slots,
    in that order; the bits of the last are chosen, five for each step, so that they only come to taken slots.
    """
    mask, choose = (1 << bits) - 1, random.Random(0)
    orbit = [0]
    while len(orbit) < num_taken:
        orbit.append((orbit[-1] * 5 + 1) & mask)
    order = {slot: number for number, slot in enumerate(orbit)}
    walkers: set[int] = set()
    while len(walkers) < num_walkers:
        value = choose.choice(orbit)
        known, slot = bits, value
        for _ in range(13):
            chunks = [c << known for c in range(32) if value | c << known < MODULUS] if known < 61 else [0]
            choose.shuffle(chunks)
            shift = known - bits + 5
            near = ((value | c) for c in chunks if ((slot * 5 + ((value | c) >> shift) + 1) & mask) in order)
            found = next(near, None)
            if found is None:
                break
            value, slot, known = found, (slot * 5 + (found >> shift) + 1) & mask, known + 5
        else:
            if order[slot] < num_taken // 4:
                walkers.add(value)
    return orbit + sorted(walkers)
