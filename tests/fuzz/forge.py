"""Turn fuzzer inputs into bytes that pass digests and checksums."""

from __future__ import annotations

from struct import Struct

import xxhash

from tests.shards.tars import fix_checksums
from wds_tensorcache.codec.binding import MAGIC as PREAMBLE_MAGIC
from wds_tensorcache.codec.binding import PREAMBLE_NBYTES, build_preamble, sign_header
from wds_tensorcache.codec.header import build_safetensors_header, is_bound
from wds_tensorcache.shards.footer import MAGIC as FOOTER_MAGIC
from wds_tensorcache.shards.footer import TRAILER_NBYTES
from wds_tensorcache.shards.tar import END_OF_ARCHIVE, padding

CACHE = ("rows", "skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
ARRAYS = ["names", "keys.text", "keys.ends", "layouts.form", "layouts.data_begin", "layouts.dims"]
ARRAYS += [f"cache.{number}.{column}" for number in range(2) for column in CACHE]
ARRAYS += [f"member.{number}.{column}" for number in range(2) for column in ("rows", "begin", "nbytes")]
RECORD = Struct("<BBH")  # number in ARRAYS, exponent of the element's width, elements
_NUMBERS = Struct("<QQQ")


def bound(data: bytes) -> tuple[bytes, bytes, bool]:
    """Return a skeleton, its tensors, and whether both got right digests, from `how, length of the skeleton, both`."""
    end = 3 + int.from_bytes(data[1:3], "little")
    skeleton, tensors = data[3:end], data[end:]
    if not (data[:1] == b"\1" and is_bound(tensors) and len(tensors) >= 64):
        return skeleton, tensors, False
    if skeleton[4:].startswith(PREAMBLE_MAGIC):
        skeleton = skeleton[PREAMBLE_NBYTES:]
    tensors, digest = sign_header(tensors, ())
    return build_preamble(len(tensors), digest, skeleton) + skeleton, tensors, True


def footer_of(data: bytes, end: int = 1 << 14) -> tuple[bytes, int]:
    """Return a footer, and the length of its shard, whose archive ends at `end`.

    The first byte gives the kind of the rest: 0 a footer, 1 a footer without its trailer, 2 its arrays as records.
    """
    how, body = data[:1], data[1:]
    if how == b"\0":
        return body, end + 1024 + len(body)
    if how == b"\2":
        body = _of_records(body)
    zeros = bytes(padding(len(body) + TRAILER_NBYTES))
    numbers = (len(body), end, end + 1024 + len(zeros) + len(body) + TRAILER_NBYTES)
    digest = xxhash.xxh3_64_intdigest(_NUMBERS.pack(*numbers), seed=xxhash.xxh3_64_intdigest(body))
    trailer = _NUMBERS.pack(*numbers) + digest.to_bytes(8, "little") + FOOTER_MAGIC
    return (zeros if end != 1 << 14 else b"") + body + trailer, numbers[2]


def _of_records(records: bytes) -> bytes:
    arrays: dict[str, tuple[str, bytes]] = {}
    at = 0
    while at + RECORD.size <= len(records):
        number, exponent, count = RECORD.unpack_from(records, at)
        at += RECORD.size
        width = 1 << exponent % 4
        content = records[at : at + count * width]
        content = content[: len(content) // width * width]
        arrays[ARRAYS[number % len(ARRAYS)]] = f"U{8 * width}", content
        at += len(content)
    wide_first = sorted(arrays.items(), key=lambda item: item[1][0] == "U8" or -int(item[1][0][1:]))
    entries = [(name, dtype, (8 * len(raw) // int(dtype[1:]),), len(raw)) for name, (dtype, raw) in wide_first]
    header, buffers = build_safetensors_header(entries, 64), [raw for _, (_, raw) in wide_first]
    return b"".join([sign_header(header, buffers)[0], *buffers])


def tar_of(data: bytes) -> bytes:
    """Return a tar. The first byte's bits: 1 corrects the checksums of headers, 2 pads and appends an end."""
    how, archive = data[:1] or b"\0", data[1:]
    if how[0] & 1:
        archive = fix_checksums(archive)
    if how[0] & 2:
        archive += bytes(padding(len(archive))) + END_OF_ARCHIVE
    return archive
