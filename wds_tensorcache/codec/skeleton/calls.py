"""What calls in a skeleton copy (FORMAT.md 2.6), counted alike by its reader and its writer.

Hazard: one text may be fetched from the memo for many calls, so that a short skeleton makes its reader copy gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["CALLS_OF_ANY", "PER_BYTE", "call_budget", "call_cost"]

CALLS_OF_ANY = 1_000_000  # what the calls of any skeleton may be given
PER_BYTE = 10


def call_budget(nbytes: int) -> int:
    """Return what the calls of a skeleton of this length may be given, as `call_cost` counts it."""
    return CALLS_OF_ANY + PER_BYTE * nbytes


def call_cost(arguments: Sequence[Any]) -> int:
    """Return how much a call with these arguments has to copy, or to compute with."""
    return len(arguments) + sum(map(_nbytes, arguments))


def _nbytes(argument: Any) -> int:
    if argument.__class__ is int:
        return argument.bit_length() >> 3
    return len(argument) if argument.__class__ in (str, bytes, tuple) else 0
