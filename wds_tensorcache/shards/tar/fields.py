"""Parse the fields of tar headers, and pax records."""

from __future__ import annotations

import re
from zlib import adler32

from wds_tensorcache.errors import Kind, TarFormatError

__all__ = [
    "Records",
    "adds_up",
    "check_checksum",
    "check_length",
    "parse_number",
    "parse_records",
    "refuse_compressed",
]

Records = dict[bytes, bytes]
_EXTENDED: Kind = "extended-header"
_SPARSE: Kind = "sparse"
_OCTAL = re.compile(rb"[0-7]*").fullmatch
_RECORD_LENGTH = re.compile(rb"([0-9]{1,19}) ")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


def check_checksum(header: bytes, header_begin: int) -> None:
    """Raise TarFormatError unless the checksum of `header`, at byte `header_begin` of the tar, matches."""
    field = header[148:156]
    total = (adler32(header[:256]) & 0xFFFF) + (adler32(header[256:]) & 0xFFFF) - 2 - sum(field) + 8 * 32
    checksum = parse_number(field)
    high = sum(byte > 127 for byte in header) - sum(byte > 127 for byte in field)
    if checksum >= 0 and checksum in (total, total - 256 * high):  # some old tars sum signed bytes
        return
    if not header_begin:
        refuse_compressed(header)
    raise TarFormatError(
        f"bad checksum: the bytes add up to {total:06o}, the header has {field!r}", offset=header_begin, kind="checksum"
    )


def refuse_compressed(header: bytes) -> None:
    """Raise TarFormatError if the first bytes of a file show that it is compressed."""
    # Call this only if the bytes are not a header: the first member of a tar may have the name `BZh9.json`.
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            raise TarFormatError(
                f"{name}: a compressed tar cannot be indexed; decompress it, or read it as a stream of 'pipe:{name} -dc PATH'",
                offset=0,
                kind="compressed",
            )


def check_length(content: bytes, begin: int, end: int) -> None:
    """Raise TarFormatError unless a read of the bytes `[begin, end)` returned all of them."""
    if len(content) < end - begin:
        what = f"truncated: expected {end - begin} bytes, got {len(content)}"
        raise TarFormatError(what, offset=begin, kind="truncated")


def parse_number(field: bytes) -> int:
    """Return the number in a header's field, written in octal digits or GNU's base 256; -1 if it is neither."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = field.partition(b"\0")[0].strip()
    # Hazard: `int` loses an interrupt that arrives while it describes other bytes.
    return int(digits or b"0", 8) if _OCTAL(digits) else -1


def parse_records(content: bytes, begin: int) -> Records:
    """Return the path and the size in pax records; each record is `LENGTH KEY=VALUE` and a line feed.

    Raises:
        TarFormatError: A record is malformed, or belongs to a GNU sparse member.
    """
    records: Records = {}
    at = 0
    while at < len(content):
        length = _RECORD_LENGTH.match(content, at)
        end = at + int(length[1]) if length else 0
        key, equals, value = content[length.end() : end - 1].partition(b"=") if length else (b"", b"", b"")
        what, kind = None, _EXTENDED
        if not key or not equals or content[end - 1 : end] != b"\n":
            what = f"malformed pax record {content[at : at + 40]!r}"
        elif key.startswith(b"GNU.sparse."):
            what, kind = "a GNU sparse member, expected one without holes", _SPARSE
        if what is None and key in (b"path", b"size"):
            records[key] = value.rstrip(b"/")
            if not (value.strip(b"/") if key == b"path" else value.isdigit() and len(value) < 20):
                what = f"the pax record of a {key.decode()} has an impossible value {value[:40]!r}"
        if what is not None:
            raise TarFormatError(what, offset=begin + at, kind=kind)
        at = end
    return records


def adds_up(header: bytes) -> bool:
    """Return whether the bytes begin with a tar header whose checksum matches."""
    if len(header) < 512:
        return False
    try:
        check_checksum(header, 1)  # any offset but 0, since bytes at 0 are also checked for compression
    except TarFormatError:
        return False
    return True
