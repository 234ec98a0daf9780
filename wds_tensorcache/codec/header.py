"""The header of a `.safetensors` member, parsed and built (FORMAT.md 3.1).

Parsing validates once into frozen records; all later code only slices. A header that differs from an earlier one in its
digest alone is not parsed again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

from wds_tensorcache.codec.collector import LARGE_NBYTES, collector_paused
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.layout import MAX_CACHED_NBYTES, MAX_LAYOUTS, Layout, StoredTensor, form_of, make_layout
from wds_tensorcache.errors import FormatError

__all__ = [
    "DIGITS_BEGIN",
    "DIGITS_END",
    "FORMAT_VERSION",
    "MAX_HEADER_NBYTES",
    "build_header",
    "is_bound",
    "is_possible",
    "parse_header",
    "parse_int",
    "plan_member",
    "plan_small_member",
]

FORMAT_VERSION = 1
_PREFIX = b'{"__metadata__":{"tensorcache":"1 '
DIGITS_BEGIN = 8 + len(_PREFIX)
DIGITS_END = DIGITS_BEGIN + 16
MAX_HEADER_NBYTES = 100_000_000  # the bound of the safetensors specification
MAX_NDIM = 64  # numpy's
_MAX_SIZE = (1 << 63) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
_METADATA = re.compile(r"([1-9]\d{0,8}) [0-9a-f]{16}", re.ASCII)

_LAYOUTS: dict[bytes, Layout] = {}  # by every header byte after the digits


def is_bound(member: Any) -> bool:
    """Return whether `member` was written by this format: whether it declares a digest in the fixed place."""
    return isinstance(member, (bytes, memoryview)) and member[8 : len(_PREFIX) + 6] == _PREFIX[:-2]


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], align: int) -> bytes:
    """Return the header of a member, its length field included, with zeros for the digest (`sign_header` fills them).

    Args:
        tensors: (name, stored dtype, shape in stored elements, bytes) in the order of their bytes.
        align: The data begin at a multiple of this many bytes of the member; itself a multiple of 8.
    """
    if align <= 0 or align % 8:
        raise ValueError(f"align={align}, expected a positive multiple of 8")
    # Built by hand: the dict and two tuples that json.dumps needs for each tensor double its time in garbage collections.
    entries = [f'"__metadata__":{{"tensorcache":"{FORMAT_VERSION} {0:016x}"}}']
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        end = begin + nbytes
        dims = ",".join(map(str, shape))
        entries.append(
            f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; the limit is {MAX_HEADER_NBYTES}")
    return len(text).to_bytes(8, "little") + text


def plan_member(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...], align: int) -> tuple[bytes, Layout]:
    """Return what `build_header` returns, and the layout that `parse_header` would find in it."""
    header = build_header(tensors, align)
    form = form_of(tuple((name, dtype, len(shape)) for name, dtype, shape, _ in tensors))
    return header, make_layout(form, [dim for _, _, shape, _ in tensors for dim in shape], len(header))


plan_small_member = lru_cache(256)(plan_member)  # samples of one layout have one header


def parse_header(member: bytes | memoryview, member_nbytes: int | None = None) -> tuple[Layout, int | None]:
    """Return the validated layout of a `.safetensors` member, and the digest it declares (None if it declares none).

    Args:
        member: The member, or at least its header.
        member_nbytes: Length of the whole member where `member` is only its beginning.

    Raises:
        FormatError: Any rule of FORMAT.md 3.1 is broken.
    """
    nbytes = len(member) if member_nbytes is None else member_nbytes
    end = 8 + int.from_bytes(member[:8], "little")
    if end > nbytes or nbytes < 8:
        raise FormatError(f"the member has {nbytes} bytes, but its header needs {max(end, 8)}")
    if end > len(member) or end - 8 > MAX_HEADER_NBYTES:
        raise FormatError(f"a header of {end - 8} bytes; {len(member)} are here, and the limit is {MAX_HEADER_NBYTES}")
    if member[8:DIGITS_BEGIN] != _PREFIX or end < DIGITS_END:
        return _parse_layout(bytes(member[8:end]), end, nbytes), None
    rest = bytes(member[DIGITS_END:end])
    layout = _LAYOUTS.get(rest)
    if layout is None:
        layout = _parse_layout(bytes(member[8:end]), end, nbytes)
        if len(rest) <= MAX_CACHED_NBYTES:
            if len(_LAYOUTS) >= MAX_LAYOUTS:
                _LAYOUTS.clear()
            _LAYOUTS[rest] = layout
    elif layout.nbytes != nbytes:
        raise FormatError(f"the tensors end at byte {layout.nbytes}, but the member has {nbytes}")
    digits = bytes(member[DIGITS_BEGIN:DIGITS_END])
    if digits.strip(b"0123456789abcdef"):
        raise FormatError(f"the digest {digits!r} is not 16 hexadecimal digits")
    return layout, int(digits, 16)


def _parse_layout(text: bytes, data_begin: int, nbytes: int) -> Layout:
    with collector_paused(len(text) > LARGE_NBYTES):
        return _parse_tensors(text, data_begin, nbytes)


def _parse_tensors(text: bytes, data_begin: int, nbytes: int) -> Layout:
    if not text.startswith(b"{"):
        raise FormatError(f"the header begins with {text[:1]!r}, not with '{{'")
    try:
        parse = parse_int if b"-0" in text else None
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_int=parse)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError, JSONDecodeError and FormatError are ValueErrors
        raise FormatError(f"the header is not JSON: {exc}") from exc
    _check_metadata(entries.pop("__metadata__", {}), text.startswith(b'{"__metadata__":{"tensorcache":"'))
    tensors = [_parse_entry(name, entry, data_begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            what = "overlaps the one before it" if tensor.begin < position else "leaves a hole before it"
            raise FormatError(f"tensor {tensor.name!r} {what}: it begins at byte {tensor.begin}, expected {position}")
        position = tensor.end
    if position != nbytes:
        raise FormatError(f"the tensors end at byte {position}, but the member has {nbytes}")
    form = form_of(tuple((tensor.name, tensor.dtype, len(tensor.shape)) for tensor in tensors))
    return Layout({tensor.name: tensor for tensor in tensors}, data_begin, nbytes, form)


def parse_int(digits: str) -> int:
    """Return an integer of JSON; raise ValueError for `-0`, which `json.loads` alone would accept."""
    if digits.startswith("-0"):
        raise ValueError("-0 is no size")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if not name.isascii():
            name.encode()  # raises for a lone surrogate, which UTF-8 does not have
        if name in result:
            raise FormatError(f"{name!r} occurs twice")
        result[name] = value
    return result


def _check_metadata(metadata: Any, in_place: bool) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("__metadata__ does not map strings to strings")
    ours = metadata.get("tensorcache")
    if ours is None:
        return
    match = _METADATA.fullmatch(ours)
    if match is None:
        raise FormatError(f"__metadata__ has 'tensorcache': {ours!r}, expected a version and 16 hexadecimal digits")
    check_version(int(match[1]))
    if not in_place:
        raise FormatError("__metadata__ has 'tensorcache', but not in its fixed place: the digest is lost")


def check_version(version: int) -> None:
    """Raise FormatError for a format version that this release does not read."""
    if version != FORMAT_VERSION:
        raise FormatError(
            f"written in format version {version}; this release reads version {FORMAT_VERSION}: upgrade wds-tensorcache"
        )


def _parse_entry(name: str, entry: Any, data_begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {name!r}: expected dtype, shape and data_offsets, got {entry!r:.100}")
    if not name.isascii() and _SURROGATE.search(name):  # from an escape
        raise FormatError(f"tensor {name!r:.100}: the name is not UTF-8")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in STORED:
        raise FormatError(f"tensor {name!r}: unknown dtype {dtype!r:.100}")
    if not _are_sizes(shape) or len(shape) > MAX_NDIM or not is_possible(shape):
        raise FormatError(f"tensor {name!r}: impossible shape {shape!r:.100}")
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] < 1 << 63:
        raise FormatError(f"tensor {name!r}: impossible data_offsets {offsets!r:.100}")
    begin, end = offsets
    needed = math.prod(shape) * STORED[dtype][0]
    if end - begin != needed:
        held = f"offsets [{begin}, {end}) hold {end - begin} bytes"
        raise FormatError(f"tensor {name!r}: {held}, but {dtype}{shape} needs {needed}")
    return StoredTensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def is_possible(shape: Sequence[int]) -> bool:
    """Return whether torch and numpy can hold this shape: they compute strides as if no dimension were 0."""
    return math.prod(filter(None, shape)) < 1 << 59


def _are_sizes(values: Any) -> bool:
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110  a generator expression takes twice the time
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            return False
    return True
