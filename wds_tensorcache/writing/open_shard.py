"""Shards that are being written: sample by sample, or of whole members that other shards have."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from wds_tensorcache.errors import KeyRuleError
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder, scan_shard
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.tar.archive import BLOCK, END_OF_ARCHIVE, build_header
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.output import Output

__all__ = ["OpenShard", "write_shard"]

_ZEROS = bytes(BLOCK)


class OpenShard:
    """The shard that is being written, under a temporary name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._output = Output(path)
        self._builder = IndexBuilder()
        self._keys: set[str] = set()
        self._position = 0

    def is_full(self, max_samples: int, max_nbytes: int) -> bool:
        """Return whether it takes no more samples."""
        return len(self._keys) >= max_samples or self._position >= max_nbytes

    def write(self, key: str, caches: list[tuple[str, Any]], others: dict[str, bytes]) -> None:
        """Append a sample: its encoded caches by name, and its other members by extension."""
        if key in self._keys:
            raise KeyRuleError(f"key {key!r} is in {self.path} already; use another key, or resume=True to skip it")
        parts: list[Any] = []
        position = self._position
        entries: list[CacheEntry] = []
        members: list[tuple[str, int, int]] = []

        def member(suffix: str, nbytes: int, *content: Any) -> int:
            nonlocal position
            header = build_header(f"{key}.{suffix}", nbytes)
            begin = position + len(header)
            parts.extend((header, *content, _ZEROS[: -nbytes % BLOCK]))
            position = begin + nbytes + -nbytes % BLOCK
            return begin

        for name, encoded in caches:
            prefix = f"{name}." if name else ""
            skeleton_begin = member(prefix + SKELETON, len(encoded.skeleton), encoded.skeleton)
            begin = member(prefix + TENSORS, encoded.layout.nbytes, encoded.header, *encoded.buffers)
            entries.append(
                CacheEntry(
                    name,
                    skeleton_begin,
                    len(encoded.skeleton),
                    begin,
                    encoded.layout,
                    encoded.digest,
                    encoded.references,
                )
            )
        for extension, raw in others.items():
            members.append((extension.lower(), member(extension, len(raw), raw), len(raw)))
        self._output.append(parts, position - self._position)
        self._position = position
        self._keys.add(key)
        self._builder.add(key, entries, members)

    def finish(self, footer: bool, fsync: bool, fingerprint: Mapping[str, Any] | None) -> ShardIndex:
        """Give the shard its name, and return its index."""
        try:
            index = dataclasses.replace(self._builder.finish(self._position), fingerprint=fingerprint)
            if os.path.exists(self.path):
                raise FileExistsError(f"{self.path} exists; it was not there when this writer began")
            tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
            self._output.append([tail], len(tail))
            self._output.finish(fsync)
        except BaseException:
            self.drop()
            raise
        return index

    def drop(self) -> None:
        """Delete what was written."""
        self._output.drop()


def write_shard(
    path: str,
    members: Iterable[bytes],
    fingerprint: Mapping[str, Any] | None,
    *,
    footer: bool = True,
    fsync: bool = True,
) -> ShardIndex:
    """Write a shard of whole members, and return its index, which is found by a scan.

    Args:
        path: Of the shard.
        members: Bytes of the archive up to the end-of-archive marker, in chunks of any length.
        fingerprint: How it was made.
        footer: Put the index after it.
        fsync: Wait for the disk.

    Raises:
        FormatError: The members are no tar, or a damaged one. Nothing is written.
    """
    output, nbytes = Output(path), 0
    try:
        for chunk in itertools.chain(members, [END_OF_ARCHIVE]):
            output.append([chunk], len(chunk))
            nbytes += len(chunk)
        output.flush()
        written = ShardFile(output.temporary)
        index = dataclasses.replace(scan_shard(written.read, nbytes), fingerprint=fingerprint)
        del written  # elsewhere than on POSIX systems an open file keeps its name
        if footer:
            tail = build_footer(index)
            output.append([tail], len(tail))
        output.finish(fsync)
    except BaseException:
        output.drop()
        raise
    return index
