"""The names of the files of a write, and the records that the driver and its tasks exchange."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

# files of shards, and the lock on their pattern
_PART = re.compile(r"\.?(part-([0-9]{3,})-[0-9]{6,}-([0-9a-f]{8})[0-9a-f]{6}-([0-9]{6,}|%06d))\..*", re.DOTALL)

_MARKER = re.compile(r"\.ray-([0-9a-f]{8})\.writing")


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The properties that all tasks of one write share.

    Attributes:
        folder: Path or url of the folder of the shards, the same on all nodes.
        number: Number of the write in the folder; later writes have higher numbers, so their samples follow.
        key: Name of the column with the keys.
        allow: Classes that samples may contain.
        options: Options of `ShardWriter`.
        keeps_shards: True if finished shards of a failed task stay in the folder, for the next build.
        id: Eight random hex digits, part of the name of each file of this write.
    """

    folder: str
    number: int
    key: str
    allow: tuple[type, ...]
    options: Mapping[str, Any]
    keeps_shards: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(4))


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one write task.

    Attributes:
        names: File names of its shards, in order.
        digests: Hash of each key, 16 bytes each.
    """

    names: tuple[str, ...]
    digests: bytes

    def hashes(self) -> np.ndarray[Any, Any]:
        """Return the hashes of the keys, uint64 `[N, 2]`."""
        return np.frombuffer(self.digests, np.uint64).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of a write: the name of its shard without `.tar`, and number and id of the write."""

    stem: str
    number: int
    write: str


def key_digest(key: str) -> bytes:
    """Return the hash of a key, 16 bytes."""
    return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass"))


def writing_name(write: str) -> str:
    """Return the name of the marker of a write."""
    return f".ray-{write}.writing"


def writing_id(name: str) -> str | None:
    """Return the id of the write whose marker has this name; None for any other file."""
    match = _MARKER.fullmatch(name)
    return None if match is None else match[1]


def part_of(name: str) -> PartFile | None:
    """Return the write that made a shard, its index, its temporary file or its lock; None for any other file name."""
    match = _PART.fullmatch(name)
    return None if match is None else PartFile(match[1], int(match[2]), match[3])
