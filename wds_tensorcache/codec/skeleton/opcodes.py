"""The opcodes of FORMAT.md 2.4 that a skeleton is written with, and the canonical bytes of plain values."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any

MEMOIZE = b"\x94"
MARK = b"("
STOP = b"."
POP = b"0"
POP_MARK = b"1"
REDUCE = b"R"
STACK_GLOBAL = b"\x93"
EMPTY_LIST, APPENDS = b"]", b"e"
EMPTY_DICT, SETITEMS = b"}", b"u"
EMPTY_SET, ADDITEMS, FROZENSET = b"\x8f", b"\x90", b"\x91"
BYTEARRAY8 = b"\x96"
EMPTY_TUPLE, TUPLE1, TUPLE = b")", b"\x85", b"t"
# only with allow=
NEWOBJ, NEWOBJ_EX, BUILD = b"\x81", b"\x92", b"b"


def _sized(short: bytes, medium: bytes, long: bytes, raw: bytes) -> bytes:
    if len(raw) < 256:
        return short + bytes([len(raw)]) + raw
    if len(raw) < 1 << 32:
        return medium + pack("<I", len(raw)) + raw
    return long + pack("<Q", len(raw)) + raw


def _write_int(value: int) -> bytes:
    if 0 <= value < 256:
        return pack("<BB", 0x4B, value)
    if 0 <= value < 65536:
        return pack("<BH", 0x4D, value)
    if -(1 << 31) <= value < 1 << 31:
        return pack("<Bi", 0x4A, value)
    nbytes = (value + (value < 0)).bit_length() // 8 + 1
    raw = value.to_bytes(nbytes, "little", signed=True)
    return b"\x8a" + bytes([nbytes]) + raw if nbytes < 256 else b"\x8b" + pack("<I", nbytes) + raw


def _write_text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"\x8c%c%b" % (len(raw), raw) if len(raw) < 256 else _sized(b"\x8c", b"X", b"\x8d", raw)


ATOM_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _write_int,
    float: lambda value: pack(">cd", b"G", value),
    str: _write_text,
    bytes: lambda value: _sized(b"C", b"B", b"\x8e", value),
}
LONGEST_GET = 5
TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


def write_get(number: int) -> bytes:
    """Return the opcode that pushes what the `number`-th MEMOIZE kept."""
    return pack("<cB", b"h", number) if number < 256 else pack("<cI", b"j", number)


GETS = [write_get(number) for number in range(256)]


def write_bytearray(value: bytearray) -> bytes:
    """Return the opcode that pushes a bytearray."""
    return BYTEARRAY8 + pack("<Q", len(value)) + value
