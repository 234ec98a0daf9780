"""Fill a batch's memory with the bytes of its tensors, from local and remote shards."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np

from wds_tensorcache.reading.batch.columns import Columns, Layouts
from wds_tensorcache.reading.batch.placement import Placement
from wds_tensorcache.reading.store import Store
from wds_tensorcache.storage.gather import Ranges, gather

Array = np.ndarray[Any, Any]


def read_rows(
    store: Store, layouts: Layouts, columns: Columns, placement: Placement, memory: Array, skeletons: Iterable[int] = ()
) -> None:
    """Read every row of a batch into `memory`, where `placement` puts it.

    Rows of remote shards are fetched by ranged requests, all at once, with the skeletons of the samples `skeletons` of the
    batch, which `Rows` keeps. If all rows are in the node's cache, they are read as from local shards, without maps.

    Raises:
        FormatError: A shard has changed, or was truncated.
    """
    rows = layouts.rows
    which = layouts.which if len(layouts.items) > 1 else slice(1)  # one column stands for all samples
    nbytes = np.broadcast_to(columns.nbytes[:, which], placement.row_array.shape)
    ranges = Ranges(rows.number, rows.begin + columns.begin[:, which], nbytes, placement.row_array)
    numbers: Iterable[int] = map(itemgetter(0), rows.by_shard)
    if store.has_remote and (is_remote := store.are_remote[rows.number]).any():
        from wds_tensorcache.reading.remote_batches import read_remote_rows

        far = np.flatnonzero(is_remote)
        wanted = sorted(set(skeletons).intersection(far.tolist()).difference(rows.fetched))
        extents = {
            i: (number, *store.shards[number].skeleton_extent(rows.row.item(i)))
            for i, number in zip(wanted, rows.number[wanted].tolist(), strict=True)
        }
        rows.fetched.update(read_remote_rows(store, ranges.select(far), extents, memory))
        ranges = ranges.select(~is_remote)
        numbers = [number for number in numbers if not store.are_remote[number]]
    files = {number: rows.shards[number].file for number in numbers}
    if files and placement.nbytes:
        gather(files, ranges, memory, store.num_threads, store.executor)
