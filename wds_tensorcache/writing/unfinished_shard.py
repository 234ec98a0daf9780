"""A shard while it is written, sample by sample."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from wds_tensorcache.errors import InvalidKeyError
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.tar.headers import BLOCK, END_OF_ARCHIVE, build_tar_header
from wds_tensorcache.storage.output import Output

__all__ = ["UnfinishedShard"]

_ZEROS = bytes(BLOCK)


class UnfinishedShard:
    """A shard that is being written, under a temporary name until `finish`; with `fsync`, until it is on disk."""

    def __init__(self, path: str, fsync: bool) -> None:
        self.path = path
        self._output = Output(path, fsync)
        self._builder = IndexBuilder()
        self._keys: set[str] = set()
        self._position = 0

    def is_full(self, max_samples: int, max_nbytes: int) -> bool:
        """Return whether the shard accepts no more samples."""
        return len(self._keys) >= max_samples or self._position >= max_nbytes

    def write(self, key: str, caches: list[tuple[str, Any]], others: dict[str, bytes]) -> None:
        """Append a sample: encoded caches by name, and bytes of other members by extension."""
        if key in self._keys:
            raise InvalidKeyError(f"key {key!r} is already in {self.path}; use another key, or resume=True to skip it")
        parts: list[Any] = []
        position = self._position
        entries: list[CacheEntry] = []
        members: list[tuple[str, int, int]] = []
        for name, encoded in caches:
            prefix = f"{key}.{name}." if name else f"{key}."
            skeleton, nbytes = encoded.skeleton, encoded.layout.nbytes
            skeleton_begin = _add_member(parts, position, prefix + SKELETON, len(skeleton), skeleton)
            position = skeleton_begin + len(skeleton) + -len(skeleton) % BLOCK
            begin = _add_member(parts, position, prefix + TENSORS, nbytes, encoded.header, *encoded.buffers)
            position = begin + nbytes + -nbytes % BLOCK
            entries.append(
                CacheEntry(
                    name, skeleton_begin, len(skeleton), begin, encoded.layout, encoded.digest, encoded.references
                )
            )
        for extension, raw in others.items():
            begin = _add_member(parts, position, f"{key}.{extension}", len(raw), raw)
            position = begin + len(raw) + -len(raw) % BLOCK
            members.append((extension.lower(), begin, len(raw)))
        try:
            self._output.append(parts, position - self._position)
            self._position = position
            self._keys.add(key)
            self._builder.add(key, entries, members)
        except BaseException as exc:
            self._output.fail(
                exc
            )  # Hazard: after an interrupt, the index may lack this sample, or the file a part of it
            raise

    def finish(self, footer: bool, fingerprint: Mapping[str, Any] | None) -> ShardIndex:
        """Write the end of the archive and, as its footer, the index; rename the shard to its final name; return the index."""
        try:
            self._output.check()
            index = dataclasses.replace(self._builder.finish(self._position), fingerprint=fingerprint)
            if os.path.exists(self.path):
                raise FileExistsError(f"{self.path} was created after this writer started; write to another folder")
            tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
            self._output.append([tail], len(tail))
            self._output.finish()
        except BaseException:
            self.drop()
            raise
        return index

    def drop(self) -> None:
        """Delete the unfinished file."""
        self._output.drop()


def _add_member(parts: list[Any], position: int, name: str, nbytes: int, *content: Any) -> int:
    """Append a member with its header and padding to `parts`; return the offset of its content.

    The header will be at offset `position` of the shard.
    """
    header = build_tar_header(name, nbytes)
    parts += header, *content, _ZEROS[: -nbytes % BLOCK]
    return position + len(header)
