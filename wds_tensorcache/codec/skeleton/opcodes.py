"""The opcodes of FORMAT.md 2.4, and the shortest encodings of plain values.

The reader and the templates compare opcodes as integers; the writer joins the bytes in `CODE`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any

PROTO, STOP, FRAME = 0x80, 0x2E, 0x95
NONE, NEWTRUE, NEWFALSE, BINFLOAT = 0x4E, 0x88, 0x89, 0x47
BININT, BININT1, BININT2, LONG1, LONG4 = 0x4A, 0x4B, 0x4D, 0x8A, 0x8B
SHORT_BINUNICODE, BINUNICODE, BINUNICODE8 = 0x8C, 0x58, 0x8D
SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8 = 0x43, 0x42, 0x8E, 0x96
EMPTY_LIST, APPEND, APPENDS = 0x5D, 0x61, 0x65
EMPTY_DICT, SETITEM, SETITEMS = 0x7D, 0x73, 0x75
EMPTY_SET, ADDITEMS, FROZENSET = 0x8F, 0x90, 0x91
EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE = 0x29, 0x85, 0x86, 0x87, 0x74
MARK, POP, POP_MARK, MEMOIZE, BINGET, LONG_BINGET = 0x28, 0x30, 0x31, 0x94, 0x68, 0x6A
STACK_GLOBAL, REDUCE = 0x93, 0x52
# accepted only with allow=
NEWOBJ, NEWOBJ_EX, BUILD = 0x81, 0x92, 0x62

CODE = [bytes([opcode]) for opcode in range(256)]
SHORT_TUPLES = {0: EMPTY_TUPLE, 1: TUPLE1, 2: TUPLE2, 3: TUPLE3}  # length of the tuple -> opcode that needs no MARK
CONSTANTS = {NONE: None, NEWTRUE: True, NEWFALSE: False}


def read_text(raw: bytes) -> str:
    """Decode UTF-8 that may contain surrogates, each encoded in 3 bytes."""
    return str(raw, "utf-8", "surrogatepass")


def _read_int(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


# opcode -> number of bytes in its length field, and the function that converts the bytes after this field
SIZED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    BINUNICODE: (4, read_text),
    BINUNICODE8: (8, read_text),
    SHORT_BINBYTES: (1, bytes),
    BINBYTES: (4, bytes),
    BINBYTES8: (8, bytes),
    BYTEARRAY8: (8, bytearray),
    LONG1: (1, _read_int),
    LONG4: (4, _read_int),
}
_SHORT_TEXT = CODE[SHORT_BINUNICODE] + b"%c%b"


def _write_sized(short: int, medium: int, long: int, raw: bytes) -> bytes:
    if len(raw) < 256:
        return pack("<BB", short, len(raw)) + raw
    if len(raw) < 1 << 32:
        return pack("<BI", medium, len(raw)) + raw
    return pack("<BQ", long, len(raw)) + raw


def _write_int(value: int) -> bytes:
    if 0 <= value < 256:
        return pack("<BB", BININT1, value)
    if 0 <= value < 65536:
        return pack("<BH", BININT2, value)
    if -(1 << 31) <= value < 1 << 31:
        return pack("<Bi", BININT, value)
    nbytes = (value + (value < 0)).bit_length() // 8 + 1
    raw = value.to_bytes(nbytes, "little", signed=True)
    return pack("<BB", LONG1, nbytes) + raw if nbytes < 256 else pack("<BI", LONG4, nbytes) + raw


def write_text(value: str) -> bytes:
    """Return the shortest encoding of a string: opcode, length and UTF-8."""
    raw = value.encode("utf-8", "surrogatepass")
    if len(raw) < 256:
        return _SHORT_TEXT % (len(raw), raw)
    return _write_sized(SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, raw)


ATOM_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: CODE[NONE],
    bool: lambda value: CODE[NEWTRUE if value else NEWFALSE],
    int: _write_int,
    float: lambda value: pack(">Bd", BINFLOAT, value),
    str: write_text,
    bytes: lambda value: _write_sized(SHORT_BINBYTES, BINBYTES, BINBYTES8, value),
}


def write_get(index: int) -> bytes:
    """Return the opcode and argument that push object `index` of the memo."""
    return pack("<BB", BINGET, index) if index < 256 else pack("<BI", LONG_BINGET, index)
