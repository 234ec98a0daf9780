"""Fill a batch's memory: choose the reads, their order and their threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.batch.columns import Columns, Layouts
from wds_tensorcache.reading.batch.merge_reads import SCRATCH_NBYTES, Runs, ranges
from wds_tensorcache.reading.batch.placement import Placement
from wds_tensorcache.reading.batch.rows import RowFile, Rows
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.shards.tar.headers import BLOCK
from wds_tensorcache.storage.aio import Reads, address_of, read_many
from wds_tensorcache.storage.files import MAX_BUFFERS
from wds_tensorcache.storage.maps import MapLost, Maps
from wds_tensorcache.storage.threads import Job, wait_for

__all__ = ["read_rows"]

Array = np.ndarray[Any, Any]
GATHER_NBYTES = 1 << 14  # samples of up to this size are copied from maps faster than by one system call each
IN_FLIGHT = 32  # the number of reads in flight that keeps a disk busy
_NUM_PROBES = 4
_MAX_FILES = 16  # of one system call
_PID = os.getpid()


def read_rows(store: Store, layouts: Layouts, columns: Columns, placement: Placement, memory: Array) -> str:
    """Read every row of a batch into `memory`, where `placement` puts it; return the method used, "pread" or `store.io.method`.

    If samples are small and in the page cache, rows are copied out of memory maps (gathered), with one torch call per
    tensor. Otherwise one positioned read per sample writes directly into the rows (scattered). The method "pread" never
    gathers. "auto" gathers as above; if a shard is truncated meanwhile, it raises an error. "mmap" gathers without checking
    the page cache; if a shard is truncated meanwhile, the process is killed (SIGBUS).

    Raises:
        FormatError: A shard does not match its index, or was truncated.
    """
    rows, io = layouts.rows, store.io.method
    if not placement.nbytes:
        return "pread"
    if (
        io != "pread"
        and columns.sizes is not None
        and columns.sizes == placement.row_nbytes
        and sum(columns.sizes) <= GATHER_NBYTES
    ):
        if _gather(store.shards, layouts, columns, placement, memory, io):
            return io
    count = len(rows.row)
    order = np.lexsort((rows.begin, rows.number)) if len(rows.shards) > 1 else np.arange(count)
    total = int(columns.nbytes.sum(0)[layouts.which].sum())
    # a thread for less than 256 KiB costs more than it saves
    threads = max(1, min(store.num_threads, count, total >> 18))
    executor = store.executor() if threads > 1 else None
    plan = _Plan(layouts, columns, placement, memory, order)
    edges = [count * number // threads for number in range(threads + 1)] if executor is not None else [0, count]
    jobs: list[Job[None]] = []
    try:
        for begin, end in pairwise(edges[1:]):
            jobs.append(executor.submit(plan.read, begin, end))  # type: ignore[union-attr]
        plan.read(0, edges[1])
    finally:
        # Hazard: a thread that still runs would write into memory that another batch may use.
        wait_for(jobs)
    while jobs:
        jobs.pop(0).result()  # an error refers to this frame; if the frame kept the job, the two would form a cycle
    for number, *_ in rows.by_shard:  # one system call each
        rows.shards[number].file.check_unchanged()
    return "pread"


def _gather(
    shards: Sequence[Shard], layouts: Layouts, columns: Columns, placement: Placement, memory: Array, io: str
) -> bool:
    """Copy every row out of memory maps if that is safe now; return whether the rows were copied."""
    rows = layouts.rows
    if os.getpid() != _PID and torch.get_num_threads() > 1:
        return False  # forked: if torch used threads before the fork, a call that needs them waits forever
    # the offset of each tensor in the `.safetensors` member: [tensors, samples], or [tensors, 1] if equal for all samples
    begins = columns.begin if len(layouts.items) == 1 else columns.begin[:, layouts.which]
    if len(rows.by_shard) > shards[0].files.max_open or (io == "auto" and not _is_resident(shards, rows, begins)):
        return False
    count = len(rows)
    try:
        with Maps([shards[number].file for number, *_ in rows.by_shard], count, io) as maps:
            origin = rows.begin.copy()
            for (number, at, some), base in zip(rows.by_shard, maps.bases, strict=True):
                shards[number].check_mapped(some, maps, base)
                origin[at] += base
            for first, begin, size in zip(placement.begins, begins, columns.sizes or (), strict=True):
                if size:
                    maps.gather(origin + begin, size, memory[first : first + size * count].reshape(count, size))
    except MapLost:
        return False
    return True


def _is_resident(shards: Sequence[Shard], rows: Rows, begins: Array) -> bool:
    """Return whether a few probed samples are in the page cache; if not, a copy out of the map would wait for each page."""
    where = rows.begin + begins[-1] if len(begins) else rows.begin
    # one system call each
    return all(
        shards[rows.number.item(i)].file.is_resident(where.item(i))
        for i in range(0, len(rows), max(1, len(rows) // _NUM_PROBES))
    )


class _Plan:
    """The reads of a batch, directly into its rows: one read for each sample and run. Samples are numbered in reading order.

    Args:
        order: Position in the batch of each sample, int64 `[B]`; samples of a shard are adjacent.
    """

    def __init__(self, layouts: Layouts, columns: Columns, placement: Placement, memory: Array, order: Array) -> None:
        self._batch = layouts, columns, placement, memory
        self._order = order
        rows, table = layouts.rows, columns.run_table
        shards: Any = rows.shards
        # Samples of a `SharedDataset` are not in files. One system call reads one sample as fast.
        self._is_joint = isinstance(shards[0], Shard) and len(order) > 1 and table.most_parts <= MAX_BUFFERS
        if not self._is_joint:
            return
        # Hazard: the files of a system call stay open, also if their cache has no room for them. Many threads may read at once.
        self._max_files = max(1, min(_MAX_FILES, shards[0].files.max_open // _MAX_FILES))
        run, self._sample_of = ranges(table.first_run, layouts.which[order])
        part, read_of = ranges(table.first_part, run)
        at, tensor = order[self._sample_of], table.tensor[part]
        address = placement.row_array[tensor, at[read_of]] + address_of(memory)
        scratch = np.empty(SCRATCH_NBYTES if (tensor < 0).any() else 0, np.uint8)
        address[tensor < 0] = address_of(scratch)
        self._begin, self._nbytes = rows.begin[at] + table.begin[run], table.nbytes[run]
        self._first_read = np.searchsorted(self._sample_of, np.arange(len(order) + 1))
        self._buffers = np.stack([address, table.part_nbytes[part]], 1).astype(np.uint64)
        self._first_buffer = np.searchsorted(read_of, np.arange(len(run) + 1))
        self._memory = memory, scratch

    def read(self, begin: int, end: int) -> None:
        """Read the samples `[begin, end)`.

        Raises:
            FormatError: A shard does not match its index, or was truncated.
        """
        left = self._order[begin:end]
        if self._is_joint:
            rows, short = self._batch[0].rows, []
            shards: Any = rows.shards
            edges = [begin, *(begin + 1 + np.diff(rows.number[left]).nonzero()[0]).tolist()]  # of the shards
            for first, last in pairwise([*edges[:: self._max_files], end]):  # one system call each
                order = self._order[first:last]
                numbers, fd, flags = rows.number[order], np.empty(len(order), np.int64), np.empty(len(order), np.int64)
                files = []  # they stay open as long as this list refers to them
                unchecked: list[int] = []
                for number in np.unique(numbers).tolist():
                    shard, mine = shards[number], numbers == number
                    files.append(file := shard.file)
                    fd[mine], flags[mine] = file.fd, file.nowait
                    unchecked += order[mine][~shard.checked[rows.row[order[mine]]]].tolist()
                some = slice(*self._first_read[[first, last]].tolist())
                sample, parts = self._sample_of[some] - first, self._first_buffer[some.start : some.stop + 1]
                owners = self._memory, files
                reads = Reads(fd[sample], self._begin[some], flags[sample], self._buffers, parts, owners)
                is_short: Array = read_many(reads, 0, len(sample)) != self._nbytes[some]
                for i in unchecked:
                    shards[rows.number.item(i)].check_tensors(rows.row.item(i))
                short.append(order[np.unique(sample[is_short])])
            left = np.concatenate(short)
        if len(left):
            _scatter(*self._batch, left)


def _scatter(layouts: Layouts, columns: Columns, placement: Placement, memory: Array, order: Array) -> None:
    """Read the samples `order` (positions in the batch), one after another."""
    rows, row_begins, runs = layouts.rows, placement.rows, columns.runs
    target, scratch = memory.data, memoryview(bytearray(SCRATCH_NBYTES))
    which = layouts.which.tolist()
    row, numbers, begins = rows.row.tolist(), rows.number.tolist(), rows.begin.tolist()
    shard_number = -1
    samples: list[int] = order.tolist()
    # number of samples announced to the system; None while all samples so far were in the page cache
    advised: int | None = None
    # one system call per sample and run; a run is a byte range of tensors with small gaps
    for at, i in enumerate(samples):
        if numbers[i] != shard_number:
            shard_number = numbers[i]
            shard = rows.shards[shard_number]
            file, checked = shard.file, shard.checked
        for first, _, parts in runs[which[i]]:
            buffers = []
            for tensor, n in parts:
                begin = row_begins[tensor][i] if tensor >= 0 else 0
                buffers.append(target[begin : begin + n] if tensor >= 0 else scratch[:n])
            if advised is None and file.read_resident(buffers, begins[i] + first):
                continue
            # cold: keep the disk busy with the next samples while this one is read
            for j in samples[max(at, advised or 0) : at + IN_FLIGHT]:
                _advise(rows.shards[numbers[j]].file, begins[j], runs[which[j]])
            advised = at + IN_FLIGHT
            file.read_into(buffers, begins[i] + first)
        if not checked[row[i]]:
            shard.check_tensors(row[i])


def _advise(file: RowFile, begin: int, runs: Runs) -> None:
    """Ask the system to read a sample's header and runs in the background."""
    end = begin + BLOCK  # end of the header block and of the runs directly after it
    for run_begin, run_end, _ in runs:
        if begin + run_begin <= end + SCRATCH_NBYTES:
            end = max(end, begin + run_end)
        else:
            file.will_need(begin + run_begin, begin + run_end)
    file.will_need(begin - BLOCK, end)
