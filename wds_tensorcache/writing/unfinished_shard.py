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
    """

    def __init__(self, path: str, name: str, output: Output) -> None:
        self.path, self.name = path, name
        self._output = output
        self._builder = IndexBuilder()
        self._keys: set[str] = set()
        self._position = 0
        self.temporary = self._output.temporary  # path of the unfinished file
        self.has_reserved = False  # whether other processes write bytes
        self.num_awaited = 0  # bytes that other processes have not written yet

    @property
    def num_samples(self) -> int:
        """Number of samples so far."""
        return len(self._keys)

    def is_full(self, max_samples: int, max_nbytes: int) -> bool:
        """Return whether the shard accepts no more samples."""
        return self.num_samples >= max_samples or self._position >= max_nbytes

    def write(self, sample: PackedSample) -> None:
        """Append a sample."""
        self._check_new(sample.key)
        try:
            self._output.append(sample.parts, sample.nbytes)
            self._add(sample)
        except BaseException as exc:
            # after an interrupt, the index may lack this sample, or the file a part of it
            self._output.fail(exc)
            raise

    def reserve(self, sample: PackedSample) -> int:
        """Append a sample whose bytes another process writes into the file `temporary`; return their offset.

        The caller subtracts their number from `num_awaited` when they are written. Before that, `finish` must not be called.
        """
        self._check_new(sample.key)
        try:
            begin = self._output.reserve(sample.nbytes)
            self.has_reserved = True
            self.num_awaited += sample.nbytes
            self._add(sample)
        except BaseException as exc:
            self._output.fail(exc)
            raise
        return begin

    def fail(self, failure: OSError) -> None:
        """Mark the shard as failed, after an error of a process that writes reserved bytes, and raise OSError."""
        self._output.fail(failure)
        self._output.check()

    def _check_new(self, key: str) -> None:
        if key in self._keys:
            raise InvalidKeyError(f"key {key!r} is already in {self.path}; use another key, or resume=True to skip it")

    def _add(self, sample: PackedSample) -> None:
        self._keys.add(sample.key)
        name = sample.key.original if isinstance(sample.key, NamedKey) else None
        self._builder.add(sample.key, sample.caches, sample.members, self._position, (sample.item_digest, name))
        self._position += sample.nbytes

    def finish(self, footer: bool, fingerprint: Mapping[str, Any] | None) -> tuple[ShardEntry, ShardIndex]:
        """Write the end of the archive and the index as its footer; make the shard visible; return its entry and index."""
        try:
            self._output.check()
            index = dataclasses.replace(self._builder.finish(self._position), fingerprint=fingerprint)
            tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
            trailer = read_trailer(lambda begin, end: tail[begin:end], len(tail))
            index = dataclasses.replace(index, digest=None if trailer is None else trailer.digest)
            self._output.append([tail], len(tail))
            self._output.finish()
        except BaseException:
            self.drop()
            raise
        return ShardEntry(self.name, self.num_samples, self._position + len(tail), index.digest), index

    def drop(self) -> None:
        """Delete the unfinished file."""
        self._output.drop()
