"""Which bytes of which samples go where in a batch's memory, and getting them there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.shards.tar.archive import BLOCK
from wds_tensorcache.storage.maps import MapLost, Maps
from wds_tensorcache.storage.threads import ThreadPool, wait_for

__all__ = ["Extents", "Places", "Plan"]

Array = np.ndarray[Any, Any]
Runs = list[tuple[int, int, list[tuple[int, int]]]]  # (begin, end, (tensor or -1 for a gap, bytes) in their order)
GATHER_NBYTES = 1 << 14  # samples up to here are copied from maps faster than by a system call each
SCRATCH_NBYTES = 1 << 14  # a gap up to here is cheaper to read than to begin another call
IN_FLIGHT = 32  # reads that keep a disk busy
_NUM_PROBES = 4
_PID = os.getpid()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the samples of a batch lie: `shards[number[i]]`, its sample `row[i]`, whose tensors begin at byte `begin[i]`.

    `parts` has, for each shard that is in the batch, its number, which samples of the batch are in it, and their rows.
    """

    shards: Sequence[Shard]
    number: Array
    row: Array
    begin: Array
    parts: Sequence[tuple[int, Any, Array]]

    def __len__(self) -> int:
        return len(self.row)

    def skeletons(self, io: str) -> Iterator[tuple[int, bytes, int]]:
        """Yield (which sample, its skeleton, where that one's body begins), shard by shard."""
        everything = range(len(self))
        for number, at, rows in self.parts:
            which = everything if isinstance(at, slice) else at.tolist()
            yield from zip(which, *self.shards[number].skeletons(rows, io), strict=True)


@dataclass(slots=True)
class Extents:
    """What is read of samples, in each layout that they have.

    Attributes:
        begin: [tensors, layouts], byte offset of the tensor in the `.safetensors` member.
        nbytes: [tensors, layouts], its bytes.
        sizes: The bytes of each tensor, if they are the same in all layouts.
    """

    begin: Array
    nbytes: Array
    sizes: list[int] | None = field(init=False)
    _runs: list[Runs] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        first = self.nbytes[:, 0]
        self.sizes = first.tolist() if bool((self.nbytes == first[:, None]).all()) else None

    @property
    def runs(self) -> list[Runs]:
        """The reads that a sample of each layout takes."""
        if self._runs is None:
            self._runs = [_runs(*each) for each in zip(self.begin.T.tolist(), self.nbytes.T.tolist(), strict=True)]
        return self._runs


def _runs(begins: list[int], sizes: list[int]) -> Runs:
    runs: Runs = []
    for begin, tensor in sorted(zip(begins, range(len(begins)), strict=True)):
        nbytes = sizes[tensor]
        gap = begin - runs[-1][1] if runs else -1
        if not nbytes:
            continue
        if 0 <= gap <= SCRATCH_NBYTES:
            first, _, parts = runs[-1]
            parts += [(-1, gap), (tensor, nbytes)] if gap else [(tensor, nbytes)]
            runs[-1] = first, begin + nbytes, parts
        else:
            runs.append((begin, begin + nbytes, [(tensor, nbytes)]))
    return runs


@dataclass(frozen=True, slots=True)
class Plan:
    """Which bytes of which samples go where in a batch's memory.

    Attributes:
        places: Where the samples lie.
        extents: What is read of each.
        layout: [samples], which layout a sample has; None if there is one.
        first: Where the row of the first sample goes, by tensor.
        dest: [tensors, samples], where each goes; None if all rows follow each other and are of `extents.sizes`.
    """

    places: Places
    extents: Extents
    layout: Array | None
    first: list[int]
    dest: Array | None

    def read(self, memory: Array, io: str, threads: int, executor: ThreadPool | None) -> str:
        """Fill `memory` (uint8); return how that was done: `io`, or "pread" if not through maps.

        Small samples of one size that are in the page cache are gathered from maps, one torch call per tensor; all else
        takes one positioned read per sample, scattered over the tensors' places.

        Args:
            io: "pread" never gathers, "auto" as above, and a shard that is cut short meanwhile is an error; "mmap" gathers
                even what may not be in memory, and a shard that is cut short kills the process.
            threads: How many read at once; `executor` runs all but one.

        Raises:
            FormatError: A shard is not what its index says, or was cut short.
        """
        if io != "pread" and self._gather(memory, io):
            return io
        self._read(memory, threads, executor)
        self._check_unchanged()
        return "pread"

    def _check_unchanged(self) -> None:
        """Raise FormatError if a shard was written to since it was opened; one system call for each."""
        for number, *_ in self.places.parts:
            self.places.shards[number].file.check_unchanged()

    def _read(self, memory: Array, threads: int, executor: ThreadPool | None) -> None:
        places = self.places
        order = np.lexsort((places.begin, places.number)) if len(places.shards) > 1 else np.arange(len(places))
        nbytes = self.extents.nbytes.sum(0)
        total = int(nbytes[0]) * len(places) if self.layout is None else int(nbytes[self.layout].sum())
        threads = min(threads, len(order), max(1, total >> 18)) if executor else 1  # else handing over costs more
        parts = [part.tolist() for part in np.array_split(order, threads)]
        runs = self.extents.runs
        jobs = [executor.submit(self._scatter, memory, runs, part) for part in parts[1:]] if executor else []
        try:
            self._scatter(memory, runs, parts[0])
        finally:
            # Hazard: a thread that still writes would write into memory that is used for other batches.
            wait_for(jobs)
        while jobs:
            jobs.pop(0).result()  # an error refers to this frame, which then must not refer to it

    def _begin_of(self, tensor: int) -> Any:
        """Return where a tensor begins in its member: [samples], or one number for all."""
        begin = self.extents.begin[tensor]
        return begin.item(0) if self.layout is None else begin[self.layout]

    def _gather(self, memory: Array, io: str) -> bool:
        places, sizes = self.places, self.extents.sizes
        if self.dest is not None or sizes is None or sum(sizes) > GATHER_NBYTES:
            return False
        if os.getpid() != _PID and torch.get_num_threads() > 1:
            return False  # forked: if torch's threads were used before, a call that wants them waits forever
        if len(places.parts) > places.shards[0].files.max_open or (io == "auto" and not self._is_resident()):
            return False
        try:
            with Maps([places.shards[number].file for number, *_ in places.parts], len(places), io) as maps:
                origin = places.begin.copy()
                for (number, at, rows), base in zip(places.parts, maps.bases, strict=True):
                    places.shards[number].check_mapped(rows, maps, base)
                    origin[at] += base
                for tensor, size in enumerate(sizes):
                    if size:
                        out = memory[self.first[tensor] : self.first[tensor] + size * len(places)]
                        maps.gather(origin + self._begin_of(tensor), size, out.reshape(len(places), size))
        except MapLost:
            return False
        return True

    def _is_resident(self) -> bool:
        """Return whether a few of the samples are in the page cache: through a cold map one waits page by page."""
        places = self.places
        where = places.begin + self._begin_of(-1) if self.first else places.begin
        # one system call each
        return all(
            places.shards[places.number.item(i)].file.is_resident(where.item(i))
            for i in range(0, len(places), max(1, len(places) // _NUM_PROBES))
        )

    def _dest(self) -> list[Sequence[int]]:
        """Return where each row goes: [tensors][samples]."""
        if self.dest is not None:
            return self.dest.tolist()  # type: ignore[no-any-return]
        count, sizes = len(self.places), self.extents.sizes or ()
        return [range(at, at + size * count, size) if size else () for at, size in zip(self.first, sizes, strict=True)]

    def _scatter(self, memory: Array, layouts: list[Runs], order: list[int]) -> None:
        target = memory.data
        scratch = memoryview(bytearray(SCRATCH_NBYTES))
        places, dest = self.places, self._dest()
        which = [0] * len(places) if self.layout is None else self.layout.tolist()
        rows, numbers, begins = places.row.tolist(), places.number.tolist(), places.begin.tolist()
        advised: int | None = None  # how many of `order` the system was told of; None while all were in memory
        # one system call per sample and run
        for at, i in enumerate(order):
            shard = places.shards[numbers[i]]
            file = shard.file
            for first, _, parts in layouts[which[i]]:
                buffers = [
                    scratch[:n] if tensor < 0 else target[dest[tensor][i] : dest[tensor][i] + n] for tensor, n in parts
                ]
                if advised is None and file.read_resident(buffers, begins[i] + first):
                    continue
                # cold: keep the disk busy with the samples to come while this one is waited for
                for j in order[max(at, advised or 0) : at + IN_FLIGHT]:
                    ahead = places.shards[numbers[j]].file
                    end = begins[j] + BLOCK  # of what check_tensors reads, and of what follows that at once
                    for run_begin, run_end, _ in layouts[which[j]]:
                        if begins[j] + run_begin <= end + SCRATCH_NBYTES:
                            end = max(end, begins[j] + run_end)
                        else:
                            ahead.will_need(begins[j] + run_begin, begins[j] + run_end)
                    ahead.will_need(begins[j] - BLOCK, end)
                advised = at + IN_FLIGHT
                file.read_into(buffers, begins[i] + first)
            shard.check_tensors(rows[i])
