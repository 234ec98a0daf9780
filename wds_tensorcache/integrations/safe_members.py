"""Guards for webdataset's own decoders (gz, npz, npy, ten, cbor, pictures).

Bad bytes raise FormatError, and a small member never takes much memory. `.pth` members are read by `pth.py`.
"""

from __future__ import annotations

import gzip
import io
import math
import sys
import types
import zipfile
from typing import Any

import numpy as np
from webdataset import autodecode
from webdataset.autodecode import Continue, Decoder

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.expansion import check_objects, max_expanded

_PIECE_NBYTES = 1 << 20
_MAX_EXTENSION = 100
_JPEGS = ("JPEG", "MPO", "BLP")
_MAX_SCANS = 100  # programs write about ten scans
_BYTES_PER_SCAN = 4096  # bytes after the picture, such as a video, contain markers of scans by chance


class MemberDecoder(Decoder):
    """webdataset's `Decoder`, but bad bytes raise FormatError. Errors of the caller's own functions are not changed.

    Args:
        handlers: Functions of the caller, in call order.
        own: Function of an extension, called after the handlers. It returns None, or a decoder for members with that
            extension: a function of a member's bytes and of the limit for the size of the result in bytes.
        max_expanded_nbytes: As for `decode`.
        options: Options of webdataset's `Decoder`.
    """

    def __init__(self, handlers: list[Any], own: Any, max_expanded_nbytes: int, **options: Any) -> None:
        super().__init__([*handlers, own], **options)
        self._max_expanded_nbytes = max_expanded_nbytes
        self._own = own
        self._is_stock = [_is_stock(handler) for handler in self.handlers]

    def decode1(self, key: str, content: bytes) -> Any:
        """Decode one member; `key` is its extension without the first dot."""
        # relative to the member in the tar, so that the ratio is applied only once to an `npz.gz`
        extension, nbytes = "." + key, len(content)
        limit = max_expanded(nbytes, self._max_expanded_nbytes)
        try:
            for handler, is_stock in zip(self.handlers, self._is_stock, strict=True):
                if handler is self._own:
                    decode = handler(extension)
                    if decode is not None:
                        # if the result is None, webdataset's own unpickler would run next
                        return decode(content, limit)
                    continue
                result = _decode_stock(handler, extension, content, limit) if is_stock else handler(extension, content)
                if isinstance(result, Continue):
                    extension, content = result.key, result.data
                    if is_stock:
                        check_objects(extension, len(content), nbytes, self._max_expanded_nbytes, "tc.decode")
                elif result is not None:
                    return result
        except TensorCacheError as exc:
            raise exc.at(f"member {key!r}") from exc.__cause__ or exc
        return content


def _is_stock(handler: Any) -> bool:
    """Return whether a handler is webdataset's own code: its errors then depend only on the bytes."""
    is_function = isinstance(handler, types.FunctionType) and handler.__module__ == autodecode.__name__
    return is_function or isinstance(handler, autodecode.ImageHandler)


def _decode_stock(handler: Any, extension: str, content: bytes, limit: int) -> Any:
    """Make the checks that webdataset's decoder lacks, then call it; return None if it does not handle the extension."""
    kind = extension.rpartition(".")[2]
    if len(kind) > _MAX_EXTENSION:
        return None  # webdataset's regular expressions are quadratic in the length of an extension
    try:
        if handler is autodecode.gzfilter:
            return Continue(extension[:-3], _expand(content, limit)) if kind == "gz" else None
        if isinstance(handler, autodecode.ImageHandler) and kind.lower() in handler.extensions:
            _check_picture(content)
        elif handler is autodecode.basichandlers:
            if kind == "npz":
                _check_npz(content, limit)
            elif kind == "npy":
                _check_npy(io.BytesIO(content), len(content))
            elif kind in ("ten", "tb"):
                _check_ten(content)
            elif kind == "cbor":
                # arrays nested 10^5 deep overflow C's stack in the decoder, and keys may have colliding hashes
                raise FormatError(
                    "CBOR is not decoded, because the cost is unbounded; if you trust the shard, use "
                    "tc.decode(wds.handle_extension('cbor', cbor.loads))"
                )
        return handler(extension, content)
    except (TensorCacheError, ImportError):  # a missing package is not a fault of the bytes
        raise
    except Exception as exc:  # numpy, json, Pillow, … raise all kinds of errors for bad bytes
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _expand(content: bytes, limit: int) -> bytes:
    # in pieces, because gzip.decompress copies all bytes after each gzip member, which is quadratic
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file, io.BytesIO() as expanded:
        while piece := file.read(_PIECE_NBYTES):
            if expanded.tell() + len(piece) > limit:
                raise _too_large(len(content), f"more than {limit}", limit)
            expanded.write(piece)
        return expanded.getvalue()


def _too_large(nbytes: int, count: Any, limit: int) -> FormatError:
    return FormatError(
        f"{nbytes} compressed bytes expand to {count}, expected at most {limit}; if you trust the shard, use "
        "tc.decode(max_expanded_nbytes=…)"
    )


def _check_npz(content: bytes, limit: int) -> None:
    """Raise FormatError if numpy could not load an npz safely.

    This is so if the files in the npz together expand beyond the limit, if two of them have the same name, if one is compressed
    by anything but deflate, or if an array declares more bytes than its file has.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = archive.infolist()
        count = sum(file.file_size for file in files)
        if count > limit:
            raise _too_large(len(content), count, limit)
        if len({file.filename for file in files}) < len(files):
            # for each of these names, numpy would expand the last file with that name
            raise FormatError("two files in the npz have the same name")
        for file in files:
            if file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # other methods may allocate gigabytes before the first byte, for example LZMA for its dictionary
                raise FormatError(f"{file.filename!r:.100} is compressed, but not by deflate, as numpy does")
            with archive.open(file) as stream:
                _check_npy(stream, file.file_size)


def _check_picture(content: bytes) -> None:
    """Raise FormatError for pictures that may be too costly although Pillow has a limit, `PIL.Image.MAX_IMAGE_PIXELS`."""
    import PIL.Image  # not among this package's requirements

    with PIL.Image.open(io.BytesIO(content)) as picture:
        codecs = {tile[0] for tile in picture.tile}
        if "eps" in codecs:
            raise FormatError("EPS pictures are refused: they are programs, run by Ghostscript; use your own handler")
        if "fits_gzip" in codecs:
            raise FormatError("compressed FITS is refused: Pillow expands it without a limit; use your own handler")
        # each scan of a progressive JPEG takes only 10 bytes, but costs a walk over all pixels
        num_scans = content.count(b"\xff\xda") if picture.format in _JPEGS else 0
        max_scans = _MAX_SCANS + len(content) // _BYTES_PER_SCAN
        if num_scans > max_scans:
            raise FormatError(f"the JPEG has {num_scans} scans, expected at most {max_scans}")


def _check_ten(content: bytes) -> None:
    """Raise FormatError if a chunk of tensors exceeds its member; on a negative length, webdataset would loop forever."""
    at = 0
    while at < len(content):
        nbytes = int.from_bytes(content[at + 8 : at + 16], sys.byteorder, signed=True)
        if not 0 <= nbytes <= len(content) - at - 16:
            raise FormatError(f"the chunk at byte {at} declares {nbytes} bytes, in a member of {len(content)} bytes")
        at += 16 + nbytes + -nbytes % 64


def _check_npy(stream: Any, nbytes: int) -> None:
    """Raise FormatError if there are not enough bytes for an array: numpy would allocate its memory before reading them."""
    head = stream.read(8)
    if not head.startswith(b"\x93NUMPY") or len(head) < 8:
        return  # numpy refuses it
    # version 3 is version 2 with non-ASCII field names, which do not matter here
    npy = np.lib.format
    shape, _, dtype = (npy.read_array_header_1_0 if head[6] == 1 else npy.read_array_header_2_0)(stream)
    count = math.prod(shape)
    if not dtype.hasobject and (min(shape, default=0) < 0 or count * max(1, dtype.itemsize) > max(nbytes, 0)):
        raise FormatError(f"an array of {dtype} {list(shape)!r:.200} exceeds its file of {nbytes} bytes")
