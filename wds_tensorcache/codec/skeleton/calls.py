"""What calls in a skeleton copy (FORMAT.md 2.6), counted alike by its reader and its writer.

Hazard: one text may be fetched from the memo for many calls, so that a short skeleton makes its reader copy gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wds_tensorcache.codec.skeleton import opcodes as op

__all__ = ["call_budget", "call_cost", "join_parts"]

_PER_BYTE = 10
_LONGEST_GET = 5


def call_budget(nbytes: int) -> int:
    """Return what the calls of a skeleton of this length may be given, as `call_cost` counts it."""
    return 1_000_000 + _PER_BYTE * nbytes


def call_cost(arguments: Sequence[Any]) -> int:
    """Return how much a call with these arguments has to copy, or to compute with."""
    return len(arguments) + sum(map(_nbytes, arguments))


def _nbytes(argument: Any) -> int:
    if argument.__class__ is int:
        return argument.bit_length() >> 3
    return len(argument) if argument.__class__ in (str, bytes, tuple) else 0


def join_parts(parts: list[bytes], gets: dict[int, int], fetched: list[tuple[int, str | bytes]], cost: int) -> bytes:
    """Return the pickle of `parts`; `gets` and `fetched` are used up.

    Args:
        parts: Opcodes, empty where a MEMOIZE or a GET may come.
        gets: Which of these is a GET, and the MEMOIZE of what it gets.
        fetched: Which GETs fetch the argument of a call, and that text or bytes, in order.
        cost: What all calls are given. If a reader would refuse it, so many of the arguments are written anew, the last first,
            that the skeleton is long enough.
    """
    while True:
        memo = {slot: number for number, slot in enumerate(sorted(set(gets.values())))}
        for index, slot in gets.items():
            parts[slot] = op.CODE[op.MEMOIZE]
            parts[index] = op.write_get(memo[slot])
        body = b"".join(parts) + op.CODE[op.STOP]
        missing = cost - call_budget(len(body))
        if missing <= 0 or not fetched:
            return body
        for slot in memo:
            parts[slot] = b""
        while fetched and missing > 0:
            index, value = fetched.pop()
            parts[index] = op.ATOM_WRITERS[type(value)](value)
            del gets[index]
            missing -= _PER_BYTE * (len(parts[index]) - _LONGEST_GET)
