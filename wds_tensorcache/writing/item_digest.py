"""The digest of an item, by which `build` detects a changed item."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath
from struct import Struct
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

_COUNT, _FLOAT = Struct("<cQ").pack, Struct("<cd").pack
_CONSTANTS = {None: b"N", True: b"T", False: b"F"}
_ARRAYS, _TENSORS = (np.ndarray, np.memmap), (torch.Tensor, torch.nn.Parameter)
_KINDS = "biufcSUmM"  # kinds of numpy dtypes whose bytes are their values


def digest_item(value: Any) -> int:
    """Return the digest of an item, or 0 if it has none.

    The digest is the XXH3-64 of the following bytes, or 1 if this hash is 0. Each value begins with a letter and, where its
    length can vary, a count of 8 bytes, so that different values have different bytes. All numbers are little-endian.

    - None, True and False: `N`, `T`, `F`.
    - int: `i`, count, two's complement. float: `f`, 8 bytes. str: `s`, count, UTF-8. bytes: `b`, count, the bytes.
    - Paths: `p`, length of the file, then the path as a str. The file is not read. The length is 2^64 - 1 for a folder, and for
      a path of another system (`PurePath`). A file that does not exist has no digest.
    - list, tuple and dict: `l`, `t` or `d`, count, then the values, or keys and values, in their order.
    - Arrays and numbers of numpy, and tensors: `a` or `x`, number of dimensions, the dtype as a str, the dimensions, then the
      bytes in C order.

    All other types, such as subclasses of dict, have no digest: `fn` may depend on more than their content.

    Memory: arrays and tensors are copied only if they are not contiguous, or not in the memory of the CPU.
    """
    state = xxh3_64()
    try:
        _feed(state.update, value)
    except (OSError, RuntimeError, TypeError, ValueError):  # also of tensors and arrays of exotic types
        return 0
    return state.intdigest() or 1


def _feed(update: Any, value: Any) -> None:
    kind = type(value)
    if kind is str:
        _feed_bytes(update, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is int:
        _feed_bytes(update, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif value is None or kind is bool:
        update(_CONSTANTS[value])
    elif kind is float:
        update(_FLOAT(b"f", value))
    elif kind is bytes:
        _feed_bytes(update, b"b", value)
    elif kind is dict:
        update(_COUNT(b"d", len(value)))
        for key, part in value.items():
            _feed(update, key)
            _feed(update, part)
    elif kind is list or kind is tuple:
        update(_COUNT(b"l" if kind is list else b"t", len(value)))
        for part in value:
            _feed(update, part)
    elif kind in _ARRAYS or isinstance(value, np.generic):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"a {kind.__name__} has no digest")
        _feed_array(update, b"a", value.dtype.str, value.shape)
        update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif kind in _TENSORS:
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise TypeError(f"a {kind.__name__} has no digest")
        _feed_array(update, b"x", str(value.dtype), value.shape)
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # a tensor of one element may be contiguous with any stride, which a view as bytes refuses
        update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    elif isinstance(value, PurePath):
        update(_COUNT(b"p", _file_nbytes(value)))
        _feed(update, os.fspath(value))
    else:
        raise TypeError(f"a {kind.__name__} has no digest")


def _feed_bytes(update: Any, letter: bytes, raw: bytes) -> None:
    update(_COUNT(letter, len(raw)))
    update(raw)


def _feed_array(update: Any, letter: bytes, dtype: str, shape: Any) -> None:
    update(_COUNT(letter, len(shape)))
    _feed(update, dtype)
    for dim in shape:
        update(_COUNT(b"n", dim))


def _file_nbytes(path: PurePath) -> int:
    if isinstance(path, Path):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return (1 << 64) - 1
