"""A shard while it is written, sample by sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from wds_tensorcache.errors import InvalidKeyError
from wds_tensorcache.shards.footer import build_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import IndexBuilder
from wds_tensorcache.shards.manifest import ShardEntry
from wds_tensorcache.shards.names import NamedKey
from wds_tensorcache.shards.packed_sample import PackedSample
from wds_tensorcache.shards.tar import END_OF_ARCHIVE
from wds_tensorcache.storage.output import Output


class UnfinishedShard:
    """A shard that is being written into an output, which gets the shard's name by `finish`.

    Attributes:
        path: Path or url that the shard will have.
        name: Its name in its folder.
        num_samples, nbytes: Samples so far, and the length of their members.
    """

    def __init__(self, path: str, name: str, output: Output) -> None:
        self.path, self.name = path, name
        self._output = output
        self._builder = IndexBuilder()
        self._keys: set[str] = set()
        self.num_samples = self.nbytes = 0

    def write(self, sample: PackedSample) -> None:
        """Append a sample."""
        key = sample.key
        if key in self._keys:
            raise InvalidKeyError(f"key {key!r} is already in {self.path}; use another key, or resume=True to skip it")
        try:
            self._output.append(sample.parts, sample.nbytes)
            self._keys.add(key)
            name = key.original if isinstance(key, NamedKey) else None
            self._builder.add(key, sample.caches, sample.members, self.nbytes, (sample.item_digest, name))
            self.nbytes += sample.nbytes
            self.num_samples += 1
        except BaseException as exc:
            # after an interrupt, the index may lack this sample, or the file a part of it
            self._output.fail(exc)
            raise

    def finish(self, footer: bool, fingerprint: Mapping[str, Any] | None) -> tuple[ShardEntry, ShardIndex]:
        """Write the end of the archive and the index as its footer; make the shard visible; return its entry and index."""
        try:
            self._output.check()
            index = dataclasses.replace(self._builder.finish(self.nbytes), fingerprint=fingerprint)
            tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
            trailer = read_trailer(lambda begin, end: tail[begin:end], len(tail))
            index = dataclasses.replace(index, digest=None if trailer is None else trailer.digest)
            self._output.append([tail], len(tail))
            self._output.finish()
        except BaseException:
            self.drop()
            raise
        return ShardEntry(self.name, self.num_samples, self.nbytes + len(tail), index.digest), index

    def drop(self) -> None:
        """Delete the unfinished file."""
        self._output.drop()
