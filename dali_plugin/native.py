"""DALI's own reader of WebDataset shards for a cache: no Python while it reads, tensors cut out of what arrives."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from nvidia.dali import fn

import wds_tensorcache as tc
from dali_plugin.base import NUMBER, Source, check_batches
from dali_plugin.carriers import known_names
from dali_plugin.packed import PackedMembers

__all__ = ["NativeReader"]

PACKED = "packed"  # the output that has the tensors' bytes
_ALIGN = 64


class NativeReader(Source):
    """What `fn.native_reader` makes for a pipeline; see there."""

    def __init__(
        self,
        paths: Any,
        index_paths: Iterable[str | os.PathLike[str]] | None = None,
        tensors: Iterable[str] | None = None,
        members: Iterable[str] = (),
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        last_batch: str = "short",
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        check_batches(batch_size, rank, world_size, last_batch)
        if last_batch == "wrap":
            raise ValueError(
                "last_batch='wrap': DALI's reader repeats the last sample; expected 'short', 'pad' or 'drop'"
            )
        is_open = isinstance(paths, (tc.TensorCache, tc.JoinedCache))
        self.cache: Any = paths if is_open else tc.open(paths)
        schema = self.cache.schema
        self.tensors = list(schema) if tensors is None else known_names(tensors, schema, "tensor")
        self.members = known_names(members, self.cache.members, "member") if members else []
        count = len(self.cache)
        if count < world_size:
            raise ValueError(f"{count} samples for world_size={world_size}: a rank would have none")
        self._packed = PackedMembers(self.cache, self.tensors)
        for member in self.members:
            if self.cache.members[member] != count:
                raise ValueError(f"member {member!r}: {self.cache.members[member]} of {count} samples have it")
        for path in self._packed.paths:
            try:
                path.encode()
            except UnicodeEncodeError as exc:
                raise ValueError(f"{path!r}: DALI takes only paths in UTF-8; rename the shard") from exc
        self._index_paths = None if index_paths is None else [os.fspath(path) for path in index_paths]
        for path in self._index_paths or ():
            if not os.path.isfile(path):
                raise FileNotFoundError(f"index_paths: no file {path!r}; names of tensors go to tensors=")
        if self._index_paths is not None and len(self._index_paths) != len(self._packed.paths):
            raise ValueError(f"{len(self._index_paths)} index_paths for {len(self._packed.paths)} shards")
        for number, path in enumerate(self._index_paths or ()):
            if not self._packed.is_index(number, path):
                raise ValueError(f"{path} is no index of {self._packed.paths[number]}, or of another state of it")
        self._rank, self._world_size = rank, world_size
        self.batch_size = batch_size
        self._last_batch = last_batch
        largest = -(-count // world_size)
        num_runs = -(-largest // batch_size)
        self._last_size = largest - (num_runs - 1) * batch_size if last_batch == "short" else batch_size
        self._filled = (
            -1,
            0,
            0,
        )  # the sample before the batch that `fill` made last, rows until it repeats, and all rows
        self.num_batches: int = count // world_size // batch_size if last_batch == "drop" else num_runs
        if not self.num_batches:
            raise ValueError(f"{count} samples are no batch of {batch_size} on each of {world_size} ranks")
        self.num_surplus = num_runs - self.num_batches
        self._shuffle, self._seed = shuffle, seed
        self.settings = {"samples": count, "batch_size": batch_size, "native": True, "shuffle": shuffle, "seed": seed}
        self.settings |= {"rank": rank, "world_size": world_size, "last_batch": last_batch}

    outputs = property(lambda self: [PACKED, *self.members, NUMBER], doc="The names of what a batch has, in its order.")

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return self.num_batches

    def nodes(self, device: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the nodes, in a pipeline's definition."""
        if self._index_paths is None:
            folder = tempfile.mkdtemp(prefix="tensorcache-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._index_paths = self._packed.index_paths(folder)
        both = [self._packed.skeleton_suffix] if self._packed.has_others() else []
        made: Any = fn.readers.webdataset(
            paths=self._packed.paths,
            index_paths=self._index_paths,
            ext=[self._packed.suffix, *both, *self.members],
            missing_component_behavior="skip",  # samples without this cache
            random_shuffle=self._shuffle,
            seed=self._seed,
            pad_last_batch=True,
            shard_id=self._rank,
            num_shards=self._world_size,
            **options,
        )
        packed, *members = made if isinstance(made, (list, tuple)) else [made]
        members = members[len(both) :]
        origin = fn.pad(fn.get_property(packed, key="source_info"))  # texts, filled up with zeros to be one array
        if not self._packed.are_regular():  # now a batch is one array, and tensors in it begin where they may
            packed = fn.pad(packed, axes=[0], align=[_ALIGN])
        return packed.gpu() if device == "gpu" else packed, *members, origin

    def fill(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the batch in the structure that was written, and apart from it what is no tensor of the cache."""
        others = dict(outputs)
        packed, origins = others.pop(PACKED), others.pop(NUMBER)
        numbers = self._packed.numbers(bytes(one).rstrip(b"\0") for one in origins.numpy())
        # the reader repeats the last sample, to the end of a batch, or for a whole one where other ranks have one more
        count = len(numbers)
        while count > 1 and numbers[count - 2] == numbers[-1]:
            count -= 1
        width = max(count, self._last_size) if count < len(numbers) else count
        self._filled, self.last_number = (self.last_number, count, width), int(numbers[-1])
        numbers, packed = numbers[:width], packed[:width]
        others = {name: value[:width] for name, value in others.items()}
        request = self.cache._request(np.ascontiguousarray(numbers))
        tensors: Any = self._packed.cut(request, packed) if self.tensors else {}
        return self.cache.fill_batch(request, tensors), others

    def is_padding(self, iteration: int, count: int) -> np.ndarray[Any, Any]:
        """Return which rows of the batch that `fill` made last only fill it, bool `[count]`."""
        before, num_samples, width = self._filled
        is_repeated = iteration > 0 and num_samples == 1 and before == self.last_number
        return np.arange(width) >= num_samples - is_repeated
