"""Tensor members that DALI's own reader has read: which samples they are of, and their tensors."""

from __future__ import annotations

import glob
import os
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from wds_tensorcache.codec.views import check_array, check_tensor
from wds_tensorcache.reading.batch.columns import check_stackable, layouts_of
from wds_tensorcache.reading.batch.request import columns_of
from wds_tensorcache.shards.catalog import dali_index_path, write_dali_index

__all__ = ["PackedMembers"]

Array = np.ndarray[Any, Any]
_MAX_ITEMSIZE = 16  # complex128


class PackedMembers:
    """A whole cache whose shards DALI reads, member by member, for the sake of some tensors.

    Attributes:
        paths: Of the shards.
        suffix, skeleton_suffix: Of the two members of each sample, without the first dot.

    Raises:
        TypeError, ValueError: Not a cache, a view of one, or one that has a shard twice.
    """

    def __init__(self, cache: tc.TensorCache, names: Iterable[str]) -> None:
        if not isinstance(cache, tc.TensorCache):
            raise TypeError(f"whole shards of one cache are read, got {type(cache).__name__}")
        if cache._order is not None:
            raise ValueError(f"whole shards are read, but {cache!r} is a view of some samples")
        if len({os.path.realpath(shard.path) for shard in cache._store.shards}) < cache.num_shards:
            raise ValueError("a shard is there twice: which of its samples came would not be known")
        self._narrow = cache.select(map(glob.escape, names))
        self._shards = cache._store.shards
        self._starts = cache._store.starts.tolist()
        self._begins: dict[int, tuple[list[int], list[int]]] = {}
        self.paths = [shard.path for shard in self._shards]
        self._heads = {path.encode("utf-8", "surrogateescape"): number for number, path in enumerate(self.paths)}
        self.skeleton_suffix, self.suffix = (suffix.decode()[1:] for suffix in self._shards[0]._suffixes)

    def are_regular(self) -> bool:
        """Return whether all members are of one size, at whose multiples elements of every dtype may begin."""
        sizes = {int(size) for shard in self._shards for size in np.unique(shard.index.layouts.nbytes)}
        return len(sizes) == 1 and sizes.pop() % _MAX_ITEMSIZE == 0

    def has_others(self) -> bool:
        """Return whether samples without the cache have a member that is called like its tensors."""
        return any(self.suffix in shard.index.members for shard in self._shards)

    def index_paths(self, folder: str) -> list[str]:
        """Return DALI's indexes of the shards: those beside them; where there is none that fits, one made in `folder`."""
        found = []
        for number, shard in enumerate(self._shards):
            path = dali_index_path(shard.path)
            if not self.is_index(number, path):
                path = os.path.join(folder, f"{number}.idx")
                write_dali_index(path, shard.index, False)
            found.append(path)
        return found

    def is_index(self, shard: int, path: str) -> bool:
        """Return whether the file at `path` is DALI's index of a shard, of its present state: by 64 of its samples."""
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            lines = file.read().splitlines()
        index, columns = self._shards[shard].index, self._shards[shard].columns
        if not lines or lines[0].split()[-1:] != [b"%d" % len(index.keys)] or len(lines) != len(index.keys) + 1:
            return False
        every = max(1, len(columns) // 64)
        for row in {*range(0, len(columns), every), len(columns) - 1}:
            nbytes = index.layouts.nbytes.item(columns.layout.item(row))
            words = lines[1 + self._shards[shard].sample_row(row)].lower().split()
            wanted = [self.suffix.encode().lower(), b"%d" % columns.tensors_begin.item(row), b"%d" % nbytes]
            if not any(words[at : at + 3] == wanted for at in range(0, len(words), 4)):
                return False
        return True

    def numbers(self, origins: Iterable[bytes]) -> Array:
        """Return which samples members are of, int64 `[B]`.

        Args:
            origins: For each, the shard's path, the byte at which the member begins there, and its name, with colons between.

        Raises:
            FormatError: No tensor member of the cache begins there: DALI's index is of another state of the shard.
        """
        return np.array([self._number(origin) for origin in origins], np.int64)

    def _number(self, origin: bytes) -> int:
        # a path may have colons in it, and be the beginning of another one
        end = origin.find(b":")
        while end >= 0:
            at, digits = self._heads.get(origin[:end]), origin[end + 1 :].partition(b":")[0]
            if at is not None and digits.isdigit():
                begins, rows = self._begins_of(at)
                found = bisect_left(begins, int(digits))
                is_there = found < len(begins) and begins[found] == int(digits)
                name = origin[end + 1 + len(digits) + 1 :]
                if is_there and name.startswith(
                    self._shards[at].key(rows[found]).encode("utf-8", "surrogateescape") + b"."
                ):
                    return int(self._starts[at] + rows[found])
            end = origin.find(b":", end + 1)
        where = origin.decode(errors="replace")
        raise tc.FormatError(
            f"no tensors of the cache begin at {where!r:.300}: DALI's index is of another state of the shard"
        )

    def _begins_of(self, at: int) -> tuple[list[int], list[int]]:
        known = self._begins.get(at)
        if known is None:
            begins = self._shards[at].columns.tensors_begin
            order = np.argsort(begins, kind="stable")
            known = self._begins[at] = begins[order].tolist(), order.tolist()
        return known

    def cut(self, numbers: Any, members: torch.Tensor) -> dict[str, Any]:
        """Return the tensors of samples by name, `[B, …]` where shapes are equal, else a list of B.

        Args:
            numbers: Numbers of the samples, `[B]`, or the cache's request of them.
            members: Their tensor members, uint8 `[B, n]`, on any device; shorter ones are filled up to n.

        Raises:
            BatchError: A sample does not have one of them, or has it of another dtype.
            FormatError: A member is shorter than the index says.

        Memory: views of `members`, but what lies there unaligned, was stacked, or is an array, which is on the host.
        """
        if len(members) != len(numbers):
            raise ValueError(f"{len(members)} members of {len(numbers)} samples")
        request = self._narrow._request(numbers)
        layouts = layouts_of(request.rows)
        columns, which = columns_of(request, layouts), layouts.which.tolist()
        result: dict[str, Any] = {}
        for name, references in zip(columns.names, columns.references, strict=True):
            first = references[0]
            if max(one.end for one in references) > members.shape[1]:
                raise tc.FormatError(f"tensor {name!r} ends behind its member: the shard is not what its index says")
            check_stackable(first, len(members), first.shape, request.rows.key(0))
            if all((one.begin, one.shape) == (first.begin, first.shape) for one in references):
                result[name] = _cut(members, first)
                continue
            parts = [_cut(members[i : i + 1], references[number])[0] for i, number in enumerate(which)]
            if any(one.shape != first.shape for one in references):
                result[name] = parts
            else:
                result[name] = np.stack(parts) if first.kind == "ndarray" else torch.stack(parts)
        return result


def _cut(members: torch.Tensor, reference: Any) -> Any:
    """Return a tensor of each of `members` as `[n, …]`."""
    count = len(members)
    part = members[:, reference.begin : reference.end]
    if reference.kind == "ndarray":
        array = np.ascontiguousarray(part.cpu().numpy())
        return check_array(np.ndarray((count, *reference.shape), reference.dtype, array))
    dtype = reference.dtype
    if reference.begin == reference.end:
        return part.new_empty(0).view(dtype).view(count, *reference.shape)
    if any(at % dtype.itemsize for at in (part.data_ptr(), part.storage_offset(), part.stride(0))):
        part = part.clone(memory_format=torch.contiguous_format)
    return check_tensor(part.view(dtype)).view(count, *reference.shape)
