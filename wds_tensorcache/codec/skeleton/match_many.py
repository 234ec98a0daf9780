"""Match many skeletons with a template at once: numpy compares and converts one value of all bodies at a time."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.skeleton.template import SIZED, Template
from wds_tensorcache.codec.views import are_equal_at, read_windows

__all__ = ["match_many"]

Array = np.ndarray[Any, Any]
_OPS = FIXED_NBYTES.keys() | SIZED.keys()
_DTYPES = {BININT1: "u1", BININT2: "<u2", BININT: "<i4", BINFLOAT: ">f8"}


class _Values(NamedTuple):
    """The values of one opcode at one place of a template, in `m` of `n` bodies.

    Attributes:
        op: Opcode.
        which: Positions of the bodies that have this opcode there, int64 `[m]`; a slice if all bodies have it.
        begins, ends: Offsets of the values' bytes, which follow opcode and length, int64 `[m]`.
    """

    op: int
    which: Any
    begins: Array
    ends: Array

    def select(self, is_good: Array) -> tuple[Array, Array, Array]:
        """Return the positions of the bodies in `which` that are good, and the begins and ends of their values."""
        good = is_good[self.which]
        return np.arange(len(is_good))[self.which][good], self.begins[good], self.ends[good]


def match_many(stored: Array, begins: Array, ends: Array, template: Template) -> tuple[Array, list[list[Any]]]:
    """Return a mask of the bodies that match a template, bool `[n]`, and for each value of the template a list of `n` objects.

    A body matches if `Template.match` returns its values. The lists have None for bodies that do not match.

    Args:
        stored: Bytes, 1-D uint8. Body `i` is `stored[begins[i]:ends[i]]`.
        begins, ends: Offsets of the bodies, int64 `[n]`.
        template: Template of any body; it need not match these.
    """
    at, is_good = begins, ends <= len(stored)
    places: list[list[_Values]] = []
    for segment in template.segments[:-1]:
        is_good &= are_equal_at(stored, at, segment)
        at = at + len(segment)
        # Hazard: a damaged length moves `at` out of its body. It never comes back, so that body fails the last comparison.
        place, at = _find_values(stored, at)
        places.append(place)
    last = template.segments[-1]
    is_good &= are_equal_at(stored, at, last)
    is_good &= at + len(last) == ends
    raw = stored.tobytes()
    while True:
        try:
            return is_good, [_convert_place(place, stored, raw, is_good) for place in places]
        except UnicodeDecodeError:
            _reject_texts(places, raw, is_good)


def _find_values(stored: Array, at: Array) -> tuple[list[_Values], Array]:
    """Return the values whose opcodes are at these offsets, by opcode, and the end of each body's value, int64 `[n]`.

    The end is after all bytes for bodies with other opcodes.
    """
    ops = read_windows(stored, at, 1).view(np.uint8)
    op = ops.item(0)
    if ops.tobytes().count(op) == len(ops) and op in _OPS:
        values = _values_of(stored, op, slice(None), at)
        return [values], values.ends
    place, ends = [], np.full(len(at), len(stored) + 1, np.int64)
    for op in _OPS & set(ops.tolist()):
        which = np.flatnonzero(ops == op)
        place.append(_values_of(stored, op, which, at[which]))
        ends[which] = place[-1].ends
    return place, ends


def _values_of(stored: Array, op: int, which: Any, at: Array) -> _Values:
    begins = at + 1
    if op in FIXED_NBYTES:
        return _Values(op, which, begins, begins + FIXED_NBYTES[op])
    width = LENGTH_NBYTES[op]
    nbytes = read_windows(stored, begins, width).view(f"<u{width}")
    begins += width
    return _Values(op, which, begins, begins + nbytes)


def _convert_place(place: list[_Values], stored: Array, raw: bytes, is_good: Array) -> list[Any]:
    """Return the value of each good body, and None for the rest; `raw` has the bytes of `stored`."""
    if len(place) == 1 and is_good.all():
        return _convert(place[0].op, stored, raw, place[0].begins, place[0].ends)
    column: list[Any] = [None] * len(is_good)
    for values in place:
        which, begins, ends = values.select(is_good)
        for i, value in zip(which.tolist(), _convert(values.op, stored, raw, begins, ends), strict=True):
            column[i] = value
    return column


def _convert(op: int, stored: Array, raw: bytes, begins: Array, ends: Array) -> list[Any]:
    if op in CONSTANTS:
        return [CONSTANTS[op]] * len(begins)
    if op in _DTYPES:
        numbers: list[Any] = read_windows(stored, begins, FIXED_NBYTES[op]).view(_DTYPES[op]).tolist()
        return numbers
    convert = SIZED[op]
    return [convert(raw[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _reject_texts(places: list[list[_Values]], raw: bytes, is_good: Array) -> None:
    """Clear `is_good` for bodies with a text that is not UTF-8."""
    for values in chain.from_iterable(places):
        if values.op in (SHORT_BINUNICODE, BINUNICODE):
            for i, begin, end in zip(*(column.tolist() for column in values.select(is_good)), strict=True):
                try:
                    raw[begin:end].decode()
                except UnicodeDecodeError:
                    is_good[i] = False
