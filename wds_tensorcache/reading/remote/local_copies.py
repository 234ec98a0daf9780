"""Batches of remote shards whose bytes are all in the node's cache: they are read as from local shards."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_tensorcache.reading.batch.columns import Columns, Layouts
from wds_tensorcache.reading.batch.merge_reads import ranges
from wds_tensorcache.reading.store import Store
from wds_tensorcache.storage.aio import Reads, address_of, read_many
from wds_tensorcache.storage.node_cache.block_file import BLOCK, BlockFile
from wds_tensorcache.storage.node_cache.cache import CachedFile

__all__ = ["LocalCopies", "find_local_copies"]

Array = np.ndarray[Any, Any]
_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class LocalCopies:
    """The local files of the remote shards of a batch, which contain its rows, and the skeletons of some of its samples.

    Attributes:
        files: Local file of each remote shard of the batch, by shard number.
        positions: Positions of those samples in the batch, int64 `[n]`.
        numbers: Shard number of each of them, int64 `[n]`.
        begins, nbytes: Bytes of each skeleton, from `Shard.skeleton_extent`, int64 `[n]`.
    """

    files: Mapping[int, BlockFile]
    positions: Array
    numbers: Array
    begins: Array
    nbytes: Array

    def read_skeletons(self) -> dict[int, bytes]:
        """Return the bytes at `Shard.skeleton_extent` of the samples, by position. One system call for up to 128.

        Single reads would be faster alone, but after each of them this thread would wait for the GIL.

        The bytes are right if no file was evicted meanwhile, which the caller checks afterwards.

        Raises:
            Evicted: A file was cut short.
        """
        if not len(self.positions):
            return {}
        files, positions = [self.files[number] for number in self.numbers.tolist()], self.positions.tolist()
        ends = self.nbytes.cumsum()
        memory = np.empty(ends.item(-1), np.uint8)
        buffers = np.stack([address_of(memory) + ends - self.nbytes, self.nbytes], 1).astype(np.uint64)
        fd, flags = np.array([(file.fd, file.nowait) for file in files], np.int64).T
        reads = Reads(fd, self.begins, flags, buffers, np.arange(len(ends) + 1), (memory, files))
        is_short = read_many(reads, 0, len(ends)) != self.nbytes
        stored = memory.tobytes()
        extents = zip(positions, (ends - self.nbytes).tolist(), ends.tolist(), strict=True)
        found = {i: stored[first:last] for i, first, last in extents}
        for at in np.flatnonzero(is_short).tolist():  # not in memory, or the system has no such call
            begin = self.begins.item(at)
            found[positions[at]] = files[at].read(begin, begin + self.nbytes.item(at))
        return found


def find_local_copies(
    store: Store, layouts: Layouts, columns: Columns, is_far: Array, skeletons: Iterable[int]
) -> LocalCopies | None:
    """Return the local files of the remote shards of a batch if they contain all bytes of its rows, and some skeletons.

    Otherwise return None: the batch needs requests.

    Args:
        is_far: Mask of the samples in remote shards, bool `[B]`.
        skeletons: Positions of remote samples whose skeletons are needed, too.
    """
    rows, files, now_s = layouts.rows, dict[int, BlockFile](), time.monotonic()
    # of each file that may lack blocks: positions of its samples, and bytes present at its beginning
    partial = []
    for number, at, _ in rows.by_shard:
        known = store.whole_copies.get(number)
        local = None if known is None else known()
        if local is not None:
            local.note_use(now_s)
        elif store.are_remote[number]:
            remote = store.files.remote(store.shards[number].path)
            local = remote.cache.find_local(remote, now_s) if isinstance(remote, CachedFile) else None
            if local is None:
                return None
            present = local.leading_nbytes()
            if present < store.shards[number].index.end:  # what follows the samples is not needed
                partial.append((at, present))
            else:
                store.whole_copies[number] = weakref.ref(local)
        else:
            continue
        files[number] = local
    small = np.array([*skeletons], np.int64)
    numbers = rows.number[small]
    places = zip(numbers.tolist(), rows.row[small].tolist(), strict=True)
    extents = [store.shards[number].skeleton_extent(row) for number, row in places]
    begins, ends = np.array(extents, np.int64).reshape(-1, 2).T
    copies = LocalCopies(files, small, numbers, begins, ends - begins)
    if partial:
        first_nbytes = np.full(len(rows), _NO_LIMIT)
        for at, present in partial:
            first_nbytes[at] = present
        is_absent = is_far & (rows.begin + columns.exact_run_table.ends[layouts.which] > first_nbytes)
        is_absent[small] |= ends > first_nbytes[small]
        if is_absent.any() and not _has_all(copies, layouts, columns, np.flatnonzero(is_far)):
            return None
    return copies


def _has_all(copies: LocalCopies, layouts: Layouts, columns: Columns, far: Array) -> bool:
    """Return whether the local files contain the rows of the samples at `far`, and the skeletons. Cost: 0.1 us for each run."""
    rows, table = layouts.rows, columns.exact_run_table
    run, sample = ranges(table.first_run, layouts.which[far])
    at = far[sample]
    begins = np.concatenate([rows.begin[at] + table.begin[run], copies.begins])
    nbytes = np.concatenate([table.nbytes[run], copies.nbytes])
    numbers = np.concatenate([rows.number[at], copies.numbers])
    blocks = (begins // BLOCK).tolist(), (-(-(begins + nbytes) // BLOCK)).tolist()
    searches = {number: file.find_absent for number, file in copies.files.items()}
    return all(
        searches[number](0, first, last) < 0 for number, first, last in zip(numbers.tolist(), *blocks, strict=True)
    )
