"""Fill a batch's memory: choose the reads, their order and their threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.batch.columns import Columns, Layouts
from wds_tensorcache.reading.batch.merge_reads import SCRATCH_NBYTES, Runs, ranges
from wds_tensorcache.reading.batch.placement import Placement
from wds_tensorcache.reading.batch.rows import RowFile, Rows
from wds_tensorcache.reading.remote.fetch_batch import BatchFetch, add_skeleton
from wds_tensorcache.reading.remote.local_copies import find_local_copies
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.shards.tar.headers import BLOCK
from wds_tensorcache.storage.aio import Reads, address_of, read_many
from wds_tensorcache.storage.maps import MapLost, Maps
from wds_tensorcache.storage.node_cache.block_file import BlockFile, Evicted
from wds_tensorcache.storage.system import MAX_BUFFERS

__all__ = ["read_rows"]

Array = np.ndarray[Any, Any]
GATHER_NBYTES = 1 << 14  # samples of up to this size are copied from maps faster than by one system call each
IN_FLIGHT = 32  # the number of reads in flight that keeps a disk busy
_NUM_PROBES = 4
_MAX_FILES = 16  # of one system call
_PID = os.getpid()
_NONE_FAR = np.empty(0, np.bool_)


def read_rows(
    store: Store, layouts: Layouts, columns: Columns, placement: Placement, memory: Array, skeletons: Iterable[int] = ()
) -> str:
    """Read every row of a batch into `memory`, where `placement` puts it; return the method used, "pread" or `store.io.method`.

    If samples are small and in the page cache, rows are copied out of memory maps (gathered), with one torch call per
    tensor. Otherwise one positioned read per sample writes directly into the rows (scattered). The method "pread" never
    gathers. "auto" gathers as above; if a shard is truncated meanwhile, it raises an error. "mmap" gathers without checking
    the page cache; if a shard is truncated meanwhile, the process is killed (SIGBUS).

    Rows of remote shards are fetched by ranged requests, all at once, with the skeletons of the samples `skeletons` of the
    batch, which `Rows` keeps. If all rows are in the node's cache, they are read as from local shards, without maps.

    Raises:
        FormatError: A shard does not match its index, or was truncated.
    """
    rows, io = layouts.rows, store.io.method
    is_far = store.are_remote[rows.number] if store.has_remote else _NONE_FAR
    if is_far.any():
        far = np.flatnonzero(is_far).tolist()
        wanted = set(skeletons).intersection(far).difference(rows.fetched)
        copies = find_local_copies(store, layouts, columns, is_far, wanted)
        is_read = False
        if copies is not None:
            with suppress(Evicted):
                found = copies.read_skeletons()
                _read_local(store, layouts, columns, placement, memory, is_far, copies.files)
                rows.fetched.update(found)
                is_read = True
        if not is_read:
            _fetch(layouts, columns, placement, memory, far, wanted)
        if is_far.all():
            return "pread"
    if not placement.nbytes:
        return "pread"
    if (
        io != "pread"
        and not is_far.any()
        and columns.sizes is not None
        and columns.sizes == placement.row_nbytes
        and sum(columns.sizes) <= GATHER_NBYTES
    ):
        if _gather(store.shards, layouts, columns, placement, memory, io):
            return io
    _read_local(store, layouts, columns, placement, memory, ~is_far if len(is_far) else None, {})
    return "pread"


def _read_local(
    store: Store,
    layouts: Layouts,
    columns: Columns,
    placement: Placement,
    memory: Array,
    which: Array | None,
    copies: Mapping[int, BlockFile],
) -> None:
    """Read rows from local files, by several threads.

    Args:
        which: Mask of the samples to read; None for all.
        copies: Local files of remote shards, by shard number.
    """
    rows = layouts.rows
    order = np.lexsort((rows.begin, rows.number)) if len(rows.shards) > 1 else np.arange(len(rows.row))
    order = order if which is None else order[which[order]]
    count = len(order)
    total = int(columns.nbytes.sum(0)[layouts.which].sum())
    # a thread for less than 256 KiB costs more than it saves
    threads = max(1, min(store.num_threads, count, total >> 18))
    executor = store.executor() if threads > 1 else None
    plan = _Plan(layouts, columns, placement, memory, order, copies)
    edges = [count * number // threads for number in range(threads + 1)] if executor is not None else [0, count]
    futures: list[Future[None]] = []
    try:
        for begin, end in pairwise(edges[1:]):
            futures.append(executor.submit(plan.read, begin, end))  # type: ignore[union-attr]
        plan.read(0, edges[1])
    finally:
        # Hazard: a thread that still runs would write into memory that another batch may use.
        wait(futures)
    while futures:
        futures.pop(
            0
        ).result()  # an error refers to this frame; if the frame kept the future, the two would form a cycle
    for number in set(rows.number[order].tolist()):  # one system call each
        plan.file(number).check_unchanged()


def _fetch(
    layouts: Layouts, columns: Columns, placement: Placement, memory: Array, far: list[int], skeletons: Iterable[int]
) -> None:
    """Read the tensors of some samples and the skeletons of some samples (positions in the batch), all in remote shards."""
    rows, runs, row_begins, target = layouts.rows, columns.exact_runs, placement.rows, memory.data
    which, numbers, begins = layouts.which.tolist(), rows.number.tolist(), rows.begin.tolist()
    shards: Any = rows.shards
    fetch = BatchFetch()
    # cost per sample: one range for each run of adjacent tensors
    for i in far:
        shard = shards[numbers[i]]
        for first, _, parts in runs[which[i]]:
            buffers = [target[(begin := row_begins[tensor][i]) : begin + nbytes] for tensor, nbytes in parts]
            fetch.add_into(shard, begins[i] + first, buffers)
    found: dict[int, bytes] = {}
    for i in skeletons:
        add_skeleton(fetch, i, shards[numbers[i]], rows.row.item(i), found)
    fetch.run()
    rows.fetched.update(found)


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
            for (_, at, _), base in zip(rows.by_shard, maps.bases, strict=True):
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
        copies: Local files of remote shards, by shard number.
    """

    def __init__(
        self,
        layouts: Layouts,
        columns: Columns,
        placement: Placement,
        memory: Array,
        order: Array,
        copies: Mapping[int, BlockFile],
    ) -> None:
        self._batch = layouts, columns, placement, memory
        self._copies = copies
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

    def file(self, number: int) -> Any:
        """Return the open file of a shard."""
        return self._copies.get(number) or self._batch[0].rows.shards[number].file

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
                for number in set(numbers.tolist()):  # np.unique takes six times as long
                    shard, mine = shards[number], numbers == number
                    files.append(file := self._copies.get(number) or shard.files.get(shard.path))
                    fd[mine], flags[mine] = file.fd, file.nowait
                some = slice(*self._first_read[[first, last]].tolist())
                sample, parts = self._sample_of[some] - first, self._first_buffer[some.start : some.stop + 1]
                owners = self._memory, files
                reads = Reads(fd[sample], self._begin[some], flags[sample], self._buffers, parts, owners)
                is_short: Array = read_many(reads, 0, len(sample)) != self._nbytes[some]
                short.append(order[np.unique(sample[is_short])])
            left = np.concatenate(short)
        if len(left):
            _scatter(*self._batch, left, self.file)


def _scatter(
    layouts: Layouts,
    columns: Columns,
    placement: Placement,
    memory: Array,
    order: Array,
    file_of: Callable[[int], Any],
) -> None:
    """Read the samples `order` (positions in the batch), one after another; `file_of` returns the file of a shard."""
    rows, row_begins, runs = layouts.rows, placement.rows, columns.runs
    target, scratch = memory.data, memoryview(bytearray(SCRATCH_NBYTES))
    which = layouts.which.tolist()
    numbers, begins = rows.number.tolist(), rows.begin.tolist()
    shard_number = -1
    samples: list[int] = order.tolist()
    # number of samples announced to the system; None while all samples so far were in the page cache
    advised: int | None = None
    # one system call per sample and run; a run is a byte range of tensors with small gaps
    for at, i in enumerate(samples):
        if numbers[i] != shard_number:
            shard_number = numbers[i]
            file = file_of(shard_number)
        for first, _, parts in runs[which[i]]:
            buffers = []
            for tensor, n in parts:
                begin = row_begins[tensor][i] if tensor >= 0 else 0
                buffers.append(target[begin : begin + n] if tensor >= 0 else scratch[:n])
            if advised is None and file.read_resident(buffers, begins[i] + first):
                continue
            # cold: keep the disk busy with the next samples while this one is read
            for j in samples[max(at, advised or 0) : at + IN_FLIGHT]:
                _advise(file_of(numbers[j]), begins[j], runs[which[j]])
            advised = at + IN_FLIGHT
            file.read_into(buffers, begins[i] + first)


def _advise(file: RowFile, begin: int, runs: Runs) -> None:
    """Ask the system to read a sample's header and runs in the background."""
    end = begin + BLOCK  # end of the header block and of the runs directly after it
    for run_begin, run_end, _ in runs:
        if begin + run_begin <= end + SCRATCH_NBYTES:
            end = max(end, begin + run_end)
        else:
            file.will_need(begin + run_begin, begin + run_end)
    file.will_need(begin - BLOCK, end)
