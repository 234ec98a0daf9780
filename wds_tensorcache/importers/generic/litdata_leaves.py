"""Leaves of the samples in litdata's chunks, in the form that litdata's serializers give them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.media import Media, decode_list, decode_pil, extension_of
from wds_tensorcache.importers.safe_files import as_tensor, parse_pickle

_TORCH_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float32 float32 float64 float64 complex64 complex64 complex128 complex128 float16 float16 bfloat16 uint8 int8 "
        "int16 int16 int32 int32 int64 int64 bool uint16"
    ).split()
)
_NUMPY_DTYPES = tuple("i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 ?".split())  # then objects and texts of no length
_JSON_TAG = b"\0"


def decode_leaf(data_format: str, trust: bool, raw: bytes) -> Any:
    """Return the value of a leaf.

    Args:
        data_format: Kind of the leaf, as in `index.json`: `int`, `no_header_tensor:18`, `image:png`.
        trust: As for `parse_pickle`.
        raw: Stored bytes.

    Returns:
        The value; a `Media` for encoded media.

    Raises:
        FormatError: The bytes are damaged, or this kind of leaf is not read.
    """
    kind, _, argument = str(data_format).partition(":")
    try:
        if kind == "pickle":
            return parse_pickle(raw, trust)
        if kind in _MEDIA:
            named = argument if argument.isalnum() else ""
            # litdata names pictures jpg if it does not know their extension
            return Media(named if named and kind != "image" else extension_of(raw, "", named or _MEDIA[kind]), raw)
        if kind in ("no_header_tensor", "no_header_numpy"):
            dtypes: tuple[Any, ...] = _TORCH_DTYPES if kind == "no_header_tensor" else _NUMPY_DTYPES
            return _decode_array(raw, dtypes[int(argument)], None)
        if kind not in _DECODERS:
            raise FormatError("this kind of leaf is not read")
        return _DECODERS[kind](raw)
    except FormatError as exc:
        raise exc.at(f"leaf {data_format!r:.40}") from exc
    except (ValueError, LookupError, struct.error, RecursionError, RuntimeError) as exc:
        raise FormatError(f"leaf {data_format!r:.40} cannot be decoded: {exc!r:.200}") from exc


def _decode_tensor(raw: bytes) -> Any:
    """Decode a tensor with its dtype and shape, which older releases write little-endian, newer ones big-endian."""
    for order in "<>":
        number, ndim = struct.unpack_from(order + "II", raw)
        begin = 8 + 4 * ndim
        if number < len(_TORCH_DTYPES) and begin <= len(raw):
            shape = np.frombuffer(raw, order + "u4", ndim, 8).tolist()
            if begin + math.prod(shape) * _TORCH_DTYPES[number].itemsize == len(raw):
                return _decode_array(raw[begin:], _TORCH_DTYPES[number], shape)
    raise ValueError("its dtype and shape do not fit its length")


def _decode_numpy(raw: bytes) -> Any:
    number, ndim = struct.unpack_from("<II", raw)
    shape = np.frombuffer(raw, "<u4", ndim, 8).tolist()
    return _decode_array(raw[8 + 4 * ndim :], _NUMPY_DTYPES[number], shape)


def _decode_array(raw: bytes, dtype: Any, shape: list[int] | None) -> Any:
    shape = [-1] if shape is None else shape
    if not isinstance(dtype, torch.dtype):
        return as_tensor(np.frombuffer(raw, dtype).reshape(shape))
    if not raw:
        return torch.empty([0 if size < 0 else size for size in shape], dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_json(raw: bytes) -> Any:
    if raw.startswith(_JSON_TAG):
        raw = raw[5 : 5 + int.from_bytes(raw[1:5], "little")]
    if raw[:1] not in (b"[", b"{"):
        raise FormatError("nested values in litdata's compact form are not read; store them as str")
    return json.loads(raw)


_MEDIA = {  # kind: extension if neither the format nor the first bytes tell it
    "jpeg": "jpg", "image": "jpg", "video": "mp4", "audio": "wav", "tifffile": "tif", "tiff": "tif", "pdf": "pdf",
    "file": "bin", "mesh": "bin", "nifti": "nii",
}  # fmt: skip
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": lambda raw: raw[0] != 0,
    "int": lambda raw: struct.unpack("<q", raw)[0],
    "float": lambda raw: struct.unpack("<d", raw)[0],
    "bytes": lambda raw: as_tensor(np.frombuffer(raw, np.uint8)),
    "tensor": _decode_tensor,
    "numpy": _decode_numpy,
    "json": _decode_json,
    "pil": decode_pil,
    "jpeg_array": lambda raw: decode_list(raw, 0, partial(Media, "jpg")),
}
