"""The list of files at the end of a zip, of files as numpy and torch write them; `zipfile` takes five times as long."""

from __future__ import annotations

import io
import zipfile
from struct import Struct
from typing import Any, BinaryIO, NamedTuple

_END = Struct("<4s4H2LH")  # magic, disks, numbers of files, length and offset of the list, length of a comment
# the same with longer fields, and a locator of 20 bytes, of which one field is the offset of the end
_LONG_END = Struct("<4sQ2H2L4Q4sLQL")
_ENTRY = Struct("<4s4B4HL2L5H2L")
_MAX_VERSION = 45  # of zip, with which numpy and torch write
_LONG = 0xFFFFFFFF  # a length in another place, since it needs 8 bytes
_TAIL_NBYTES = 4096  # enough for the lists of most files


class ZippedFile(NamedTuple):
    """A file in a zip; the attributes are those of `zipfile.ZipInfo`."""

    filename: str
    header_offset: int
    compress_type: int
    compress_size: int
    file_size: int
    CRC: int
    flag_bits: int


def list_zipped(file: BinaryIO | memoryview, nbytes: int) -> list[Any]:
    """Return the files in a zip of `nbytes` bytes, as `ZippedFile` or `zipfile.ZipInfo`.

    Raises:
        zipfile.BadZipFile, and other exceptions of `zipfile`: The list is damaged.
    """
    if isinstance(file, memoryview):
        found = parse_zip_list(file, nbytes)
    else:
        file.seek(max(0, nbytes - _TAIL_NBYTES))
        found = parse_zip_list(file.read(_TAIL_NBYTES), nbytes)
    if found is not None:
        return found
    opened: Any = _MemoryFile(file) if isinstance(file, memoryview) else file
    with zipfile.ZipFile(opened) as archive:
        return archive.infolist()


def parse_zip_list(tail: bytes | memoryview, nbytes: int) -> list[ZippedFile] | None:
    """Return the files in a zip; None if only `zipfile` can tell them, or say what is wrong.

    Args:
        tail: The last bytes of the zip, or all of them.
        nbytes: Length of the zip.
    """
    at = len(tail) - _END.size
    if at < 0:
        return None
    magic, disk, first_disk, count, total, list_nbytes, begin, comment_nbytes = _END.unpack_from(tail, at)
    end, shift = nbytes - _END.size, nbytes - len(tail)
    if magic != b"PK\5\6" or comment_nbytes:
        return None
    if at >= _LONG_END.size and tail[at - 20 : at - 16] == b"PK\6\7":  # as torch writes it in any case
        at -= _LONG_END.size
        end -= _LONG_END.size
        (
            magic, _, _, _, disk, first_disk, count, total, list_nbytes, begin,
            _, disk_of_end, where, num_disks,
        ) = _LONG_END.unpack_from(tail, at)  # fmt: skip
        if magic != b"PK\6\6" or where != end or disk_of_end or num_disks > 1:
            return None
    if disk or first_disk or count != total or begin + list_nbytes != end:
        return None  # also if bytes precede the zip
    position = begin - shift
    files = []
    while 0 <= position <= at - _ENTRY.size:
        (
            magic, _, _, version, _, flags, method, _, _, crc, compressed, size, name_nbytes, extra_nbytes, comment_nbytes,
            _, _, _, offset,
        ) = _ENTRY.unpack_from(tail, position)  # fmt: skip
        name = bytes(tail[position + _ENTRY.size : position + _ENTRY.size + name_nbytes])
        is_usual = magic == b"PK\1\2" and version <= _MAX_VERSION and name.isascii() and b"\0" not in name
        # extra fields may contain other lengths, or another name
        if not is_usual or extra_nbytes or max(compressed, size, offset) == _LONG:
            return None
        files.append(ZippedFile(name.decode("ascii"), offset, method, compressed, size, crc, flags))
        position += _ENTRY.size + name_nbytes + extra_nbytes + comment_nbytes
    return files if position == at and len(files) == total else None


class _MemoryFile(io.RawIOBase):
    """A file to read from memory; `io.BytesIO` would copy the memory."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        if begin + offset < 0:
            raise OSError(f"negative position {begin + offset}")  # as a file on disk does, which `zipfile` expects
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._content[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
