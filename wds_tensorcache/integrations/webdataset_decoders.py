"""webdataset's own decoders, guarded: bad bytes are FormatErrors, and a small member never takes much memory."""

from __future__ import annotations

import ast
import gzip
import io
import math
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from webdataset import autodecode
from webdataset.autodecode import Continue, Decoder

from wds_tensorcache.errors import FormatError, TensorCacheError

__all__ = ["MAX_EXPANDED_NBYTES", "MemberDecoder", "check_zip"]

MAX_EXPANDED_NBYTES = 1 << 26
_MAX_RATIO = 64
_MAX_DEFLATE_RATIO = 1032
_MAX_NPY_HEADER_NBYTES = 10_000  # numpy's own limit
_PIECE_NBYTES = 1 << 20
_NPY = b"\x93NUMPY"

Handler = Callable[[str, bytes], Any]


class MemberDecoder(Decoder):
    """webdataset's `Decoder`, whose own decoders raise FormatError for bad bytes. Errors of the caller's functions pass.

    Args:
        handlers: The caller's functions, in the order in which they are called.
        own: Function of (extension, bytes, number of bytes that those may become), called after the handlers.
        max_expanded_nbytes: As of `decode`.
        options: Of webdataset's `Decoder`.
    """

    def __init__(self, handlers: list[Any], own: Any, max_expanded_nbytes: int, **options: Any) -> None:
        super().__init__([*handlers, own], **options)
        self._max_expanded_nbytes = max_expanded_nbytes
        self._bounded: list[Any] = [
            own if handler is own else _Stock(handler) if _is_stock(handler) else None for handler in self.handlers
        ]

    def decode1(self, key: str, data: bytes) -> Any:
        """Decode one member, `key` without the first dot."""
        # of the member as it is in the tar: the bound of an `npz.gz` is not 64 times that of the `gz`
        limit = max(self._max_expanded_nbytes, _MAX_RATIO * len(data))
        extension = "." + key
        try:
            for handler, bounded in zip(self.handlers, self._bounded, strict=True):
                result = handler(extension, data) if bounded is None else bounded(extension, data, limit)
                if isinstance(result, Continue):
                    extension, data = result.key, result.data
                elif result is not None:
                    return result
        except TensorCacheError as exc:
            raise exc.at(f"member {key!r}") from exc.__cause__ or exc
        return data


def _is_stock(handler: Any) -> bool:
    """Return whether a handler is webdataset's own code, in which the bytes alone decide what is raised."""
    is_function = isinstance(handler, types.FunctionType) and handler.__module__ == autodecode.__name__
    return is_function or isinstance(handler, autodecode.ImageHandler)


class _Stock:
    """One of webdataset's decoders."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, key: str, data: bytes, limit: int) -> Any:
        try:
            if self._handler is autodecode.gzfilter:
                return Continue(key[:-3], _expand(data, limit)) if key.endswith(".gz") else None
            if self._handler is autodecode.basichandlers:
                kind = key.rpartition(".")[2]
                if kind == "npz":
                    check_zip(data, limit, is_numpy=True)
                elif kind == "npy":
                    _check_npy(io.BytesIO(data), len(data))
                elif kind in ("ten", "tb"):
                    _check_ten(data)
            return self._handler(key, data)
        except (TensorCacheError, ImportError):  # a missing package says nothing about the bytes
            raise
        except Exception as exc:  # anything that numpy, json, Pillow, … raise for bad bytes
            raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _expand(data: bytes, limit: int) -> bytes:
    if len(data) * _MAX_DEFLATE_RATIO > limit:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            # Hazard: a bomb. Pieces are counted before any is kept, so refusing takes the memory of one piece.
            count = 0
            while count <= limit and (piece := file.read(_PIECE_NBYTES)):
                count += len(piece)
        if count > limit:
            raise _too_large(len(data), f"more than {limit}", limit)
    return gzip.decompress(data)


def _too_large(nbytes: int, count: Any, limit: int) -> FormatError:
    return FormatError(
        f"{nbytes} compressed bytes become {count}, expected at most {limit}; if you trust the shard, use "
        "tc.decode(max_expanded_nbytes=…)"
    )


def check_zip(data: bytes, limit: int, *, is_numpy: bool) -> None:
    """Raise FormatError if the files of a zip are larger together than they may be.

    Args:
        data: The zip.
        limit: How many bytes they may be.
        is_numpy: They are arrays, whose sizes are checked, too.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
            count = sum(file.file_size for file in files)
            if count > limit:
                raise _too_large(len(data), count, limit)
            if len({file.filename for file in files}) < len(files):
                # each name would be read as the last file of that name, again and again
                raise FormatError("two files of the zip have one name")
            for file in files:
                if file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    # others ask for gigabytes before the first byte, as LZMA does for its dictionary
                    raise FormatError(f"{file.filename!r:.100} is neither stored nor deflated in the zip")
                if is_numpy:
                    with archive.open(file) as stream:
                        _check_npy(stream, file.file_size)
    except FormatError:
        raise
    except Exception as exc:  # zipfile raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _check_ten(data: bytes) -> None:
    """Raise FormatError if a chunk of tensors is not within its member: webdataset loops forever on a negative length."""
    at = 0
    while at < len(data):
        nbytes = int.from_bytes(data[at + 8 : at + 16], sys.byteorder, signed=True)
        if not 0 <= nbytes <= len(data) - at - 16:
            raise FormatError(f"a chunk of {nbytes} bytes at byte {at}, of {len(data)}")
        at += 16 + nbytes + -nbytes % 64


def _check_npy(stream: Any, nbytes: int) -> None:
    """Raise FormatError if an array announces more elements than its file has; numpy would first take memory for them."""
    head = stream.read(8)
    if not head.startswith(_NPY) or len(head) < 8:
        return  # for numpy to refuse
    shape, dtype = _read_npy_header(stream, head[6])
    count = math.prod(shape)
    if not dtype.hasobject and (min(shape, default=0) < 0 or count * max(1, dtype.itemsize) > max(nbytes, 0)):
        raise FormatError(f"an array of {dtype} {list(shape)!r:.200} in {nbytes} bytes")


def _read_npy_header(stream: BinaryIO, version: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    read_known = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}.get(version)
    if read_known is not None:
        shape, _, dtype = read_known(stream)
        return shape, dtype
    (length,) = struct.unpack("<I", stream.read(4))
    if length > _MAX_NPY_HEADER_NBYTES:
        raise FormatError(f"an npy header of {length} bytes, expected at most {_MAX_NPY_HEADER_NBYTES}")
    header = ast.literal_eval(stream.read(length).decode("utf-8"))
    return tuple(header["shape"]), np.lib.format.descr_to_dtype(header["descr"])
