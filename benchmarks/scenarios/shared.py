"""Scenario `shared`: samples in shared memory, by `tc.SharedDataset` and by a block of fixed shapes; memory of 8 processes.

The block is the usual solution with `multiprocessing.shared_memory`: one array `[N, …]` for each position of a flat tuple of
tensors, reserved for all N samples at once, and one byte for each sample that is 1 if the sample is present.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.ceiling import Ranges
from benchmarks.harness import CEILING, Context, Rows, in_new_process, memory_mb, require
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


def shared(context: Context) -> Rows:
    """Measure hits of nested samples (lazy, views, copies), hits of flat samples and of a block, and memory of 8 processes."""
    workload, order, batches = context.workload, context.order, context.batches
    directory = context.new_folder("/dev/shm")
    samples: list[Any] = list(context.samples)
    parts = [workload.split(sample) for sample in samples]
    tensors = [tuple(tensors.values()) for tensors, _ in parts]

    def samples_of(item: Any, read: Any) -> list[Any]:
        """Return the samples of flat tensors: of those of one index, or of a batch."""
        rows = [(item, read)] if isinstance(item, int) else zip(item, zip(*read, strict=True), strict=True)
        return [workload.nest(dict(zip(workload.names, row, strict=True)), parts[index][1]) for index, row in rows]

    def share(samples: list[Any], name: str) -> tc.SharedDataset:
        return context.enter(tc.SharedDataset(samples, name, directory=directory))

    def reopen() -> None:
        reopened.append(share(samples, "nested"))
        for opened in reopened[:-1]:
            opened.close()

    nested, flat = share(samples, "nested"), share(tensors, "flat")
    reopened: list[tc.SharedDataset] = []  # the last one is opened before each pass, as by another process
    reopen()
    block = _Block(tensors)
    context.stack.callback(block.close)
    # a row: what it reads, how, and the samples in that for the check
    reads: dict[str, tuple[Sequence[Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
        HIT: (order, nested.__getitem__, lambda _, sample: [sample]),
        FIRST: (order, lambda index: reopened[-1][index], lambda _, sample: [sample]),
        VIEWS: (order, lambda index: _load(workload.split(nested[index])[0].values(), copy=False), samples_of),
        LOADED: (order, lambda index: _load(workload.split(nested[index])[0].values(), copy=True), samples_of),
        FLAT_VIEWS: (order, lambda index: _load(flat[index], copy=False), samples_of),
        BLOCK_VIEWS: (order, block.__getitem__, samples_of),
        FLAT_COPIES: (order, lambda index: _load(flat[index], copy=True), samples_of),
        BLOCK_COPIES: (order, lambda index: [tensor.clone() for tensor in block[index]], samples_of),
        BATCHES: (batches, nested.read_batch, lambda _, batch: as_batch(workload, batch).samples()),
        FLAT_BATCHES: (batches, flat.read_batch, samples_of),
        BLOCK_BATCHES: (batches, block.batch, samples_of),
    }
    runs = context.ceilings({CEILING: Ranges.copy}, 1)
    runs |= context.ceilings({BATCH_CEILING: Ranges.copy}, workload.batch_size)
    for name, (items, read, unpack) in reads.items():
        for item in items:
            context.check(name, unpack(item, read(item)), [item] if isinstance(item, int) else item)
        runs[name] = partial(_each, items, len(order), read)
    memory = partial(in_new_process, _measure_memory, directory, _QUICK_NBYTES if context.is_quick else _NBYTES)
    return context.rows(runs, rewinds={FIRST: reopen}) | {_PROCESSES: memory}


def _each(items: Sequence[Any], count: int, get: Callable[[Any], object]) -> int:
    for item in items:
        get(item)
    return count


def _load(tensors: Any, copy: bool) -> list[torch.Tensor]:
    return [tensor.load(copy=copy) for tensor in tensors]


# --- a process whose children share samples, as workers of a loader do ---

_shared: list[Any] = []  # in a child: the dataset, the checksums of its samples, and a barrier for all children


def _read(num_samples: int) -> int:
    """Read every byte of some samples without a copy, and check the values; return the id of the process."""
    dataset, expected, barrier = _shared
    barrier.wait()  # so that each process has one of the calls
    for index in range(num_samples):
        checksum = _DIFFUSION.checksum(viewed(_DIFFUSION, dataset[index]))
        require(checksum == expected[index % len(expected)], f"sample {index}")
    return os.getpid()


def _measure_memory(directory: Path, nbytes: int) -> dict[str, float]:
    """Return the megabytes of this process and its children after each child has read all samples, and what that added.

    A page that n processes have in memory counts as 1/n for each (PSS). Torch alone takes more than 200 MB.
    """
    torch.set_num_threads(1)  # a forked process would wait forever for threads of OpenMP
    fork = multiprocessing.get_context("fork")
    few = [_DIFFUSION.sample(index) for index in range(8)]
    expected = [_DIFFUSION.checksum(sample) for sample in few]
    count = nbytes // sum(tensor.nbytes for tensor in _DIFFUSION.split(few[0])[0].values())
    samples = Generated(lambda index: few[index % len(few)], count)
    with tc.SharedDataset(samples, f"holders-{os.getpid()}", directory=directory) as dataset:
        _shared[:] = dataset, expected, fork.Barrier(_NUM_PROCESSES)
        with ProcessPoolExecutor(_NUM_PROCESSES, fork) as pool:
            before, total = (
                sum(memory_mb(f"{pid}/smaps_rollup", "Pss:") for pid in [os.getpid(), *pids])
                for pids in (list(pool.map(_read, [num] * _NUM_PROCESSES)) for num in (0, count))
            )
    return {_TOTAL: total, _ADDED: total - before}
