"""Match many skeletons of one length with a template at once: numpy compares and converts a column of all bodies at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from wds_tensorcache.codec.skeleton.opcodes import *
from wds_tensorcache.codec.skeleton.template import SIZED, Template

__all__ = ["FEWEST", "match_many"]

Array = np.ndarray[Any, Any]
FEWEST = 8  # bodies; matching fewer at once is not faster than one after another
_MAX_FRAMES = 8  # of bodies of one length; bodies with further frames are left out
_DTYPES = {BININT1: "u1", BININT2: "<u2", BININT: "<i4", BINFLOAT: ">f8"}

_Place = tuple[int, int, int]  # a value's opcode, and the offsets in the body where its bytes begin and end


def match_many(bodies: Array, template: Template) -> Iterator[tuple[Array, list[list[Any]]]]:
    """Yield `(which, columns)`: the numbers of bodies that match a template, and for each value of the template a list.

    The frame of a body is all bytes except those of its values, so it includes their opcodes and lengths. Bodies of one frame
    are matched together. Bodies with rare frames are left out, although they may match the template.

    Args:
        bodies: Bodies of skeletons, uint8 `[n, length]`.
        template: Template of any body.
    """
    rest = np.arange(len(bodies))
    for _ in range(_MAX_FRAMES):
        if len(rest) < FEWEST:
            return
        first = bodies[rest[0]]
        places = _find_places(first.tobytes(), template)
        if places is None:
            rest = rest[1:]
            continue
        is_fixed = np.ones(len(first), bool)
        for _, begin, end in places:
            is_fixed[begin:end] = False
        same = (bodies[rest][:, is_fixed] == first[is_fixed]).all(1)
        for op, begin, _ in places:
            if op in CONSTANTS:
                same &= np.isin(bodies[rest, begin], list(CONSTANTS))
        which, rest = rest[same], rest[~same]
        try:
            columns = [_convert(bodies[which, begin:end], op) for op, begin, end in places]
        except UnicodeDecodeError:
            continue  # a text is damaged: matched one after another, all intact bodies are found
        yield which, columns


def _find_places(body: bytes, template: Template) -> list[_Place] | None:
    """Return the places of the template's values in a body; None if the body does not match."""
    places: list[_Place] = []
    pos = 0
    for segment in template.segments[:-1]:
        if not body.startswith(segment, pos) or pos + len(segment) == len(body):
            return None
        pos += len(segment)
        op = body[pos]
        if op in CONSTANTS:
            begin, end = pos, pos + 1  # the opcode is the value
        elif op in _DTYPES:
            begin, end = pos + 1, pos + 1 + FIXED_NBYTES[op]
        elif op in SIZED:
            begin = pos + 1 + LENGTH_NBYTES[op]
            end = begin + int.from_bytes(body[pos + 1 : begin], "little")
        else:
            return None
        places.append((op, begin, end))
        pos = end
    return places if body[pos:] == template.segments[-1] else None


def _convert(column: Array, op: int) -> list[Any]:
    """Return the values whose bytes are the rows of a column."""
    count, width = column.shape
    if op in CONSTANTS:
        return [CONSTANTS[constant] for constant in column[:, 0].tolist()]
    raw = column.tobytes()
    if op in _DTYPES:
        numbers: list[Any] = np.frombuffer(raw, _DTYPES[op]).tolist()
        return numbers
    if not width:
        return [SIZED[op](b"")] * count
    starts = range(0, count * width, width)
    if op in (SHORT_BINUNICODE, BINUNICODE) and raw.isascii():
        text = raw.decode("ascii")
        return [text[start : start + width] for start in starts]
    return [SIZED[op](raw[start : start + width]) for start in starts]
