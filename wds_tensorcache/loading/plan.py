"""Which bytes of which samples go where in a batch's memory, and getting them there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.shards.reader import Shard, gather
from wds_tensorcache.shards.tar import BLOCK

__all__ = ["Places", "Plan"]

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

    `parts` has, for each shard that is in the batch, its number and which samples of the batch are in it.
    """

    shards: Sequence[Shard]
    number: Array
    row: Array
    begin: Array
    parts: Sequence[tuple[int, Any]]

    def __len__(self) -> int:
        return len(self.row)

    def skeletons(self, mapped: bool) -> Iterator[tuple[int, bytes, int]]:
        """Yield (which sample, its skeleton, where that one's body begins), shard by shard."""
        everything = range(len(self))
        for number, at in self.parts:
            which = everything if isinstance(at, slice) else at.tolist()
            yield from zip(which, *self.shards[number].skeletons(self.row[at], mapped), strict=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read of each sample, by tensor, and where it goes.

    Attributes:
        begin: [tensors, layouts], byte offset of the tensor in the `.safetensors` member.
        nbytes: [tensors, layouts], its bytes.
        layout: [samples], which layout a sample has.
        dest: [tensors, samples], byte offset in the batch's memory.
    """

    begin: Array
    nbytes: Array
    layout: Array
    dest: Array

    def read(self, places: Places, memory: Array, io: str, threads: int, executor: Executor | None) -> bool:
        """Fill `memory` (uint8); return whether that was done through maps.

        Small samples of one size that are in the page cache are gathered from maps, one torch call per tensor; all else
        takes one positioned read per sample, scattered over the tensors' places.

        Args:
            io: "mmap" gathers even what may not be in memory, "pread" never gathers, "auto" as above.
            threads: How many read at once; `executor` runs all but one.

        Raises:
            FormatError: A shard is not what its index says, or was cut short.
        """
        if io != "pread" and self._gather(places, memory, io):
            return True
        order = np.lexsort((places.begin, places.number)) if len(places.shards) > 1 else np.arange(len(places))
        total = int(self.nbytes.sum(0)[self.layout].sum())
        threads = min(threads, len(order), max(1, total >> 18)) if executor else 1  # else handing over costs more
        parts = [part.tolist() for part in np.array_split(order, threads)]
        runs = self._runs()
        futures = [executor.submit(self._scatter, places, memory, runs, p) for p in parts[1:]] if executor else []
        try:
            self._scatter(places, memory, runs, parts[0])
        finally:
            wait(futures)  # when this returns, nobody may be writing into the memory any more
        while futures:
            futures.pop(0).result()  # an error refers to this frame, which then must not refer to it
        return False

    def _gather(self, places: Places, memory: Array, io: str) -> bool:
        sizes = self.nbytes[:, 0]
        if os.getpid() != _PID and torch.get_num_threads() > 1:
            return False  # forked: if torch's threads were used before, a call that wants them waits forever
        small = int(sizes.sum()) <= GATHER_NBYTES and bool((self.nbytes == sizes[:, None]).all())
        if not small or len(places.parts) > places.shards[0].files.max_open:
            return False
        begin = self.begin[:, self.layout]
        if io == "auto" and not self._are_resident(places, begin[-1] if len(begin) else places.begin):
            return False
        files = [places.shards[number].file for number, _ in places.parts]
        bases = [file.address() for file in files]
        # all maps as one array, from the first one's address to the end of the last; what lies between is never touched
        first = min(bases)
        span = max(base + file.nbytes for base, file in zip(bases, files, strict=True)) - first
        origin = places.begin.copy()
        for (number, at), base in zip(places.parts, bases, strict=True):
            places.shards[number].check_mapped(places.row[at])
            origin[at] += base - first
        whole = np.asarray(_Memory(first, span))
        for tensor, size in enumerate(sizes.tolist()):
            if size:
                dest = int(self.dest[tensor, 0])
                out = memory[dest : dest + size * len(places)].reshape(len(places), size)
                gather(whole, origin + begin[tensor], size, out)
        return True

    def _are_resident(self, places: Places, begin: Array) -> bool:
        """Return whether a few of the samples are in the page cache: through a cold map one waits page by page."""
        shards = places.shards
        where = places.begin + begin
        # one system call each
        return all(
            shards[places.number.item(i)].file.is_resident(where.item(i))
            for i in range(0, len(places), max(1, len(places) // _NUM_PROBES))
        )

    def _runs(self) -> list[Runs]:
        """Return the reads that a sample of each layout takes."""
        result = []
        for begins, sizes in zip(self.begin.T.tolist(), self.nbytes.T.tolist(), strict=True):
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
            result.append(runs)
        return result

    def _scatter(self, places: Places, memory: Array, layouts: list[Runs], order: list[int]) -> None:
        target = memory.data
        scratch = memoryview(bytearray(SCRATCH_NBYTES))
        which, dest = self.layout.tolist(), self.dest.tolist()
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


class _Memory:
    """Lets numpy see the process's memory from an address on."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
