"""Source that reads a cache with DALI's own reader of WebDataset shards, without Python.

Tensors are views of the bytes that this reader returns.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from nvidia.dali import fn

from dali_plugin.native_members import PackedMembers
from dali_plugin.source import NUMBER, BatchSource

__all__ = ["NativeReader"]

PACKED = "packed"  # the output that contains the tensors' bytes
HOST = "packed_host"  # the same bytes on the CPU, for arrays of numpy, if the first output is on a GPU
_ALIGN = 64


class NativeReader(BatchSource):
    """The source that `fn.native_reader` creates; the docstring of that function describes the arguments."""

    def __init__(
        self,
        paths: Any,
        index_paths: Iterable[str | os.PathLike[str]] | None,
        tensors: Iterable[str] | None,
        members: Iterable[str],
        steps: dict[str, Any],
    ) -> None:
        if steps["last_batch"] == "wrap":
            raise ValueError(
                "last_batch='wrap': DALI's reader can only repeat the last sample; expected 'short', 'pad' or 'drop'"
            )
        self._open(paths, tensors, members, steps)
        self._steps, self.settings = steps, {**(self.settings or {}), "native": True}
        count, world_size, batch_size = len(self.cache), steps["world_size"], steps["batch_size"]
        if count < world_size:
            raise ValueError(f"{count} samples for world_size={world_size}: a rank would have none")
        self._packed = PackedMembers(self.cache, self.tensors)
        self._has_host = False
        for member in self.members:
            if self.cache.members[member] != count:
                have = f"{self.cache.members[member]} of {count} samples have it"
                raise ValueError(f"member {member!r}: {have}, but DALI's reader needs it in every sample")
        for path in self._packed.paths:
            try:
                path.encode()
            except UnicodeEncodeError as exc:
                raise ValueError(f"{path!r}: DALI accepts only paths in UTF-8; rename the shard") from exc
        self._index_paths = None if index_paths is None else [os.fspath(path) for path in index_paths]
        for path in self._index_paths or ():
            if not os.path.isfile(path):
                raise FileNotFoundError(f"index_paths: there is no file {path!r}; pass names of tensors as tensors=")
        if self._index_paths is not None and len(self._index_paths) != len(self._packed.paths):
            what = f"{len(self._index_paths)} index_paths for {len(self._packed.paths)} shards"
            raise ValueError(f"{what}, expected one for each shard")
        for number, path in enumerate(self._index_paths or ()):
            if not self._packed.is_index(number, path):
                what = f"{path} is not an index of {self._packed.paths[number]}, or is stale"
                raise ValueError(f"{what}; leave out index_paths= to have missing and stale indexes made")
        largest = -(-count // world_size)
        num_runs = -(-largest // batch_size)
        self._last_size = largest - (num_runs - 1) * batch_size if steps["last_batch"] == "short" else batch_size
        self.num_surplus = num_runs - len(self)
        # for the last batch that `nest` returned: the index of the sample before it, its number of rows up to the padding, and
        # its number of rows
        self._filled = (-1, 0, 0)

    @property
    def outputs(self) -> list[str]:
        """Names of a batch's parts, in order."""
        return [PACKED, *([HOST] if self._has_host else []), *self.members, NUMBER]

    def nodes(self, device: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Add the reader to the pipeline that is being defined, and return its nodes."""
        if self._index_paths is None:
            folder = tempfile.mkdtemp(prefix="tensorcache-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._index_paths = self._packed.index_paths(folder)
        both = [self._packed.skeleton_suffix] if self._packed.has_others() else []
        made: Any = fn.readers.webdataset(
            paths=self._packed.paths,
            index_paths=self._index_paths,
            ext=[self._packed.suffix, *both, *self.members],
            missing_component_behavior="skip",  # leaves out samples without this cache
            random_shuffle=self._steps["shuffle"],
            seed=self._steps["seed"],
            pad_last_batch=True,
            shard_id=self._steps["rank"],
            num_shards=self._steps["world_size"],
            **options,
        )
        packed, *members = made if isinstance(made, (list, tuple)) else [made]
        members = members[len(both) :]
        origin = fn.pad(fn.get_property(packed, key="source_info"))  # texts, padded with zeros to form one array
        if not self._packed.are_regular():
            # pads members to one aligned size, so that a batch is one array in which all tensors are aligned
            packed = fn.pad(packed, axes=[0], align=[_ALIGN])
        if device == "cpu":
            return packed, *members, origin
        self._has_host = self._packed.has_arrays
        return packed.gpu(), *([packed] if self._has_host else []), *members, origin

    def nest(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        extra = dict(outputs)
        packed, origins = extra.pop(PACKED), extra.pop(NUMBER)
        host = extra.pop(HOST, packed)
        texts = origins.numpy()  # uint8 [B, longest], padded with zeros, which numpy removes from texts
        numbers = self._packed.numbers(texts.view(f"S{texts.shape[1]}").ravel().tolist())
        # the reader repeats the last sample up to the end of a batch, or for a whole batch if other ranks have a batch more
        count = len(numbers)
        while count > 1 and numbers[count - 2] == numbers[-1]:
            count -= 1
        width = max(count, self._last_size) if count < len(numbers) else count
        self._filled, self.last_number = (self.last_number, count, width), int(numbers[-1])
        request = self.cache._request(np.ascontiguousarray(numbers[:width]))
        tensors: Any = self._packed.cut(request, packed[:width], host[:width]) if self.tensors else {}
        return self.cache.nest(request, tensors), {name: value[:width] for name, value in extra.items()}

    def is_padding(self, iteration: int, count: int) -> np.ndarray[Any, Any]:
        before, num_samples, width = self._filled
        is_repeated = iteration > 0 and num_samples == 1 and before == self.last_number
        return np.arange(width) >= num_samples - is_repeated
