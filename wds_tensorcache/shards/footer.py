"""A shard's index as a footer or sidecar (FORMAT.md 4). A footer follows the end-of-archive marker, a sidecar is a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import xxhash

from wds_tensorcache.codec.binding import sign_header
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import Form, Further, build_safetensors_header, form_of, parse_header, parse_json
from wds_tensorcache.codec.reference import parse_reference
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.index import CacheColumns, LayoutTable, MemberColumns, Origins, ShardIndex
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.names import is_cache_name
from wds_tensorcache.shards.tar import padding

MAGIC = b"tcindex1"
# length of the index, offset of the end-of-archive marker, length of the whole shard, digest of index and lengths, MAGIC
_TRAILER = Struct("<QQQQ8s")
TRAILER_NBYTES = _TRAILER.size
_TAIL_NBYTES = 1 << 16  # the length of the first read, at the end of the shard
_LONG_NBYTES = 1 << 26  # an index up to this length may be more than a quarter of its shard
_MARKER_NBYTES = 2048  # the end-of-archive marker and the zeros after it
_STORED = {"u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64"}
_CACHE = ("rows", "skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
_MEMBER = ("rows", "begin", "nbytes")
_ORIGINALS = ("rows", "text", "ends")


def build_footer(index: ShardIndex, shard_nbytes: int | None = None) -> bytes:
    """Serialize an index as a footer or, with `shard_nbytes`, as a sidecar.

    The footer is b"" if readers would refuse it as too long: they scan a shard without a footer.
    """
    named: dict[str, np.ndarray[Any, Any] | None] = {"keys.text": index.keys.text, "keys.ends": index.keys.ends}
    layouts = index.layouts
    named |= {"layouts.form": layouts.form, "layouts.data_begin": layouts.data_begin, "layouts.dims": layouts.dims}
    for number, cache in enumerate(index.caches.values()):
        named |= {f"cache.{number}.{column}": getattr(cache, column) for column in _CACHE}
    for number, member in enumerate(index.members.values()):
        named |= {f"member.{number}.{column}": getattr(member, column) for column in _MEMBER}
    if index.origins is not None:
        named["items.digest"] = index.origins.digest
        if index.has_names:
            named |= {f"originals.{column}": getattr(index.origins, column) for column in _ORIGINALS}
    names: dict[str, Any] = {
        "caches": list(index.caches),
        "members": list(index.members),
        "forms": [form.entries for form in layouts.forms],
        "references": layouts.references,
    }
    if layouts.further is not None and any(layouts.further):
        names["further"] = layouts.further
    if index.fingerprint is not None:
        names["fingerprint"] = index.fingerprint
    named["names"] = np.frombuffer(json.dumps(names, separators=(",", ":")).encode(), np.uint8)
    # arrays with wide elements first, as in the members of samples
    arrays = sorted(((k, v) for k, v in named.items() if v is not None), key=lambda item: -item[1].itemsize)
    header = build_safetensors_header([(k, _STORED[v.dtype.str[1:]], (len(v),), v.nbytes) for k, v in arrays], align=64)
    buffers = [v.tobytes() for _, v in arrays]
    body = b"".join([sign_header(header, buffers)[0], *buffers])
    zeros = b""
    if shard_nbytes is None:
        # `tar -r` appends at a wrong offset unless the length of the shard is a multiple of 512 bytes.
        zeros = bytes(padding(len(body) + TRAILER_NBYTES))
        shard_nbytes = index.end + 1024 + len(zeros) + len(body) + TRAILER_NBYTES
        if _is_too_long(len(body) + TRAILER_NBYTES, shard_nbytes):
            return b""
    numbers = (len(body), index.end, shard_nbytes)
    return zeros + body + _TRAILER.pack(*numbers, _digest(body, numbers), MAGIC)


def _is_too_long(index_nbytes: int, shard_nbytes: int) -> bool:
    # A hostile shard of many gigabytes could make a reader fetch and hold all of it.
    return index_nbytes > max(_LONG_NBYTES, shard_nbytes // 4)


def _digest(body: bytes | memoryview, numbers: tuple[int, int, int]) -> int:
    return xxhash.xxh3_64_intdigest(Struct("<QQQ").pack(*numbers), seed=xxhash.xxh3_64_intdigest(body))


class Trailer(NamedTuple):
    """The last bytes of a footer or sidecar, which locate the index."""

    begin: int  # offset of the index in its file
    end: int  # offset of the end-of-archive marker in the shard
    shard_nbytes: int  # length of the shard
    digest: str  # of the index, 16 hexadecimal digits


def read_trailer(read: Callable[[int, int], bytes], nbytes: int, shard_nbytes: int | None = None) -> Trailer | None:
    """Return the trailer that ends a shard or sidecar of `nbytes` bytes.

    Its index may be stale or damaged. None without a trailer, or if it declares another length than a given `shard_nbytes`.
    """
    tail = read(max(0, nbytes - TRAILER_NBYTES), nbytes)
    if len(tail) < TRAILER_NBYTES or not tail.endswith(MAGIC):
        return None
    index_nbytes, end, declared_nbytes, digest, _ = _TRAILER.unpack(tail)
    begin = nbytes - TRAILER_NBYTES - index_nbytes
    if begin < 0 or end + 512 > declared_nbytes or shard_nbytes not in (None, declared_nbytes):
        return None
    return Trailer(begin, end, declared_nbytes, f"{digest:016x}")


def read_footer(read: Callable[[int, int], bytes], shard_nbytes: int, tail: bytes | None = None) -> ShardIndex | None:
    """Return the index in a footer; None if missing, stale or damaged.

    `tail` contains the last bytes of the shard if the caller has read them. Raises FormatError as `parse_index` does, and if
    the index is too long for the shard.
    """
    end = read(max(0, shard_nbytes - _TAIL_NBYTES), shard_nbytes) if tail is None else tail
    end_begin = shard_nbytes - len(end)
    trailer = read_trailer(lambda begin, _: end[begin - end_begin :], shard_nbytes, shard_nbytes)
    if trailer is None or trailer.begin < trailer.end + 1024:
        return None
    index_nbytes = shard_nbytes - trailer.begin
    if _is_too_long(index_nbytes, shard_nbytes):
        problem = f"the index has {index_nbytes:,} of the shard's {shard_nbytes:,} bytes, expected at most a quarter"
        raise FormatError(problem, offset=trailer.begin, kind="index")
    # the marker and the rest of the index, in one read unless they are far apart
    first = trailer.end if trailer.begin - trailer.end <= _MARKER_NBYTES else trailer.begin
    if first < end_begin:
        end, end_begin = read(first, end_begin) + end, first
    at = trailer.end - end_begin
    marker = end[at : at + 1024] if at >= 0 else read(trailer.end, trailer.end + 1024)
    if marker.strip(b"\0"):
        return None  # another tool has appended to the archive since, over the marker
    return parse_index(end[trailer.begin - end_begin :], shard_nbytes)


def read_index(read: Callable[[int, int], bytes], nbytes: int, shard_nbytes: int | None = None) -> ShardIndex | None:
    """Return the index in a shard or sidecar, even if stale.

    The caller must compare every entry with the shard. Returns None and raises FormatError as `parse_index` does.
    """
    trailer = read_trailer(read, nbytes, shard_nbytes)
    return None if trailer is None else parse_index(read(trailer.begin, nbytes), trailer.shard_nbytes)


def parse_index(content: bytes, shard_nbytes: int) -> ShardIndex | None:
    """Parse a sidecar, or a footer without its zeros. None if it is damaged, or if the shard has another length.

    Raises:
        FormatError: The digest of the index matches, but its content breaks a rule of FORMAT.md 4.

    Memory: the arrays of the index are views of `content`.
    """
    trailer = read_trailer(lambda begin, end: content[begin:end], len(content), shard_nbytes)
    if trailer is None or trailer.begin:
        return None
    body = memoryview(content)[:-TRAILER_NBYTES]
    if f"{_digest(body, (len(body), trailer.end, shard_nbytes)):016x}" != trailer.digest:
        return None
    layout, _ = parse_header(body)
    arrays: dict[str, Any] = {}
    for tensor in layout.tensors.values():
        if tensor.dtype not in _STORED.values() or len(tensor.shape) != 1:
            _check(False, f"the array {tensor.name!r}", f"{tensor.dtype}{list(tensor.shape)}")
        arrays[tensor.name] = np.frombuffer(body, f"<u{STORED[tensor.dtype][0]}", tensor.shape[0], tensor.begin)
    try:
        index = dataclasses.replace(_assemble(arrays, trailer.end), digest=trailer.digest)
    # ValueError includes FormatError, and errors of the JSON parser
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        raise FormatError(f"the index is incomplete or malformed: {exc!r}", kind="index") from exc
    index.check()
    keys = index.keys.without_dots()
    return index if keys is index.keys else dataclasses.replace(index, keys=keys)


def _assemble(arrays: dict[str, Any], end: int) -> ShardIndex:
    for name in {"names", "keys.text", "originals.text"}.intersection(arrays):
        _check(arrays[name].dtype == np.uint8, f"the dtype of {name}", arrays[name].dtype)
    names = parse_json(arrays["names"].tobytes())
    for key in ("caches", "members", "forms", "references"):
        _check(type(names[key]) is list, key, names[key])
    caches, members, references = names["caches"], names["members"], names["references"]
    _check(
        len(set(caches)) == len(caches) and all(name == "" or is_cache_name(name) for name in caches), "caches", caches
    )
    are_lower = all(str.lower(suffix) == suffix for suffix in members)
    _check(are_lower and len(set(members)) == len(members), "members", members)
    "".join(members).encode("utf-8", "surrogateescape")  # raises for surrogates that stand for no byte
    _check(isinstance(names.get("fingerprint", {}), dict), "fingerprint", names.get("fingerprint"))
    forms = list(map(_parse_form, names["forms"]))
    for form, texts in zip(forms, references, strict=True):
        if texts is not None:
            tensors = [name for _, name, _ in map(parse_reference, texts)]
            _check(type(texts) is list and tensors == [entry[0] for entry in form.entries], "references", texts)
    further = names.get("further")
    if "further" in names:
        _check(type(further) is list, "further", further)
        further = tuple(_parse_further(form, pairs) for form, pairs in zip(forms, further, strict=True))
    form_numbers, data_begins, dims = _columns(arrays, "layouts", ("form", "data_begin", "dims"))
    texts_of_forms = tuple(None if texts is None else tuple(texts) for texts in references)
    return ShardIndex(
        Keys(arrays["keys.text"], arrays["keys.ends"]),
        {
            name: CacheColumns(arrays.get(f"cache.{at}.rows"), *_columns(arrays, f"cache.{at}", _CACHE[1:]))
            for at, name in enumerate(caches)
        },
        {
            suffix: MemberColumns(arrays.get(f"member.{at}.rows"), *_columns(arrays, f"member.{at}", _MEMBER[1:]))
            for at, suffix in enumerate(members)
        },
        LayoutTable(tuple(forms), texts_of_forms, form_numbers, data_begins, dims, further),
        end,
        names.get("fingerprint"),
        _parse_origins(arrays),
    )


def _parse_form(raw: Any) -> Form:
    _check(type(raw) is list, "form", raw)
    entries = tuple((name, dtype, ndim) for name, dtype, ndim in raw)
    are_known = all(type(name) is str and dtype in STORED and type(ndim) is int for name, dtype, ndim in entries)
    _check(are_known and all(0 <= ndim <= 64 for *_, ndim in entries), "form", entries)
    _check(len({name for name, *_ in entries}) == len(entries), "form", entries)
    return form_of(entries)


def _parse_further(form: Form, pairs: Any) -> Further:
    _check(type(pairs) is list and all(type(pair) is list for pair in pairs), "further", pairs)
    further = tuple((name, tensor) for name, tensor in pairs)
    tensors, names = {name for name, *_ in form.entries}, [name for name, _ in further]
    are_names = all(type(name) is str for name in names) and all(tensor in tensors for _, tensor in further)
    _check(are_names and len({*names, *tensors}) == len(names) + len(tensors), "further", pairs)
    return further


def _parse_origins(arrays: dict[str, Any]) -> Origins | None:
    has_names = any(f"originals.{column}" in arrays for column in _ORIGINALS)
    if not has_names and "items.digest" not in arrays:
        return None
    columns = _columns(arrays, "originals", _ORIGINALS) if has_names else [np.empty(0, np.uint8)] * 3
    return Origins(arrays.get("items.digest"), *columns)


def _columns(arrays: dict[str, Any], prefix: str, names: tuple[str, ...]) -> list[Any]:
    return [arrays[f"{prefix}.{name}"] for name in names]


def _check(is_possible: bool, field: str, value: object) -> None:
    if not is_possible:
        raise FormatError(f"the index has an impossible value for {field}: {value!r:.100}", kind="index")
