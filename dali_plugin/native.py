"""Source that reads a cache with DALI's own reader of shards.

The reader runs without Python. It returns the bytes of whole tensor members, and their origins. Tensors are views of the bytes.
"""

from __future__ import annotations

import copy
import glob
import os
import re
import shutil
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn

import wds_tensorcache as tc
from dali_plugin.source import NUMBER, Array, BatchSource
from wds_tensorcache.codec.views import check_array, check_tensor
from wds_tensorcache.reading.batch.columns import check_stackable, layouts_of
from wds_tensorcache.reading.batch.request import columns_of
from wds_tensorcache.shards.dali_index import build_dali_index, list_members
from wds_tensorcache.shards.names import SKELETON, TENSORS, dali_index_path, member_suffix, suffix_after

_PACKED = "packed"  # the output that contains the tensors' bytes
_HOST = "packed_host"  # the same bytes on the CPU, for arrays of numpy, if the first output is on a GPU
_ALIGN = 64
_MAX_ITEMSIZE = 16  # complex128
_files_at: dict[str, list[Any]] = {}  # the identities of all files that native readers of this process had at each path


class NativeReader(BatchSource):
    """The source that `fn.native_reader` creates. The docstring of `native_reader` describes the arguments."""

    num_batches: int
    _steps: dict[str, Any]
    _is_checked = False

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
        self._steps = {**self._steps, "native": True}
        count, world_size, batch_size = len(self.cache), steps["world_size"], steps["batch_size"]
        if count < world_size:
            raise ValueError(f"{count} samples for world_size={world_size}: a rank would have none")
        self._check_shards()
        self._narrow = self.cache.select(map(glob.escape, self.tensors))
        self._has_arrays = any(tensor.kind == "ndarray" for tensor in self._narrow.schema.values())
        self._shards = self.cache._store.shards
        self._starts: list[int] = self.cache._store.starts.tolist()
        self._paths = list(map(_unique_path, self._shards))
        self._by_path = {path.encode(): number for number, path in enumerate(self._paths)}
        self._begins: dict[int, tuple[list[int], list[int]]] = {}  # by shard; see `_begins_of`
        self._index_paths = list(map(dali_index_path, self._paths))
        if index_paths is not None:
            self._index_paths = [os.fspath(path) for path in index_paths]
            if len(self._index_paths) != len(self._paths) or not all(map(os.path.isfile, self._index_paths)):
                problem = f"index_paths={self._index_paths!r:.300}: expected an existing file for each of"
                raise ValueError(f"{problem} {len(self._paths)} shards; pass names of tensors as tensors=")
        self._has_host = False
        largest = -(-count // world_size)
        num_runs = -(-largest // batch_size)
        self._last_size = largest - (num_runs - 1) * batch_size if steps["last_batch"] == "short" else batch_size
        self.num_surplus = num_runs - len(self)
        # for the last batch that `nest` returned: the index of the sample before it, its number of rows up to the padding, and
        # its number of rows
        self._filled = (-1, 0, 0)

    def _check_shards(self) -> None:
        cache = self.cache
        if not isinstance(cache, tc.TensorCache):
            raise TypeError(f"DALI's reader reads whole shards of one cache, got {type(cache).__name__}")
        if cache._order is not None:
            raise ValueError(f"DALI's reader reads whole shards, but {cache!r} is a view of some samples")
        if cache._store.has_remote:
            raise ValueError("DALI's reader reads only local files, but shards are at urls; use fn.tensorcache")
        paths = [shard.path for shard in cache._store.shards]
        if len(set(map(os.path.realpath, paths))) < len(paths):
            raise ValueError("a shard occurs twice in the cache, so its samples cannot be told apart; list it once")
        for path in paths:
            try:
                path.encode()
            except UnicodeEncodeError as exc:
                raise ValueError(f"{path!r}: DALI accepts only paths in UTF-8; rename the shard") from exc

    def _current_indexes(self) -> list[str]:
        """Return the paths of DALI's indexes, made anew if missing or stale."""
        folder = tempfile.mkdtemp(prefix="tensorcache-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        paths = []
        for number, (shard, path) in enumerate(zip(self._shards, self._index_paths, strict=True)):
            index = build_dali_index(list_members(shard.index))
            if not os.path.isfile(path) or Path(path).read_bytes() != index:
                path = dali_index_path(os.path.join(folder, str(number)))
                Path(path).write_bytes(index)
            paths.append(path)
        return paths

    @property
    def outputs(self) -> list[str]:
        return [_PACKED, *([_HOST] if self._has_host else []), *self.members, NUMBER]

    def nodes(self, device: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Add the reader to the current pipeline, and return its nodes."""
        skeletons, tensors = (member_suffix(self._shards[0].name, half) for half in (SKELETON, TENSORS))
        # samples without this cache may have a member with the suffix of its tensors
        both = [skeletons] if any(tensors in shard.index.members for shard in self._shards) else []
        nodes: Any = fn.readers.webdataset(
            paths=self._paths,
            index_paths=self._current_indexes(),
            ext=[tensors, *both, *self.members],
            missing_component_behavior="skip",  # leaves out samples without this cache
            random_shuffle=self._steps["shuffle"],
            seed=self._steps["seed"],
            pad_last_batch=True,
            shard_id=self._steps["rank"],
            num_shards=self._steps["world_size"],
            **options,
        )
        packed, *members = nodes if isinstance(nodes, (list, tuple)) else [nodes]
        members = members[len(both) :]
        origin = fn.pad(fn.get_property(packed, key="source_info"))  # texts, padded with zeros to form one array
        sizes = {int(size) for shard in self._shards for size in np.unique(shard.index.layouts.nbytes)}
        if len(sizes) > 1 or sizes.pop() % _MAX_ITEMSIZE:
            # pads members to one aligned size, so that a batch is one array in which all tensors are aligned
            packed = fn.pad(packed, axes=[0], align=[_ALIGN])
        if device == "cpu":
            return packed, *members, origin
        self._has_host = self._has_arrays
        return packed.gpu(), *([packed] if self._has_host else []), *members, origin

    def nest(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        extra = dict(outputs)
        self._check_files()
        packed, origins = extra.pop(_PACKED), extra.pop(NUMBER)
        host = extra.pop(_HOST, packed)
        texts = origins.numpy()  # uint8 [B, longest], padded with zeros, which numpy removes from texts
        numbers = np.array(list(map(self._number, texts.view(f"S{texts.shape[1]}").ravel().tolist())), np.int64)
        # the reader repeats the last sample up to the end of a batch, or for a whole batch if other ranks have a batch more
        count = len(numbers)
        while count > 1 and numbers[count - 2] == numbers[-1]:
            count -= 1
        width = max(count, self._last_size) if count < len(numbers) else count
        self._filled, self.last_number = (self.last_number, count, width), int(numbers[-1])
        request = self.cache._request(np.ascontiguousarray(numbers[:width]))
        tensors: Any = self._cut(request, packed[:width], host[:width]) if self.tensors else {}
        return self.cache.nest(request, tensors), {name: value[:width] for name, value in extra.items()}

    def _check_files(self) -> None:
        """Raise FormatError if DALI has opened other files than the cache."""
        # DALI opens files while the pipeline is built
        if not self._is_checked:
            files = copy.copy(self.cache._store.files)  # opens each path again
            for shard in self._shards:
                files.get(shard.path)
            self._is_checked = True

    def is_padding(self, iteration: int, count: int) -> Array:
        before, num_samples, width = self._filled
        is_repeated = iteration > 0 and num_samples == 1 and before == self.last_number
        return np.arange(width) >= num_samples - is_repeated

    def _number(self, origin: bytes) -> int:
        """Return the sample index for `PATH:FIRST_BYTE:NAME`, or raise FormatError."""
        for path, first_byte, name in _split_origin(origin):
            number = self._by_path.get(path)
            if number is not None:
                begins, rows = self._begins_of(number)
                at = bisect_left(begins, int(first_byte))
                if at < len(begins) and begins[at] == int(first_byte):
                    row, shard = rows[at], self._shards[number]
                    key = shard.index.keys.raw(shard.sample_row(row))
                    if name.startswith(key + b".") or suffix_after(key, name) is not None:
                        return self._starts[number] + row
        where = origin.decode(errors="replace")
        raise tc.FormatError(f"no tensors of the cache start at {where!r:.300}; DALI's index of the shard is stale")

    def _begins_of(self, number: int) -> tuple[list[int], list[int]]:
        """Return the ascending offsets of tensor members, and their samples' rows."""
        sorted_begins = self._begins.get(number)
        if sorted_begins is None:
            begins = self._shards[number].columns.tensors_begin
            order = np.argsort(begins, kind="stable")
            sorted_begins = self._begins[number] = begins[order].tolist(), order.tolist()
        return sorted_begins

    def _cut(self, request: Any, members: torch.Tensor, host: torch.Tensor) -> dict[str, Any]:
        """Return tensors by name: `[B, …]`, or B tensors of different shapes."""
        # `members`: tensor members, uint8 [B, n], padded to n, on any device; `host`: the same bytes on the CPU, for arrays
        # the tensors are views of `members`; unaligned or stacked tensors, bools on a GPU, and arrays are copies
        request = self._narrow._request(request)
        layouts = layouts_of(request.rows)
        columns, which = columns_of(request, layouts), layouts.which.tolist()
        tensors: dict[str, Any] = {}
        for column, name in enumerate(columns.names):
            references = [reference for _, reference in columns.present(column)]
            first = references[0]
            if max(reference.end for reference in references) > members.shape[1]:
                raise tc.FormatError(f"tensor {name!r} ends after its member: the shard does not match its index")
            check_stackable(first, len(members), first.shape, request.rows.key(0))
            source = host if first.kind == "ndarray" else members
            try:
                if all((reference.begin, reference.shape) == (first.begin, first.shape) for reference in references):
                    tensors[name] = _cut(source, first)
                    continue
                parts = [_cut(source[i : i + 1], references[layout])[0] for i, layout in enumerate(which)]
            except tc.FormatError as exc:
                raise exc.at(f"tensor {name!r} of a batch with sample {request.rows.key(0)!r}") from exc
            if any(reference.shape != first.shape for reference in references):
                tensors[name] = parts
            else:
                tensors[name] = np.stack(parts) if first.kind == "ndarray" else torch.stack(parts)
        return tensors


def _unique_path(shard: Any) -> str:
    """Return a shard's path, in a form that no other file had."""
    # Hazard: as long as a pipeline has mapped a file, DALI maps this file for the same path again, even if it was replaced.
    # So a file that has replaced others gets a path with more slashes.
    files, (folder, name) = _files_at.setdefault(shard.path, []), os.path.split(shard.path)
    if shard.file.identity not in files:
        files.append(shard.file.identity)
    return f"{folder or '.'}{'/' * (1 + files.index(shard.file.identity))}{name}"


def _split_origin(origin: bytes) -> list[Sequence[bytes]]:
    """Return every way to split `PATH:FIRST_BYTE:NAME` into its parts."""
    if origin.count(b":") == 2:
        return [origin.split(b":")]
    # path and name may contain colons
    matches = re.finditer(rb"(?=:(\d+):)", origin)
    return [(origin[: match.start()], match[1], origin[match.end(1) + 1 :]) for match in matches]


def _cut(members: torch.Tensor, reference: Any) -> Any:
    """Return one tensor from each member as a batch `[B, …]`."""
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
