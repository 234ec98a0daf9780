"""Batches of remote shards whose bytes are all in the node's cache: they are read as from local shards."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.reading.store import Store
from wds_tensorcache.storage.gather import Ranges, gather
from wds_tensorcache.storage.node_cache.block_file import BLOCK, BlockFile, Evicted
from wds_tensorcache.storage.node_cache.cache import CachedFile

__all__ = ["read_local_copies"]

Array = np.ndarray[Any, Any]


def read_local_copies(store: Store, rows: Rows, ranges: Ranges, skeletons: Sequence[int], memory: Array) -> bool:
    """Read ranges of remote shards, and the skeletons of some samples of the batch, if the node's cache has all bytes.

    Return whether they were read; otherwise the batch needs requests.
    """
    files = _find_files(store, np.unique(ranges.file).tolist())
    if files is None:
        return False
    numbers = rows.number[[*skeletons]].tolist()
    extents = [
        store.shards[number].skeleton_extent(rows.row.item(i)) for i, number in zip(skeletons, numbers, strict=True)
    ]
    if not _are_present(store, files, ranges, numbers, extents):
        return False
    try:
        stored = [files[number].read(*extent) for number, extent in zip(numbers, extents, strict=True)]
        gather(files, ranges, memory, store.num_threads, store.executor)
    except Evicted:
        return False
    rows.fetched.update(zip(skeletons, stored, strict=True))
    return True


def _find_files(store: Store, numbers: Sequence[int]) -> dict[int, BlockFile] | None:
    """Return the local files of remote shards, by shard number; None if one of them has none."""
    files, now_s = dict[int, BlockFile](), time.monotonic()
    for number in numbers:
        whole = store.whole_copies.get(number)
        local = None if whole is None else whole()
        if local is not None:
            local.note_use(now_s)
        else:
            store.whole_copies.pop(number, None)
            remote = store.files.remote(store.shards[number].path)
            local = remote.cache.find_local(remote, now_s) if isinstance(remote, CachedFile) else None
            if local is None:
                return None
            if local.leading_nbytes() >= store.shards[number].index.end:  # what follows the samples is not needed
                store.whole_copies[number] = weakref.ref(local)
        files[number] = local
    return files


def _are_present(
    store: Store, files: dict[int, BlockFile], ranges: Ranges, numbers: list[int], extents: list[tuple[int, int]]
) -> bool:
    """Return whether the local files contain ranges, and the extents of the files `numbers`. Cost: 0.1 us each."""
    partial = [number for number in files if number not in store.whole_copies]
    if not partial:
        return True
    uncertain = ranges.select(np.isin(ranges.file, partial))
    begins, ends = uncertain.begin.reshape(-1), (uncertain.begin + uncertain.nbytes).reshape(-1)
    wanted = [*np.tile(uncertain.file, len(uncertain.begin)).tolist(), *numbers]
    firsts = [*(begins // BLOCK).tolist(), *(begin // BLOCK for begin, _ in extents)]
    lasts = [*(-(-ends // BLOCK)).tolist(), *(-(-end // BLOCK) for _, end in extents)]
    return all(
        files[number].find_absent(0, first, last) < 0 for number, first, last in zip(wanted, firsts, lasts, strict=True)
    )
