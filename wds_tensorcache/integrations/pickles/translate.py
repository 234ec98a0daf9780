"""Translate the pickles of `torch.save` and numpy to the opcodes of skeletons."""

from __future__ import annotations

import pickletools
import re
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.errors import FormatError

BINPERSID = b"Q"[0]
_MAX_OPERATIONS = 1 << 22  # each may take some hundred bytes of memory
MAX_SHORT = 1 << 13  # the memory of 64 longer pickles would be worth more than the time


def translate(pickled: bytes) -> bytes:
    """Return the pickle with the memo opcodes and globals of skeletons, and without PROTO and FRAME.

    All other opcodes are kept, among them BINPERSID, which names a storage. `unpickle` refuses those that it does not know.
    """
    if len(pickled) > MAX_SHORT:
        return _translate(pickled)
    return _translate_short(bytes(pickled))


def _translate(pickled: bytes) -> bytes:
    translated = _translate_usual(pickled)
    return _translate_any(pickled) if translated is None else translated


_translate_short = lru_cache(64)(_translate)  # samples of equal structure and shapes have equal pickles


def _translate_usual(pickled: bytes) -> bytes | None:
    """Translate a pickle of the opcodes that `torch.save` writes, in a tenth of the time; return None for any other pickle."""
    parts: list[bytes] = []
    memo: dict[int, int] = {}
    num_memoized = position = kept = 0  # the bytes from `kept` to `position` are copied as they are
    size = len(pickled)
    while position < size:
        code = pickled[position]
        after = position + 1
        width = _WIDTHS.get(code)
        if width is not None:
            position = after + width
            continue
        width = _LENGTHS.get(code)
        if width is not None:
            position = after + width + int.from_bytes(pickled[after : after + width], "little")
            continue
        parts.append(pickled[kept:position])
        if len(parts) > _MAX_OPERATIONS:
            return None
        width = _MEMO_WIDTHS.get(code)
        if width is not None:
            number = int.from_bytes(pickled[after : after + width], "little")
            position = after + width
            if position > size:
                return None
            if code in _GETS:
                if number not in memo:
                    return None
                parts.append(op.write_get(memo[number]))
            else:
                memo[number if width else len(memo)] = num_memoized
                num_memoized += 1
                parts.append(op.CODE[op.MEMOIZE])
        elif code == _GLOBAL:
            match = _NAMES.match(pickled, after)
            if match is None:
                return None
            parts += op.write_text(match[1].decode("ascii")), op.write_text(match[2].decode("ascii"))
            parts.append(op.CODE[op.STACK_GLOBAL])
            position = match.end()
        elif code in _LEFT_OUT:
            position = after + _LEFT_OUT[code]
        else:  # STOP, or an opcode that torch does not write
            return b"".join((*parts, pickled[position:])) if code == op.STOP else None
        kept = position
    return None


def _translate_any(pickled: bytes) -> bytes:
    translated = bytearray()
    memo: dict[int, int] = {}
    num_memoized = 0
    # a generator, because a list of all operations would take 100 times the memory of the file
    operations = ((opcode.name, argument, at or 0) for opcode, argument, at in pickletools.genops(pickled))
    end_mark: tuple[str, Any, int] = ("", None, len(pickled))
    for number, ((name, argument, begin), (_, _, end)) in enumerate(pairwise(chain(operations, [end_mark]))):
        if number > _MAX_OPERATIONS:
            raise FormatError(f"the pickle has more than {_MAX_OPERATIONS:,} operations")
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = num_memoized
            num_memoized += 1
            translated += op.CODE[op.MEMOIZE]
        elif name in ("BINGET", "LONG_BINGET"):
            translated += op.write_get(memo[argument])
        elif name == "GLOBAL":
            translated += b"".join((*map(op.write_text, argument.split(" ", 1)), op.CODE[op.STACK_GLOBAL]))
        elif name not in ("PROTO", "FRAME"):
            translated += pickled[begin:end]
    return bytes(translated)


def find_fields(pickled: bytes) -> list[tuple[int, int]] | None:
    """Return the ranges of the opcodes that push a text or a number; None for a pickle that `torch.save` does not write."""
    fields: list[tuple[int, int]] = []
    position, size = 0, len(pickled)
    while position < size:
        code = pickled[position]
        after = position + 1
        width = _PLAIN_WIDTHS.get(code)
        if width is None:
            width = _LENGTHS.get(code)
            if width is not None:
                width += int.from_bytes(pickled[after : after + width], "little")
            elif code == _GLOBAL and (match := _NAMES.match(pickled, after)):
                width = match.end() - after
            else:
                return fields if code == op.STOP and after == size else None
        if code in _FIELDS:
            fields.append((position, after + width))
        position = after + width
    return None


_GLOBAL = b"c"[0]
_NAMES = re.compile(rb"([A-Za-z0-9_.]+)\n([A-Za-z0-9_.]+)\n")
_PUTS = {b"q"[0]: 1, b"r"[0]: 4, op.MEMOIZE: 0}  # bytes of the number, as in the next two tables
_GETS = {op.BINGET: 1, op.LONG_BINGET: 4}
_MEMO_WIDTHS = {**_PUTS, **_GETS}
_LEFT_OUT = {op.PROTO: 1, op.FRAME: 8}
# opcodes that are kept, with a fixed number of bytes after them, or with the length of what follows
_WIDTHS = {
    **op.FIXED_NBYTES,
    **dict.fromkeys((op.EMPTY_LIST, op.APPEND, op.APPENDS, op.EMPTY_DICT, op.SETITEM, op.SETITEMS, op.MARK), 0),
    **dict.fromkeys((op.EMPTY_TUPLE, op.TUPLE1, op.TUPLE2, op.TUPLE3, op.TUPLE, op.REDUCE, op.BUILD, BINPERSID), 0),
}
_LENGTHS = {op.SHORT_BINUNICODE: 1, op.BINUNICODE: 4, op.LONG1: 1}
_PLAIN_WIDTHS = {**_WIDTHS, **_MEMO_WIDTHS, **_LEFT_OUT}
_FIELDS = {op.BINUNICODE, op.SHORT_BINUNICODE, op.BININT, op.BININT1, op.BININT2, op.BINFLOAT}
