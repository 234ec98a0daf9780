"""Preamble and digests, which bind a sample's two members (FORMAT.md 2.1, 3.3).

A *member* is a file in the tar. A cache has two members for each sample: the skeleton (`.skel.pyd`, a pickle) and the tensors
(`.safetensors`). A skeleton begins with the preamble, which contains the digests. The body follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any

import xxhash

from wds_tensorcache.codec.header import DIGITS_BEGIN, DIGITS_END, FORMAT_VERSION, check_version
from wds_tensorcache.codec.skeleton.opcodes import POP, PROTO, SHORT_BINBYTES
from wds_tensorcache.errors import FormatError, UnsafeSkeletonError

MAGIC = b"tensorcache"
_FIELDS = Struct("<HQQQ")
# Unpicklers ignore the preamble: it pushes one byte string, and the POP at its end removes that string.
_PREAMBLE_BEGIN = bytes((PROTO, 5, SHORT_BINBYTES, len(MAGIC) + _FIELDS.size)) + MAGIC
_FIXED = _PREAMBLE_BEGIN + FORMAT_VERSION.to_bytes(2, "little")
PREAMBLE_NBYTES = len(_PREAMBLE_BEGIN) + _FIELDS.size + 1

# (offset of the body, length and digest of the `.safetensors` member, digest of the body). Stock pickle writes only a body,
# for which the last three are None.
Preamble = tuple[int, int | None, int | None, int | None]


def tensors_digest(member: bytes | memoryview) -> int:
    """Return the XXH3-64 of the bytes after the stored digest."""
    return xxhash.xxh3_64_intdigest(memoryview(member)[DIGITS_END:])


def sign_header(header: bytes, buffers: Iterable[Any]) -> tuple[bytes, int]:
    """Return `header` with the digest of its member, and the digest. `buffers` contain the bytes after the header."""
    state = xxhash.xxh3_64(memoryview(header)[DIGITS_END:])
    for buffer in buffers:
        state.update(buffer)
    return b"%b%b%b" % (header[:DIGITS_BEGIN], state.hexdigest().encode(), header[DIGITS_END:]), state.intdigest()


def build_preamble(tensors_nbytes: int, tensors_digest: int, body: bytes) -> bytes:
    """Return the preamble of a skeleton with this `body`. It has `PREAMBLE_NBYTES` bytes."""
    fields = _FIELDS.pack(FORMAT_VERSION, tensors_nbytes, tensors_digest, xxhash.xxh3_64_intdigest(body))
    return b"%b%b%c" % (_PREAMBLE_BEGIN, fields, POP)


def is_preamble(skeleton: bytes, bound: bytes) -> bool:
    """Return whether `skeleton` begins with a valid preamble for one `.safetensors` member.

    `bound` contains the length and the digest of that member as the preamble stores them, 16 bytes.
    """
    is_bound = skeleton.startswith(_FIXED + bound)
    return is_bound and len(skeleton) > PREAMBLE_NBYTES and skeleton[PREAMBLE_NBYTES - 1] == POP


def had_preamble(skeleton: bytes, tensors_nbytes: int, tensors_digest: int) -> bool:
    """Return whether the preamble's fields have these values. The bytes before the fields may be damaged."""
    fields = _FIELDS.pack(FORMAT_VERSION, tensors_nbytes, tensors_digest, 0)[:-8]
    return skeleton[len(_PREAMBLE_BEGIN) :].startswith(fields)


def check_body(skeleton: bytes) -> None:
    """Raise FormatError if a preamble's digest does not match the body. Also raises errors as `parse_preamble` does."""
    begin, *_, digest = parse_preamble(skeleton)
    if digest is not None and xxhash.xxh3_64_intdigest(memoryview(skeleton)[begin:]) != digest:
        raise FormatError("the skeleton is damaged: its digest does not match its bytes", kind="damaged")


def parse_preamble(skeleton: bytes | memoryview) -> Preamble:
    """Return the fields of a skeleton's preamble; see `Preamble`.

    Raises:
        FormatError: The preamble is damaged, or its format version is not 1.
        UnsafeSkeletonError: The skeleton is not a pickle of protocol 4 or 5.
    """
    is_whole = len(skeleton) > PREAMBLE_NBYTES and skeleton[PREAMBLE_NBYTES - 1] == POP
    if is_whole and skeleton[: len(_PREAMBLE_BEGIN)] == _PREAMBLE_BEGIN:
        version, nbytes, tensors, body = _FIELDS.unpack_from(skeleton, len(_PREAMBLE_BEGIN))
        if version != FORMAT_VERSION:
            check_version(version)
        return PREAMBLE_NBYTES, nbytes, tensors, body
    if skeleton[4 : 4 + len(MAGIC)] == MAGIC:
        check_version(int.from_bytes(skeleton[4 + len(MAGIC) : 6 + len(MAGIC)], "little"))
        raise FormatError("the skeleton's preamble is damaged")
    if len(skeleton) < 2 or skeleton[0] != PROTO or skeleton[1] not in (4, 5):
        raise UnsafeSkeletonError("the skeleton is not a pickle of protocol 4 or 5")
    return 2, None, None, None
