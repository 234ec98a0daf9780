"""An index as bytes: behind a shard's end-of-archive marker, or in a file beside it (FORMAT.md 4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.codec.binding import sign_header, tensors_digest
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import build_header, parse_header, parse_int
from wds_tensorcache.codec.layout import form_of
from wds_tensorcache.codec.reference import named_by
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.index import CacheColumns, LayoutTable, MemberColumns, ShardIndex
from wds_tensorcache.shards.lookup import Keys
from wds_tensorcache.shards.names import is_cache_name
from wds_tensorcache.shards.tar.archive import padding

__all__ = [
    "TRAILER_NBYTES",
    "build_footer",
    "declared_place",
    "parse_footer",
    "read_footer",
    "stale_footer",
]

MAGIC = b"tcindex1"
# bytes of the index, offset of the end-of-archive marker, bytes of the whole shard, digest of the index and those three
_TRAILER = Struct("<QQQQ8s")
TRAILER_NBYTES = _TRAILER.size
_TAIL_NBYTES = 1 << 16  # what the first read of a tail takes
_STORED = {"u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64"}
_CACHE = ("rows", "skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
_MEMBER = ("rows", "begin", "nbytes")


def build_footer(index: ShardIndex, shard_nbytes: int | None = None) -> bytes:
    """Return the index as a safetensors file with its trailer.

    Args:
        index: Of the shard.
        shard_nbytes: Of the whole shard, for a file beside it; None for a footer right behind its end-of-archive marker.
    """
    named: dict[str, np.ndarray[Any, Any] | None] = {"keys.text": index.keys.text, "keys.ends": index.keys.ends}
    layouts = index.layouts
    named |= {"layouts.form": layouts.form, "layouts.data_begin": layouts.data_begin, "layouts.dims": layouts.dims}
    for number, cache in enumerate(index.caches.values()):
        named |= {f"cache.{number}.{column}": getattr(cache, column) for column in _CACHE}
    for number, member in enumerate(index.members.values()):
        named |= {f"member.{number}.{column}": getattr(member, column) for column in _MEMBER}
    names: dict[str, Any] = {
        "caches": list(index.caches),
        "members": list(index.members),
        "forms": [form.entries for form in layouts.forms],
        "references": layouts.references,
    }
    if index.fingerprint is not None:
        names["fingerprint"] = index.fingerprint
    named["names"] = np.frombuffer(json.dumps(names, separators=(",", ":")).encode(), np.uint8)
    # wide elements first, as in every other member
    arrays = sorted(((k, v) for k, v in named.items() if v is not None), key=lambda item: -item[1].itemsize)
    header = build_header([(k, _STORED[v.dtype.str[1:]], (len(v),), v.nbytes) for k, v in arrays], align=64)
    buffers = [v.tobytes() for _, v in arrays]
    body = b"".join([sign_header(header, tensors_digest(header, buffers)), *buffers])
    zeros = b""
    if shard_nbytes is None:
        # GNU tar appends at the wrong place where a shard is no multiple of 512 bytes long
        zeros = bytes(padding(len(body) + TRAILER_NBYTES))
        shard_nbytes = index.end + 1024 + len(zeros) + len(body) + TRAILER_NBYTES
    numbers = (len(body), index.end, shard_nbytes)
    return zeros + body + _TRAILER.pack(*numbers, _digest(body, numbers), MAGIC)


def _digest(body: bytes, numbers: tuple[int, int, int]) -> int:
    return xxhash.xxh3_64_intdigest(Struct("<QQQ").pack(*numbers), seed=xxhash.xxh3_64_intdigest(body))


def read_footer(read: Callable[[int, int], bytes], shard_nbytes: int) -> ShardIndex | None:
    """Return the index behind a shard; None if there is none, or it is not of the shard as it is now.

    Args:
        read: Returns the bytes `[begin, end)` of the shard.
        shard_nbytes: Of the shard.

    Raises:
        FormatError: There is one, it is undamaged, and it cannot be true.
    """
    tail_begin = max(0, shard_nbytes - _TAIL_NBYTES)
    tail = read(tail_begin, shard_nbytes)
    trailer = _parse_trailer(tail, shard_nbytes, shard_nbytes)
    if trailer is None:
        return None
    index_nbytes, end = trailer
    begin = shard_nbytes - TRAILER_NBYTES - index_nbytes
    if begin < end + 1024:
        return None
    if begin < tail_begin:
        tail = read(begin, tail_begin) + tail
    else:
        tail = tail[begin - tail_begin :]
    if read(end, end + 1024).strip(b"\0"):
        return None  # the archive has grown since, inside of what was padding
    return parse_footer(tail, shard_nbytes)


def stale_footer(read: Callable[[int, int], bytes], nbytes: int, shard_nbytes: int | None = None) -> ShardIndex | None:
    """Return the index at the end of a file, though the shard may have changed since: the caller has to confirm it.

    Args:
        read: Returns the bytes `[begin, end)` of the shard, or of the file beside it.
        nbytes: Length of that file.
        shard_nbytes: Length that the shard must have had, None if any will do.

    Raises:
        FormatError: It is undamaged, and cannot be true.
    """
    tail = read(max(0, nbytes - TRAILER_NBYTES), nbytes)
    if len(tail) < TRAILER_NBYTES or not tail.endswith(MAGIC):
        return None
    index_nbytes, _, declared_nbytes, _, _ = _TRAILER.unpack(tail)
    begin = nbytes - TRAILER_NBYTES - index_nbytes
    if begin < 0 or (shard_nbytes is not None and shard_nbytes != declared_nbytes):
        return None
    return parse_footer(read(begin, nbytes), declared_nbytes)


def declared_place(read: Callable[[int, int], bytes], nbytes: int, shard_nbytes: int) -> tuple[int, int] | None:
    """Return where an index at the end of a file begins, and where it says that the archive ends; it may be a stale one.

    None if the last bytes are no trailer, or of a shard of another length than `shard_nbytes`.
    """
    trailer = _parse_trailer(read(max(0, nbytes - TRAILER_NBYTES), nbytes), nbytes, shard_nbytes)
    return None if trailer is None else (nbytes - TRAILER_NBYTES - trailer[0], trailer[1])


def _parse_trailer(tail: bytes, nbytes: int, shard_nbytes: int) -> tuple[int, int] | None:
    if len(tail) < TRAILER_NBYTES or not tail.endswith(MAGIC):
        return None
    index_nbytes, end, declared_nbytes, _, _ = _TRAILER.unpack(tail[-TRAILER_NBYTES:])
    if declared_nbytes != shard_nbytes or index_nbytes + TRAILER_NBYTES > nbytes:
        return None
    return (index_nbytes, end) if end + 512 <= shard_nbytes else None


def parse_footer(footer: bytes, shard_nbytes: int) -> ShardIndex | None:
    """Return the index that `build_footer` was given; None if the bytes are damaged, or made for a shard of another size.

    Raises:
        FormatError: The digest is right, and what it covers cannot be true.

    Memory: the index's arrays are views of `footer`.
    """
    trailer = _parse_trailer(footer, len(footer), shard_nbytes)
    if trailer is None or trailer[0] + TRAILER_NBYTES != len(footer):
        return None
    numbers = (*trailer, shard_nbytes)
    body = memoryview(footer)[:-TRAILER_NBYTES]
    if _digest(body, numbers) != _TRAILER.unpack(footer[-TRAILER_NBYTES:])[3]:  # type: ignore[arg-type]
        return None
    layout, _ = parse_header(body)
    arrays: dict[str, Any] = {}
    for tensor in layout.tensors.values():
        if tensor.dtype not in _STORED.values() or len(tensor.shape) != 1:
            raise FormatError(
                f"the index has an array {tensor.name!r} of {tensor.dtype}{list(tensor.shape)}", kind="index"
            )
        arrays[tensor.name] = np.frombuffer(body, f"<u{STORED[tensor.dtype][0]}", tensor.shape[0], tensor.begin)
    try:
        index = _assemble(arrays, trailer[1])
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as exc:  # ValueError: not JSON, or FormatError
        raise FormatError(f"the index is incomplete: {exc!r}", kind="index") from exc
    index.check()
    return index


def _assemble(arrays: dict[str, Any], end: int) -> ShardIndex:
    if arrays["names"].dtype != np.uint8 or arrays["keys.text"].dtype != np.uint8:
        raise FormatError("its texts are not bytes", kind="index")
    names = json.loads(arrays["names"].tobytes(), parse_int=parse_int)
    if not all(type(suffix) is str for suffix in names["members"]):
        raise FormatError(f"impossible members {names['members']!r:.100}", kind="index")
    if not all(name == "" or is_cache_name(name) for name in names["caches"]):
        raise FormatError(f"impossible cache names {names['caches']!r:.100}", kind="index")
    if not isinstance(names.get("fingerprint", {}), dict):
        raise FormatError(f"impossible fingerprint {names['fingerprint']!r:.100}", kind="index")
    forms = []
    for entries in names["forms"]:
        entries = tuple((name, dtype, ndim) for name, dtype, ndim in entries)
        if any(dtype not in STORED or type(name) is not str or type(ndim) is not int for name, dtype, ndim in entries):
            raise FormatError(f"impossible form {entries!r:.100}", kind="index")
        if len({entry[0] for entry in entries}) != len(entries) or any(not 0 <= entry[2] <= 64 for entry in entries):
            raise FormatError(f"impossible form {entries!r:.100}", kind="index")
        forms.append(form_of(entries))
    references = tuple(None if texts is None else tuple(texts) for texts in names["references"])
    for form, texts in zip(forms, references, strict=True):
        named = None if texts is None else [named_by(text) for text in texts]
        if named is not None and named != [
            (kind, entry[0]) for (kind, _), entry in zip(named, form.entries, strict=True)
        ]:
            raise FormatError(f"impossible references {texts!r:.100}", kind="index")
    return ShardIndex(
        Keys(arrays["keys.text"], arrays["keys.ends"]),
        {
            name: CacheColumns(*(_column(arrays, f"cache.{number}.{column}") for column in _CACHE))
            for number, name in enumerate(names["caches"])
        },
        {
            suffix: MemberColumns(*(_column(arrays, f"member.{number}.{column}") for column in _MEMBER))
            for number, suffix in enumerate(names["members"])
        },
        LayoutTable(
            tuple(forms), references, arrays["layouts.form"], arrays["layouts.data_begin"], arrays["layouts.dims"]
        ),
        end,
        names.get("fingerprint"),
    )


def _column(arrays: dict[str, Any], name: str) -> Any:
    return arrays.get(name) if name.endswith(".rows") else arrays[name]
