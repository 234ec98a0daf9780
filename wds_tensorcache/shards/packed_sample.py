"""A sample as the members of a tar, before its position in a shard is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.codec.sample import EncodedSample
from wds_tensorcache.shards.index_builder import CacheEntry
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.tar import BLOCK, build_tar_header

_ZEROS = bytes(BLOCK)


@dataclass(slots=True)
class PackedSample:
    """The members of a sample with their tar headers. The bytes do not depend on the position in the shard."""

    key: str
    parts: list[Any]  # bytes-like
    nbytes: int  # total length of the parts
    caches: list[CacheEntry]  # offsets here are relative to the first part
    members: list[tuple[str, int, int]]  # suffix, offset, length of each other member
    item_digest: int = 0  # of the item from which the sample was made; 0 if unknown


def pack(key: str, caches: Sequence[tuple[str, EncodedSample]], others: Mapping[str, bytes]) -> PackedSample:
    """Build the members of a sample from its encoded caches, by name, and its other members, by extension.

    Memory: aliases the tensors of the caches, and `others`.
    """
    parts: list[Any] = []
    position = 0
    entries: list[CacheEntry] = []
    members: list[tuple[str, int, int]] = []
    for name, encoded in caches:
        prefix = f"{key}.{name}." if name else f"{key}."
        skeleton, nbytes = encoded.skeleton, encoded.layout.nbytes
        skeleton_header = build_tar_header(prefix + SKELETON, len(skeleton))
        tensors_header = build_tar_header(prefix + TENSORS, nbytes)
        skeleton_begin = position + len(skeleton_header)
        begin = skeleton_begin + len(skeleton) + -len(skeleton) % BLOCK + len(tensors_header)
        parts += skeleton_header, skeleton, _ZEROS[: -len(skeleton) % BLOCK]
        parts += tensors_header, encoded.header, *encoded.buffers, _ZEROS[: -nbytes % BLOCK]
        position = begin + nbytes + -nbytes % BLOCK
        names = encoded.references, encoded.further
        entries.append(CacheEntry(name, skeleton_begin, len(skeleton), begin, encoded.layout, encoded.digest, *names))
    for extension, raw in others.items():
        header = build_tar_header(f"{key}.{extension}", len(raw))
        parts += header, raw, _ZEROS[: -len(raw) % BLOCK]
        members.append((extension.lower(), position + len(header), len(raw)))
        position += len(header) + len(raw) + -len(raw) % BLOCK
    return PackedSample(key, parts, position, entries, members)
