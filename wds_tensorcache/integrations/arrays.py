"""Decoders of `.npy`, `.npz` and gzip files. Unless pickles are trusted, their length or a limit bounds the memory."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np

from wds_tensorcache.errors import FormatError

try:
    from isal.isal_zlib import crc32  # ten times as fast
except ImportError:
    from zlib import crc32

ZIP = b"PK\x03\x04"
_IS_ENCRYPTED = 1
_PIECE_NBYTES = 1 << 20
Array = np.ndarray[Any, Any]


def parse_npy(content: Any, trust: bool = False) -> Array:
    """Return the array in the content of an `.npy` file. The pickles in it run only if `trust` is True.

    Raises:
        FormatError: The bytes do not fit the header, or `trust` is False, and the array contains objects. For a damaged header,
            numpy raises errors of several classes.

    Memory: aliases `content`, and may be unaligned. Arrays of objects are newly allocated.
    """
    is_short = len(content) > 6 and content[6] == 1
    begin = 10 + int.from_bytes(content[8:10], "little") if is_short else 12 + int.from_bytes(content[8:12], "little")
    shape, is_fortran, dtype = _parse_npy_header(bytes(content[:begin]))
    if dtype.hasobject and trust:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=True)
    if dtype.hasobject:
        raise FormatError(
            f"an array of {dtype} contains pickled objects, which may run code; store plain arrays, or import the file with "
            "--trust (trust=True) if you trust it"
        )
    count = math.prod(shape)
    if min(shape, default=0) < 0 or begin + count * dtype.itemsize > len(content) or (count and not dtype.itemsize):
        raise FormatError(f"an array of {dtype} {list(shape)!r:.200} exceeds its file of {len(content):,} bytes")
    if (end := begin + count * dtype.itemsize) < len(content):  # as calls of `np.save` with one open file write them
        raise FormatError(
            f"another array, or other bytes, follow the array, which ends at byte {end:,}; save each array by itself"
        )
    flat = np.frombuffer(content, dtype, count, begin) if count * dtype.itemsize else np.empty(count, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


@lru_cache(256)  # the arrays of a trainer have few different shapes
def _parse_npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise FormatError(f"version {version} of npy is unknown")
    # version 3 is version 2 with non-ASCII field names
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def list_zip(file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Return the files in a zip by name. Raise FormatError for repeated or empty names, and BadZipFile for a damaged zip."""
    with zipfile.ZipFile(file) as archive:
        files = archive.infolist()
    listed = {file.filename: file for file in files}
    if len(listed) < len(files):
        raise FormatError("two files in the zip have the same name")
    if "" in listed:
        raise FormatError("a file in the zip has no name")
    return listed


def view_content(view: Callable[[int, int], Any], file: zipfile.ZipInfo) -> Any:
    """Return a file's bytes as stored in a zip, perhaps deflated. `view` returns a range of the zip.

    Raises:
        FormatError: The file is damaged, encrypted, or compressed by another method.
    """
    head = view(file.header_offset, file.header_offset + 30)
    # other methods may allocate gigabytes before the first byte, for example LZMA for its dictionary
    is_known = file.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if len(head) < 30 or head[:4] != ZIP or file.flag_bits & _IS_ENCRYPTED or not is_known:
        raise FormatError("is damaged, encrypted, or compressed, but not by deflate")
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", head, 26)
    begin = file.header_offset + 30 + name_nbytes + extra_nbytes
    return view(begin, begin + file.compress_size)


def check_content(content: Any, file: zipfile.ZipInfo) -> None:
    """Raise FormatError unless a file's length and CRC match its entry."""
    if len(content) != file.file_size or crc32(content) != file.CRC:
        raise FormatError("is damaged: its length or CRC is not as listed")


def parse_npz(
    content: memoryview, files: dict[str, zipfile.ZipInfo], limit: int, remedy: str, trust: bool = False
) -> dict[str, Array]:
    """Return the arrays of an `.npz` file by name; see `parse_npy`.

    All arrays together may have `limit` bytes. The message about the limit ends with `remedy`, for users who trust the file.

    Raises:
        FormatError: A file is damaged or not an array, or the arrays exceed `limit`. numpy and zlib raise their own errors.

    Memory: arrays that are not compressed alias `content`.
    """
    expanded = sum(file.file_size for file in files.values())
    if expanded > limit:
        raise FormatError(f"{len(content):,} bytes expand to {expanded:,}, expected at most {limit:,}{remedy}")
    arrays = {}
    for name, file in files.items():
        try:
            if not name.endswith(".npy"):
                raise FormatError("is not an array")
            raw = view_content(lambda begin, end: content[begin:end], file)
            if file.compress_type == zipfile.ZIP_DEFLATED:
                raw = memoryview(zlib.decompressobj(-15).decompress(raw, file.file_size + 1))
            check_content(raw, file)
            arrays[name[:-4]] = parse_npy(raw, trust)
        except FormatError as exc:
            raise exc.at(f"array {name.removesuffix('.npy')!r:.100}") from exc
    return arrays


def gunzip(raw: bytes, limit: int, remedy: str) -> bytes:
    """Return a gzip file's content. Raise FormatError with `remedy` beyond `limit` bytes, and gzip's errors for damage."""
    # in pieces, because gzip.decompress copies all bytes after each of the concatenated streams
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file, io.BytesIO() as expanded:
        while piece := file.read(_PIECE_NBYTES):
            if expanded.tell() + len(piece) > limit:
                raise FormatError(f"the gzip file of {len(raw):,} bytes expands to more than {limit:,}{remedy}")
            expanded.write(piece)
        return expanded.getvalue()
