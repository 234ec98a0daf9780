"""Find the samples of the members that DALI's own reader has read, and cut the members into tensors."""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from wds_tensorcache.codec.views import check_array, check_tensor
from wds_tensorcache.reading.batch.columns import check_stackable, layouts_of
from wds_tensorcache.reading.batch.request import columns_of
from wds_tensorcache.shards.dali_index import build_dali_index, list_members, seems_current
from wds_tensorcache.shards.index_paths import dali_index_path

__all__ = ["PackedMembers"]

Array = np.ndarray[Any, Any]
_MAX_ITEMSIZE = 16  # complex128


class PackedMembers:
    """A cache whose shards DALI's own reader reads.

    Attributes:
        paths: Paths of the shards.
        suffix, skeleton_suffix: Suffixes of the two members of each sample, without the first dot.
        has_arrays: True if a named tensor is a numpy array, whose batches are on the CPU.
    """

    def __init__(self, cache: tc.TensorCache, names: Iterable[str]) -> None:
        if not isinstance(cache, tc.TensorCache):
            raise TypeError(f"DALI's reader reads whole shards of one cache, got {type(cache).__name__}")
        if cache._order is not None:
            raise ValueError(f"DALI's reader reads whole shards, but {cache!r} is a view of some samples")
        if cache._store.has_remote:
            raise ValueError("DALI's reader reads only local files, but shards are at urls; use fn.tensorcache")
        if len({os.path.realpath(shard.path) for shard in cache._store.shards}) < cache.num_shards:
            raise ValueError("a shard occurs twice in the cache, so its samples cannot be told apart; list it once")
        names = list(names)
        self._narrow = cache.select(map(glob.escape, names))
        self.has_arrays = any(cache.schema[name].kind == "ndarray" for name in names)
        self._shards = cache._store.shards
        self._starts: list[int] = cache._store.starts.tolist()
        self._begins: dict[int, tuple[list[int], list[int]]] = {}
        self.paths = [shard.path for shard in self._shards]
        self._heads = {path.encode("utf-8", "surrogateescape"): number for number, path in enumerate(self.paths)}
        self.skeleton_suffix, self.suffix = self._shards[0].suffixes

    def are_regular(self) -> bool:
        """Return whether all tensor members have the same size, a multiple of 16 bytes, so that batches need no padding."""
        sizes = {int(size) for shard in self._shards for size in np.unique(shard.index.layouts.nbytes)}
        return len(sizes) == 1 and sizes.pop() % _MAX_ITEMSIZE == 0

    def has_others(self) -> bool:
        """Return whether samples without this cache have a member with the suffix of the cache's tensors."""
        return any(self.suffix in shard.index.members for shard in self._shards)

    def index_paths(self, folder: str) -> list[str]:
        """Return the paths of DALI's indexes of the shards; missing or stale indexes are made in `folder`."""
        found = []
        for number, shard in enumerate(self._shards):
            path = dali_index_path(shard.path)
            if not self.is_index(number, path):
                path = dali_index_path(os.path.join(folder, str(number)))
                Path(path).write_bytes(build_dali_index(list_members(shard.index)))
            found.append(path)
        return found

    def is_index(self, shard: int, path: str) -> bool:
        """Return whether the file at `path` is a DALI index that matches a shard; at most 128 samples are compared."""
        return seems_current(path, self._shards[shard].index, self._shards[shard].name)

    def numbers(self, origins: Iterable[bytes]) -> Array:
        """Return the sample indices, int64 `[B]`, of members with origins `PATH:FIRST_BYTE:NAME`."""
        return np.array([self._number(origin) for origin in origins], np.int64)

    def _number(self, origin: bytes) -> int:
        for path, first_byte, name in _places(origin):
            at = self._heads.get(path)
            if at is not None:
                begins, rows = self._begins_of(at)
                begin = int(first_byte)
                found = bisect_left(begins, begin)
                if found < len(begins) and begins[found] == begin:
                    row, shard = rows[found], self._shards[at]
                    if name.startswith(shard.index.keys.raw(shard.sample_row(row)) + b"."):
                        return self._starts[at] + row
        where = origin.decode(errors="replace")
        raise tc.FormatError(f"no tensors of the cache start at {where!r:.300}; DALI's index of the shard is stale")

    def _begins_of(self, at: int) -> tuple[list[int], list[int]]:
        """Return the offsets of a shard's tensor members, ascending, and for each the number of its sample in the shard."""
        known = self._begins.get(at)
        if known is None:
            begins = self._shards[at].columns.tensors_begin
            order = np.argsort(begins, kind="stable")
            known = self._begins[at] = begins[order].tolist(), order.tolist()
        return known

    def cut(self, request: Any, members: torch.Tensor, host: torch.Tensor) -> dict[str, Any]:
        """Return the tensors of samples by name: `[B, …]` if their shapes are equal, else a list of B.

        Args:
            request: Request for the samples.
            members: Tensor members of the samples, uint8 `[B, n]`, on any device; shorter members are padded to n.
            host: The same bytes on the CPU; arrays are made of them.

        Memory: views of `members`. Unaligned or stacked tensors, bools on a GPU, and arrays are copies.
        """
        request = self._narrow._request(request)
        layouts = layouts_of(request.rows)
        columns, which = columns_of(request, layouts), layouts.which.tolist()
        result: dict[str, Any] = {}
        for number, name in enumerate(columns.names):
            columns.check_present(layouts, number)
            references = [reference for _, reference in columns.present(number)]
            first = references[0]
            if max(one.end for one in references) > members.shape[1]:
                raise tc.FormatError(f"tensor {name!r} ends after its member: the shard does not match its index")
            check_stackable(first, len(members), first.shape, request.rows.key(0))
            source = host if first.kind == "ndarray" else members
            if all((one.begin, one.shape) == (first.begin, first.shape) for one in references):
                result[name] = _cut(source, first)
                continue
            parts = [_cut(source[i : i + 1], references[number])[0] for i, number in enumerate(which)]
            if any(one.shape != first.shape for one in references):
                result[name] = parts
            else:
                result[name] = np.stack(parts) if first.kind == "ndarray" else torch.stack(parts)
        return result


def _places(origin: bytes) -> list[Sequence[bytes]]:
    """Return every way to split `PATH:FIRST_BYTE:NAME` into its parts; path and name may contain colons."""
    if origin.count(b":") == 2:
        return [origin.split(b":")]
    found = re.finditer(rb"(?=:(\d+):)", origin)
    return [(origin[: match.start()], match[1], origin[match.end(1) + 1 :]) for match in found]


def _cut(members: torch.Tensor, reference: Any) -> Any:
    """Return one tensor of all `members` as `[n, …]`."""
    count = len(members)
    part = members[:, reference.begin : reference.end]
    if reference.kind == "ndarray":
        array = np.ascontiguousarray(part.numpy())
        return check_array(np.ndarray((count, *reference.shape), reference.dtype, array))
    dtype = reference.dtype
    if reference.begin == reference.end:
        return part.new_empty(0).view(dtype).view(count, *reference.shape)
    if any(at % dtype.itemsize for at in (part.data_ptr(), part.storage_offset(), part.stride(0))):
        part = part.clone(memory_format=torch.contiguous_format)
    if dtype is torch.bool and part.device.type != "cpu":
        # a check would wait for all work that is queued on the GPU; so any byte but 0 becomes True
        return (part != 0).view(count, *reference.shape)
    return check_tensor(part.view(dtype)).view(count, *reference.shape)
