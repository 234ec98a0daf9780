"""Guards for webdataset's own decoders. Bad bytes raise FormatError, and a small member never takes much memory."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import numpy as np
from webdataset import autodecode
from webdataset.autodecode import Continue, Decoder

from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.integrations.arrays import gunzip, list_zip, parse_npy, parse_npz
from wds_tensorcache.integrations.pickles import decode_pickle, load_pth
from wds_tensorcache.shards.expansion import check_objects, max_expanded

_MAX_EXTENSION = 100
_JPEGS = ("JPEG", "MPO", "BLP")
_MAX_SHRUNK = 1 << 25  # pixels of a picture that is made smaller; a JPEG is decoded at a fraction of its size
_MAX_SCANS = 100  # programs write about ten scans
_BYTES_PER_SCAN = 4096  # bytes after the picture, such as a video, contain markers of scans by chance
_PICKLES: Any = decode_pickle  # marks the place of `_unpickle` among the handlers
_LIMIT_REMEDY = "; if you trust the shard, use tc.decode(max_expanded_nbytes=…)"


class MemberDecoder(Decoder):
    """A version of webdataset's `Decoder` that raises FormatError for bad bytes.

    Errors of the caller's own functions, the `handlers`, are not changed.
    """

    def __init__(self, handlers: list[Any], allow: Allowed, max_expanded_nbytes: int, **options: Any) -> None:
        super().__init__([*handlers, _PICKLES], **options)
        self._allow, self._max_expanded_nbytes = allow, max_expanded_nbytes
        self._is_stock = [_is_stock(handler) for handler in self.handlers]

    def decode1(self, key: str, content: bytes) -> Any:
        """Decode one member; `key` is its extension without the first dot. Return `content` if no handler knows it."""
        # relative to the member in the tar, so that the ratio is applied only once to an `npz.gz`
        extension, nbytes = "." + key, len(content)
        limit = max_expanded(nbytes, self._max_expanded_nbytes)
        try:
            for handler, is_stock in zip(self.handlers, self._is_stock, strict=True):
                kind = extension.rpartition(".")[2]
                if handler is _PICKLES:
                    if kind in ("pyd", "pickle", "pkl", "pth"):
                        # return also None: otherwise webdataset's own unpickler would run next
                        return _unpickle(kind, content, limit, self._allow)
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


def _unpickle(kind: str, content: bytes, limit: int, allow: Allowed) -> Any:
    remedy = f"; if you trust the shard, use tc.decode(wds.handle_extension({kind!r}, …)) or tc.decode(max_expanded_nbytes=…)"
    if kind != "pth":
        return decode_pickle(content, limit, remedy, allow)
    return load_pth(io.BytesIO(content), content, limit, remedy, allow)


def _is_stock(handler: Any) -> bool:
    """Return whether a handler's errors depend only on the bytes."""
    is_function = isinstance(handler, types.FunctionType) and handler.__module__ == autodecode.__name__
    return is_function or isinstance(handler, autodecode.ImageHandler)


def _decode_stock(handler: Any, extension: str, content: bytes, limit: int) -> Any:
    """Decode a member as webdataset does, with further checks."""
    kind = extension.rpartition(".")[2]
    if len(kind) > _MAX_EXTENSION:
        return None  # webdataset's regular expressions are quadratic in the length of an extension
    try:
        if handler is autodecode.gzfilter:
            return Continue(extension[:-3], gunzip(content, limit, _LIMIT_REMEDY)) if kind == "gz" else None
        if isinstance(handler, autodecode.ImageHandler) and kind.lower() in handler.extensions:
            _check_picture(content)
        elif handler is autodecode.basichandlers:
            if kind == "npz":
                arrays = parse_npz(memoryview(content), list_zip(io.BytesIO(content)), limit, _LIMIT_REMEDY)
                return {name: array.copy() for name, array in arrays.items()}
            if kind == "npy":
                return parse_npy(content).copy()
            if kind in ("ten", "tb"):
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


def _check_picture(content: bytes) -> None:
    """Refuse pictures whose cost Pillow's limit on pixels does not bound."""
    import PIL.Image  # not among this package's requirements

    with PIL.Image.open(io.BytesIO(content)) as picture:
        codecs = {tile[0] for tile in picture.tile}
        if codecs & {"eps", "fits_gzip"}:
            # Pillow runs Ghostscript for EPS, and expands compressed FITS without a limit
            raise FormatError("EPS and compressed FITS pictures are refused; use your own handler")
        # each scan of a progressive JPEG takes only 10 bytes, but costs a walk over all pixels
        num_scans = content.count(b"\xff\xda") if picture.format in _JPEGS else 0
        if num_scans > _MAX_SCANS + len(content) // _BYTES_PER_SCAN:
            raise FormatError(f"the JPEG has {num_scans} scans, which cost a walk over all pixels each")


def shrink_picture(content: bytes, max_side: int, max_nbytes: int) -> tuple[bytes, int, int]:
    """Return a picture as a small JPEG, with its width and height.

    The picture is a JPEG, PNG or WebP. The result is upright, with sides of at most `max_side` pixels. The picture gets
    smaller until the JPEG has at most `max_nbytes` bytes, or the picture at most 8 x 8 pixels.

    Raises:
        FormatError: The bytes are damaged or of another format, or more than 2^25 pixels would be decoded.
        ImportError: Pillow is not installed.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as picture:
            _check_picture(content)
            picture.draft("RGB", (max_side, max_side))
            if picture.width * picture.height > _MAX_SHRUNK:
                raise ValueError(f"the picture has {picture.width} x {picture.height} pixels")
            is_deep = picture.mode.startswith("I")  # 16 bits, which Pillow would clip
            plain = PIL.Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)) if is_deep else picture
            plain.info = picture.info  # with the orientation
            small = PIL.ImageOps.exif_transpose(plain.convert("RGB"))
        while True:
            small.thumbnail((max_side, max_side))
            file = io.BytesIO()
            # Hazard: without `comment`, Pillow copies the comment of the file, which may have 64 KiB.
            small.save(file, "JPEG", quality=80, comment=b"")
            if file.tell() <= max_nbytes or max_side <= 8:
                return file.getvalue(), small.width, small.height
            max_side = max(small.size) * 3 // 4
    except Exception as exc:  # Pillow raises all kinds of errors for bad bytes
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _check_ten(content: bytes) -> None:
    """Raise FormatError if a chunk of tensors exceeds its member."""
    # Hazard: on a negative length, webdataset would loop forever.
    at = 0
    while at < len(content):
        nbytes = int.from_bytes(content[at + 8 : at + 16], sys.byteorder, signed=True)
        if not 0 <= nbytes <= len(content) - at - 16:
            raise FormatError(f"the chunk at byte {at} declares {nbytes} bytes, in a member of {len(content)} bytes")
        at += 16 + nbytes + -nbytes % 64
