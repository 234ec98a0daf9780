"""Scenario `shared`: samples in shared memory, by `tc.SharedDataset` and by a block of fixed shapes; memory of 8 processes.

The block is the usual solution with `multiprocessing.shared_memory`: one array `[N, …]` for each position of a flat tuple of
tensors, reserved for all N samples at once, and one byte for each sample that is 1 if the sample is present.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.ceiling import Ranges
from benchmarks.harness import CEILING, Context, Rows, Skipped, Timed, in_new_process
from benchmarks.peers.ours import as_batch, viewed
from benchmarks.workloads import WORKLOADS, Generated

_DIFFUSION = WORKLOADS["diffusion"]
_NBYTES, _QUICK_NBYTES = 10**9, 10**7  # tensor bytes of the samples that the processes share
_NUM_PROCESSES = 8

FIRST, HIT = "first hit of a process, lazy", "hit, lazy"
VIEWS, LOADED, BATCHES = "hit, views of all tensors", "hit, all tensors loaded", "read_batch"
FLAT_VIEWS, BLOCK_VIEWS = "flat tensors, views", "block, views"
FLAT_COPIES, BLOCK_COPIES = "flat tensors, copies", "block, copies"
FLAT_BATCHES, BLOCK_BATCHES = "flat tensors, read_batch", "block, batch"
_PROCESSES, _TOTAL, _ADDED = "8 processes", " with 1 GB, MB", ", added by 1 GB, MB"
MEMORY, ADDED = _PROCESSES + _TOTAL, _PROCESSES + _ADDED
BATCH_CEILING = f"{CEILING}, batches"


class _Block:
    """Flat tuples of tensors in shared memory, loaded at their first access. A hit returns views, a batch is a copy."""

    def __init__(self, dataset: Sequence[tuple[torch.Tensor, ...]]) -> None:
        count, first = len(dataset), dataset[0]
        self._dataset = dataset
        self._memory = SharedMemory(create=True, size=count * (1 + sum(tensor.nbytes for tensor in first)))
        self._present = np.ndarray(count, np.bool_, self._memory.buf)
        self._present[:] = False
        self.arrays, begin = [], count
        for tensor in first:
            flat = torch.frombuffer(self._memory.buf, dtype=tensor.dtype, count=count * tensor.numel(), offset=begin)
            self.arrays.append(flat.view(count, *tensor.shape))
            begin += count * tensor.nbytes

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if not self._present[index]:
            for array, tensor in zip(self.arrays, self._dataset[index], strict=True):
                array[index] = tensor
            self._present[index] = True
        return tuple(array[index] for array in self.arrays)

    def batch(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        for index in indices:
            if not self._present[index]:
                self[index]
        return tuple(array[indices] for array in self.arrays)

    def close(self) -> None:
        del self._present
        self.arrays.clear()
        self._memory.close()
        self._memory.unlink()


@contextmanager
def shared(context: Context) -> Iterator[Rows]:
    """Measure hits of nested samples (lazy, views, copies), hits of flat samples and of a block, and memory of 8 processes."""
    if not sys.platform.startswith("linux"):
        raise Skipped("SharedDataset needs locks that only Linux has")
    workload, order, batches = context.workload, context.order, context.batches
    samples: list[Any] = list(context.samples)
    parts = [workload.split(sample) for sample in samples]
    tensors = [tuple(tensors.values()) for tensors, _ in parts]

    def nest(index: int, tensors: Any) -> Any:
        return workload.nest(dict(zip(workload.dtypes, tensors, strict=True)), parts[index][1])

    def nest_batch(indices: list[int], batch: Any) -> Iterator[Any]:
        return (nest(index, row) for index, row in zip(indices, zip(*batch, strict=True), strict=True))

    with ExitStack() as stack:

        def share(samples: list[Any], name: str) -> tc.SharedDataset:
            return stack.enter_context(tc.SharedDataset(samples, name, directory=context.tmpfs))

        nested, flat = share(samples, "nested"), share(tensors, "flat")
        reopened: list[tc.SharedDataset] = []  # the last one is opened before each pass, as by another process

        def reopen() -> None:
            reopened.append(share(samples, "nested"))
            for opened in reopened[:-1]:
                opened.close()

        block = _Block(tensors)
        stack.callback(block.close)
        # a row: what it gets, and the samples in it for the check
        gets: dict[str, tuple[Callable[[int], Any], Callable[[int, Any], Any]]] = {
            HIT: (nested.__getitem__, lambda _, sample: sample),
            VIEWS: (lambda index: _views(workload.split(nested[index])[0].values()), nest),
            LOADED: (lambda index: _loads(workload.split(nested[index])[0].values()), nest),
            FLAT_VIEWS: (lambda index: _views(flat[index]), nest),
            BLOCK_VIEWS: (block.__getitem__, nest),
            FLAT_COPIES: (lambda index: _loads(flat[index]), nest),
            BLOCK_COPIES: (lambda index: [tensor.clone() for tensor in block[index]], nest),
        }
        reads: dict[str, tuple[Callable[[list[int]], Any], Callable[[list[int], Any], Iterable[Any]]]] = {
            BATCHES: (nested.read_batch, lambda _, batch: as_batch(workload, batch).samples()),
            FLAT_BATCHES: (flat.read_batch, nest_batch),
            BLOCK_BATCHES: (block.batch, nest_batch),
        }
        runs = stack.enter_context(context.ceilings({CEILING: Ranges.copy}, 1))
        runs |= stack.enter_context(context.ceilings({BATCH_CEILING: Ranges.copy}, workload.batch_size))
        for name, (get, nest_one) in gets.items():
            context.check(name, (nest_one(index, get(index)) for index in order), order)
            runs[name] = partial(_each, order, len(order), get)
        for name, (read, samples_of) in reads.items():
            for indices in batches:
                context.check(name, samples_of(indices, read(indices)), indices)
            runs[name] = partial(_each, batches, len(order), read)
        first = partial(_each, order, len(order), lambda index: reopened[-1][index])
        nbytes = _QUICK_NBYTES if context.is_quick else _NBYTES
        yield {
            **context.rows(runs),
            FIRST: Timed(first, len(order), reopen),
            _PROCESSES: partial(in_new_process, _measure_memory, context.tmpfs, nbytes),
        }


def _each(items: Sequence[Any], count: int, get: Callable[[Any], object]) -> int:
    for item in items:
        get(item)
    return count


def _views(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load(copy=False) for tensor in tensors]


def _loads(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load() for tensor in tensors]


# --- a process whose children share samples, as workers of a loader do ---


def _hold(shared: tc.SharedDataset, expected: list[Any], barrier: Any) -> None:
    """Read every byte of all samples without a copy, and raise AssertionError if a value is wrong."""
    try:
        barrier.wait()
        barrier.wait()  # until the parent has measured
        for index in range(len(shared)):
            if _DIFFUSION.checksum(viewed(_DIFFUSION, shared[index])) != expected[index % len(expected)]:
                raise AssertionError(f"sample {index} has other values")
        barrier.wait()
        barrier.wait()
    except BaseException:
        barrier.abort()  # the others would wait for it
        raise


def _pss(pid: int | None) -> float:
    """Return a process's proportional set size in MB: a page that n processes have in memory counts as 1/n for each."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024 / 1e6


def _measure_memory(directory: Path, nbytes: int) -> dict[str, float]:
    """Return the megabytes of this process and its children after each child has read all samples, and what that added.

    Torch alone takes more than 200 MB.
    """
    torch.set_num_threads(1)  # a forked process would wait forever for threads of OpenMP
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(_NUM_PROCESSES + 1)
    few = [_DIFFUSION.sample(index) for index in range(8)]
    expected = [_DIFFUSION.checksum(sample) for sample in few]
    count = nbytes // sum(tensor.nbytes for tensor in _DIFFUSION.split(few[0])[0].values())
    samples = Generated(lambda index: few[index % len(few)], count)
    with tc.SharedDataset(samples, f"holders-{os.getpid()}", directory=directory) as shared:
        children = [fork.Process(target=_hold, args=(shared, expected, barrier)) for _ in range(_NUM_PROCESSES)]
        for child in children:
            child.start()
        totals = []
        for _ in range(2):
            barrier.wait()
            totals.append(sum(map(_pss, [os.getpid(), *(child.pid for child in children)])))
            barrier.wait()
        for child in children:
            child.join()
    before, total = totals
    return {_TOTAL: total, _ADDED: total - before}
