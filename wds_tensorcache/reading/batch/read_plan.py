"""Fill a batch's memory: which reads fetch its rows, in which order, by which threads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.batch.columns import SCRATCH_NBYTES, Columns, Layouts, Runs
from wds_tensorcache.reading.batch.placement import Placement
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.reading.shard_set import Store
from wds_tensorcache.shards.tar.archive import BLOCK
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.maps import MapLost, Maps
from wds_tensorcache.storage.threads import Job, wait_for

__all__ = ["read"]

Array = np.ndarray[Any, Any]
GATHER_NBYTES = 1 << 14  # samples up to here are copied from maps faster than by a system call each
IN_FLIGHT = 32  # reads that keep a disk busy
_NUM_PROBES = 4
_PID = os.getpid()


def read(store: Store, layouts: Layouts, columns: Columns, placement: Placement, memory: Array) -> str:
    """Read every row to its place; return how: "pread", or as `store.io` says.

    Small samples that are in the page cache are gathered from maps, one torch call per tensor; all else takes one positioned
    read per sample, scattered over the tensors' places. `io` "pread" never gathers. "auto" gathers as above, and a shard that
    is cut short meanwhile is an error. "mmap" gathers even what may not be in memory, and a shard that is cut short kills the
    process.

    Raises:
        FormatError: A shard is not what its index says, or was cut short.
    """
    rows, io = layouts.rows, store.io.method
    if io != "pread" and columns.sizes is not None and sum(columns.sizes) <= GATHER_NBYTES:
        if _gather(layouts, columns, placement, memory, io):
            return io  # type: ignore[no-any-return]
    count = len(rows.row)
    order = np.lexsort((rows.begin, rows.number)) if len(rows.shards) > 1 else np.arange(count)
    total = int(columns.nbytes.sum(0)[layouts.which].sum())
    threads = max(1, min(store.threads, count, total >> 18))  # for less, handing over costs more
    executor = store.executor() if threads > 1 else None
    parts = np.array_split(order, threads) if executor is not None else [order]
    jobs: list[Job[None]] = []
    try:
        for part in parts[1:]:
            jobs.append(executor.submit(_scatter, layouts, columns, placement, memory, part))  # type: ignore[union-attr]
        _scatter(layouts, columns, placement, memory, parts[0])
    finally:
        # Hazard: a thread that still writes would write into memory that is used for other batches.
        wait_for(jobs)
    while jobs:
        jobs.pop(0).result()  # an error refers to this frame, which then must not refer to it
    for number, *_ in rows.parts:  # one system call each
        rows.shards[number].file.check_unchanged()
    return "pread"


def _gather(layouts: Layouts, columns: Columns, placement: Placement, memory: Array, io: str) -> bool:
    """Copy every row out of maps, if that is safe now; return whether it was."""
    rows = layouts.rows
    if os.getpid() != _PID and torch.get_num_threads() > 1:
        return False  # forked: if torch's threads were used before, a call that wants them waits forever
    # where each tensor begins in its member: [tensors, samples], or [tensors, 1] if it is the same for all
    begins = columns.begin if len(layouts.items) == 1 else columns.begin[:, layouts.which]
    if len(rows.parts) > rows.shards[0].files.max_open or (io == "auto" and not _is_resident(rows, begins)):
        return False
    count = len(rows)
    try:
        with Maps([rows.shards[number].file for number, *_ in rows.parts], count, io) as maps:
            origin = rows.begin.copy()
            for (number, at, some), base in zip(rows.parts, maps.bases, strict=True):
                rows.shards[number].check_mapped(some, maps, base)
                origin[at] += base
            for first, begin, size in zip(placement.first, begins, columns.sizes or (), strict=True):
                if size:
                    maps.gather(origin + begin, size, memory[first : first + size * count].reshape(count, size))
    except MapLost:
        return False
    return True


def _is_resident(rows: Rows, begins: Array) -> bool:
    """Return whether a few of the samples are in the page cache: through a cold map one waits page by page."""
    where = rows.begin + begins[-1] if len(begins) else rows.begin
    # one system call each
    return all(
        rows.shards[rows.number.item(i)].file.is_resident(where.item(i))
        for i in range(0, len(rows), max(1, len(rows) // _NUM_PROBES))
    )


def _scatter(layouts: Layouts, columns: Columns, placement: Placement, memory: Array, order: Array) -> None:
    """Read the samples `order` of a batch, one after the other."""
    rows, dest, runs = layouts.rows, placement.rows, columns.runs
    target, scratch = memory.data, memoryview(bytearray(SCRATCH_NBYTES))
    which = layouts.which.tolist()
    row, numbers, begins = rows.row.tolist(), rows.number.tolist(), rows.begin.tolist()
    known = -1
    todo: list[int] = order.tolist()
    advised: int | None = None  # how many of them the system was told of; None while all were in memory
    # one system call per sample and run
    for at, i in enumerate(todo):
        if numbers[i] != known:
            known = numbers[i]
            shard = rows.shards[known]
            file, checked = shard.files.get(shard.path), shard.checked
        for first, _, parts in runs[which[i]]:
            buffers = []
            for tensor, n in parts:
                begin = dest[tensor][i] if tensor >= 0 else 0
                buffers.append(target[begin : begin + n] if tensor >= 0 else scratch[:n])
            if advised is None and file.read_resident(buffers, begins[i] + first):
                continue
            # cold: keep the disk busy with the samples to come while this one is waited for
            for j in todo[max(at, advised or 0) : at + IN_FLIGHT]:
                _advise(rows.shards[numbers[j]].file, begins[j], runs[which[j]])
            advised = at + IN_FLIGHT
            file.read_into(buffers, begins[i] + first)
        if not checked[row[i]]:
            shard.check_tensors(row[i])


def _advise(file: ShardFile, begin: int, runs: Runs) -> None:
    """Tell the system to read a sample's runs, and the header before them, in the background."""
    end = begin + BLOCK  # of what check_tensors reads, and of what follows that at once
    for run_begin, run_end, _ in runs:
        if begin + run_begin <= end + SCRATCH_NBYTES:
            end = max(end, begin + run_end)
        else:
            file.will_need(begin + run_begin, begin + run_end)
    file.will_need(begin - BLOCK, end)
