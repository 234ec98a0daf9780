"""The column `__tensorcache__`: a sample without the elements of its tensors, so that a row can become the sample again.

The bytes of a row are

1. one byte of flags: whether small values have columns, and whether the cache has a fingerprint;
2. the length, u32, and the text of a JSON object: the dtype of each tensor column, null for columns that the sample lacks, and
   at `__key__` the original name, if the key has a hash of it;
3. the length, u32, of a skeleton, the skeleton, and its tensors.

This skeleton is that of the sample, with an empty tensor of the same dtype in place of each tensor that has a column.

Members outside caches have columns named by a dot and their suffix, such as `.jpg`. No path in a sample begins with a dot.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.sample import encode_sample
from wds_tensorcache.codec.tensor_names import component, join_path
from wds_tensorcache.codec.tree import Path, flatten, map_leaves, rebuild, separate, walk
from wds_tensorcache.errors import FormatError
from wds_tensorcache.ray.rows.bits import dtype_text, parse_dtype
from wds_tensorcache.reading.structure import value_at

KEY = "__key__"
STRUCTURE = "__tensorcache__"
MEMBER = "."  # first character of the columns of members
_VALUES = 1  # flag: the small values of the sample have columns
_DESCRIBED = 2  # flag: the sample comes from a cache with a fingerprint
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a row in the column `__tensorcache__`.

    Attributes:
        has_values: True if the small values have columns.
        is_described: True if the sample comes from a cache with a fingerprint.
        dtypes: Dtypes of the tensor columns, by name.
        absent: Names of columns that the sample has nothing for.
        original: Original name, if the key that was read has a hash of it.
        skeleton, tensors: The two members of the sample without the elements of tensors that have columns.
    """

    has_values: bool
    is_described: bool
    dtypes: dict[str, torch.dtype | np.dtype[Any]]
    absent: frozenset[str]
    original: str | None
    skeleton: bytes
    tensors: bytes


def encode_structure(
    sample: Any,
    columns: Iterable[str],
    *,
    has_values: bool,
    is_described: bool = False,
    original: str | None = None,
    allow: Iterable[type] = (),
) -> bytes:
    """Return the bytes of a sample's row in the column `__tensorcache__`.

    Args:
        sample: Sample with lazy tensors. Tensors that `tc.flatten` does not return have no columns; they are stored here.
        columns: Names of columns for which other samples of the block have a value, and this one has none.
        has_values: True if the small values have columns.
        is_described: True if the sample comes from a cache with a fingerprint.
        original: Original name, if the key has a hash of it.
        allow: Classes that the sample may contain.
    """
    sample, _ = separate(sample)  # each name has a column, which a function may change
    lazies: dict[str, Any] = flatten(sample)
    dtypes: dict[str, str | None] = {name: dtype_text(lazy) for name, lazy in lazies.items()}
    dtypes.update(dict.fromkeys(columns))
    if original is not None:
        dtypes[KEY] = original

    def empty(lazy: Any) -> Any:
        dtype: Any = lazy.dtype
        if lazies.get(lazy.name) is not lazy:
            return lazy.load()
        return torch.empty(0, dtype=dtype) if isinstance(dtype, torch.dtype) else np.empty(0, dtype)

    skeleton, tensors = encode_sample(rebuild(sample, empty, Lazy), allow=allow)
    names = json.dumps(dtypes, separators=(",", ":")).encode()
    flags = bytes([_VALUES * has_values | _DESCRIBED * is_described])
    return b"".join((flags, _LENGTH.pack(len(names)), names, _LENGTH.pack(len(skeleton)), skeleton, tensors))


def parse_structure(raw: bytes) -> Structure:
    """Return the parts of a row in the column `__tensorcache__`; the skeleton is not decoded.

    Raises:
        FormatError: These are not bytes of the column `__tensorcache__`.
    """
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        # `bytes` of a number would be that many zeros
        raise FormatError(f"the column {STRUCTURE!r} has a {type(raw).__name__}, expected bytes; drop the column")
    raw = bytes(raw)
    try:
        (count,) = _LENGTH.unpack_from(raw, 1)
        begin = 1 + _LENGTH.size + count
        (length,) = _LENGTH.unpack_from(raw, begin)
    except struct.error as exc:
        raise FormatError(f"the column {STRUCTURE!r} has {len(raw)} bytes that end early; drop the column") from exc
    end = begin + _LENGTH.size + length
    if raw[0] > _VALUES | _DESCRIBED or end > len(raw):
        raise FormatError(f"the column {STRUCTURE!r} has bytes that read_ray did not make; drop the column")
    dtypes, absent, original = _parse_names(raw[1 + _LENGTH.size : begin])
    flags = bool(raw[0] & _VALUES), bool(raw[0] & _DESCRIBED)
    return Structure(*flags, dtypes, absent, original, raw[begin + _LENGTH.size : end], raw[end:])


@lru_cache(maxsize=256)
def _parse_names(names: bytes) -> tuple[dict[str, torch.dtype | np.dtype[Any]], frozenset[str], str | None]:
    """Return the dtypes of the tensor columns by name, the columns that the sample has nothing for, and the original name."""
    try:
        found = json.loads(names)
        original = found.pop(KEY, None)
        dtypes = {name: parse_dtype(text) for name, text in found.items() if text is not None}
    except (ValueError, AttributeError, TypeError, RecursionError) as exc:
        raise FormatError(f"the column {STRUCTURE!r} has no readable dtypes: {exc}; drop the column") from exc
    return dtypes, frozenset(found.keys() - dtypes.keys()), original if isinstance(original, str) else None


def value_columns(sample: Any) -> dict[str, tuple[Path, Any]]:
    """Return the path and value of each small value of a sample, by the name of its column, such as `cond.0.prompt`.

    Values in dicts under keys that are neither text nor an int have no column, nor have values that are named like a tensor,
    nor a signaling NaN of Decimal, with which pandas raises an error.
    """
    found: dict[str, tuple[Path, Any]] = {}

    def note(path: Path) -> None:
        if not path or not all(type(step) in (str, int) for step in path):
            return
        value, name = value_at(sample, path), ""
        for step in path:
            name = join_path(name, component(step, 0))
        is_signal = isinstance(value, Decimal) and value.is_snan()
        if not is_signal and not any(isinstance(part, Lazy) for part, _ in walk(value)):
            found.setdefault(name, (path, value))

    map_leaves(sample, lambda lazy: None, note)
    for name in (*flatten(sample), KEY, STRUCTURE):
        found.pop(name, None)
    return found
