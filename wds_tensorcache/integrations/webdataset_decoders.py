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

__all__ = ["MAX_EXPANDED_NBYTES", "MemberDecoder"]

MAX_EXPANDED_NBYTES = 1 << 26
_MAX_RATIO = 64
_MAX_NPY_HEADER_NBYTES = 10_000  # numpy's own limit
_PIECE_NBYTES = 1 << 20
_MAX_EXTENSION = 100
_JPEGS = ("JPEG", "MPO", "BLP")
_MAX_SCANS = 100  # programs write about ten
_BYTES_PER_SCAN = 4096  # further ones: what comes after a picture, such as a video, may look like scans
_NPY = b"\x93NUMPY"

Handler = Callable[[str, bytes], Any]


class MemberDecoder(Decoder):
    """webdataset's `Decoder`, whose own decoders raise FormatError for bad bytes. Errors of the caller's functions pass.

    Args:
        handlers: The caller's functions, in the order in which they are called.
        own: Function of an extension, called after the handlers. Returns None or the decoder of such members, a function of
            (bytes, number of bytes that those may become).
        max_expanded_nbytes: As of `decode`.
        options: Of webdataset's `Decoder`.
    """

    def __init__(self, handlers: list[Any], own: Any, max_expanded_nbytes: int, **options: Any) -> None:
        super().__init__([*handlers, own], **options)
        self._max_expanded_nbytes = max_expanded_nbytes
        self._bounded: list[Any] = [_Stock(handler) if _is_stock(handler) else None for handler in self.handlers]
        self._own = own

    def decode1(self, key: str, data: bytes) -> Any:
        """Decode one member, `key` without the first dot."""
        # of the member as it is in the tar: the bound of an `npz.gz` is not 64 times that of the `gz`
        limit = max(self._max_expanded_nbytes, _MAX_RATIO * len(data))
        extension = "." + key
        try:
            for handler, bounded in zip(self.handlers, self._bounded, strict=True):
                if handler is self._own:
                    decode = handler(extension)
                    if decode is not None:
                        # Hazard: None, if that is what was decoded, would make webdataset's decoders read the member
                        return decode(data, limit)
                    continue
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
            kind = key.rpartition(".")[2]
            if len(kind) > _MAX_EXTENSION:
                return None  # webdataset's expressions take the square of it
            if self._handler is autodecode.gzfilter:
                return Continue(key[:-3], _expand(data, limit)) if key.endswith(".gz") else None
            if isinstance(self._handler, autodecode.ImageHandler) and kind.lower() in self._handler.extensions:
                _check_picture(data)
            elif self._handler is autodecode.basichandlers:
                if kind == "npz":
                    _check_npz(data, limit)
                elif kind == "npy":
                    _check_npy(io.BytesIO(data), len(data))
                elif kind in ("ten", "tb"):
                    _check_ten(data)
                elif kind == "cbor":
                    # arrays that nest 10^5 deep overflow C's stack in its decoder, and its keys may collide
                    raise FormatError("CBOR is not decoded: use tc.decode(wds.handle_extension('cbor', cbor.loads))")
            return self._handler(key, data)
        except (TensorCacheError, ImportError):  # a missing package says nothing about the bytes
            raise
        except Exception as exc:  # anything that numpy, json, Pillow, … raise for bad bytes
            raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _expand(data: bytes, limit: int) -> bytes:
    # in one pass, and not by gzip.decompress, which copies the rest of the bytes for each of the gzips that they hold
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file, io.BytesIO() as expanded:
        while piece := file.read(_PIECE_NBYTES):
            if expanded.tell() + len(piece) > limit:
                raise _too_large(len(data), f"more than {limit}", limit)
            expanded.write(piece)
        return expanded.getvalue()


def _too_large(nbytes: int, count: Any, limit: int) -> FormatError:
    return FormatError(
        f"{nbytes} compressed bytes become {count}, expected at most {limit}; if you trust the shard, use "
        "tc.decode(max_expanded_nbytes=…)"
    )


def _check_npz(data: bytes, limit: int) -> None:
    """Raise FormatError if the arrays of an npz are larger together than they may be, or than it is."""
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
            with archive.open(file) as stream:
                _check_npy(stream, file.file_size)


def _check_picture(data: bytes) -> None:
    """Raise FormatError if Pillow takes more for a picture than its own limit, `PIL.Image.MAX_IMAGE_PIXELS`, bounds."""
    import PIL.Image  # not among this package's requirements

    with PIL.Image.open(io.BytesIO(data)) as picture:
        codecs = {tile[0] for tile in picture.tile}
        if "eps" in codecs:
            raise FormatError("EPS is a program, which Pillow runs in Ghostscript; use a handler of yours")
        if "fits_gzip" in codecs:
            raise FormatError("a FITS picture that is compressed, which Pillow expands without a bound")
        # each scan of a progressive JPEG takes 10 bytes, and a walk over all pixels
        num_scans = data.count(b"\xff\xda") if picture.format in _JPEGS else 0
        if num_scans > _MAX_SCANS + len(data) // _BYTES_PER_SCAN:
            raise FormatError(f"a JPEG of {num_scans} scans, expected at most {_MAX_SCANS}")


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
