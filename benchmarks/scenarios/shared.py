"""Scenario `shared`: samples in shared memory, by `tc.SharedDataset` and by a block of fixed shapes; memory of 8 processes.

The block is the usual solution with `multiprocessing.shared_memory`: one array `[N, …]` for each position of a flat tuple of
tensors, reserved for all N samples at once, and one byte for each sample that is 1 if the sample is present.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.ours import as_batch
from benchmarks.timing import Rounds, Variant, interleaved
from benchmarks.workloads import WORKLOADS

_DIFFUSION = WORKLOADS["diffusion"]
_ROOT = Path(__file__).parent.parent.parent
_NBYTES, _QUICK_NBYTES = 10**9, 10**7  # tensor bytes of the samples that the processes share
_NUM_PROCESSES = 8

FIRST, HIT = "first hit of a process, lazy", "hit, lazy"
VIEWS, LOADED, BATCHES = "hit, views of all tensors", "hit, all tensors loaded", "read_batch"
PICKLE = "pickle.loads"
FLAT_VIEWS, BLOCK_VIEWS = "flat tensors, views", "block, views"
FLAT_COPIES, BLOCK_COPIES = "flat tensors, copies", "block, copies"
FLAT_BATCHES, BLOCK_BATCHES = "flat tensors, read_batch", "block, batch"
MEMORY, ADDED = "8 processes with 1 GB, MB", "8 processes, added by 1 GB, MB"
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


def shared(context: Context) -> Rounds:
    """Measure hits of nested samples (lazy, views, copies), hits of flat samples and of a block, and memory of 8 processes."""
    if context.workload.name != _DIFFUSION.name:
        return {}
    if not sys.platform.startswith("linux"):
        raise Skipped("SharedDataset needs locks that only Linux has")
    workload, order = context.workload, context.order
    tensors = [tuple(workload.split(sample)[0].values()) for sample in context.samples]
    with ExitStack() as stack:

        def share(samples: Sequence[Any], name: str) -> tc.SharedDataset:
            return stack.enter_context(tc.SharedDataset(samples, name, directory=context.tmpfs))

        nested, flat = share(context.samples, "nested"), share(tensors, "flat")
        reopened: list[tc.SharedDataset] = []  # the last one is opened before each pass, as by another process

        def reopen() -> None:
            reopened.append(share(context.samples, "nested"))
            for opened in reopened[:-1]:
                opened.close()

        block = _Block(tensors)
        stack.callback(block.close)
        copies = [pickle.dumps(sample, 5) for sample in context.samples]
        gets: dict[str, Callable[[int], object]] = {
            HIT: nested.__getitem__,
            VIEWS: lambda index: _views(workload.split(nested[index])[0].values()),
            LOADED: lambda index: _loads(workload.split(nested[index])[0].values()),
            PICKLE: lambda index: pickle.loads(copies[index]),
            FLAT_VIEWS: lambda index: _views(flat[index]),
            BLOCK_VIEWS: block.__getitem__,
            FLAT_COPIES: lambda index: _loads(flat[index]),
            BLOCK_COPIES: lambda index: [tensor.clone() for tensor in block[index]],
            CEILING: _plain_copies(stack, context, tensors, 1),
        }
        reads: dict[str, Callable[[list[int]], object]] = {
            BATCHES: nested.read_batch,
            FLAT_BATCHES: flat.read_batch,
            BLOCK_BATCHES: block.batch,
            BATCH_CEILING: _plain_copies(stack, context, tensors, workload.batch_size),
        }
        _check(context, nested, flat, block)
        variants = {
            **{name: Variant(partial(_each, order, len(order), get), len(order)) for name, get in gets.items()},
            **{
                name: Variant(partial(_each, context.batches, len(order), read), len(order))
                for name, read in reads.items()
            },
            FIRST: Variant(partial(_each, order, len(order), lambda index: reopened[-1][index]), len(order), reopen),
        }
        found = interleaved(variants, context.rounds)
    measured = [_memory(context) for _ in range(min(3, context.rounds))]
    found[MEMORY] = [total for _, total in measured]
    found[ADDED] = [total - before for before, total in measured]
    return found


def _each(items: Sequence[Any], count: int, get: Callable[[Any], object]) -> int:
    for item in items:
        get(item)
    return count


def _views(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load(copy=False) for tensor in tensors]


def _loads(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load() for tensor in tensors]


def _plain_copies(
    stack: ExitStack, context: Context, samples: Sequence[tuple[torch.Tensor, ...]], num_slots: int
) -> Callable[[Any], object]:
    """Return a function that copies samples, one or more, from one map into `num_slots` recycled arrays in turn."""
    content = [b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in each) for each in samples]
    ends = np.cumsum([len(each) for each in content]).tolist()
    extents = list(zip([0, *ends], ends, strict=False))
    path = context.tmpfs / f"plain-{num_slots}"
    path.write_bytes(b"".join(content))
    stack.callback(path.unlink)
    with open(path, "rb") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    slots = itertools.cycle([np.zeros(max(map(len, content)), np.uint8) for _ in range(num_slots)])

    def copy(indices: int | list[int]) -> Any:
        for index in [indices] if isinstance(indices, int) else indices:
            begin, end = extents[index]
            copied = next(slots)[: end - begin]
            copied[:] = source[begin:end]
        return copied

    for index in context.order[:32]:
        if copy(index).tobytes() != content[index]:
            raise AssertionError(f"the ceiling's bytes of sample {index} are not those of its tensors")
    return copy


def _check(context: Context, nested: tc.SharedDataset, flat: tc.SharedDataset, block: _Block) -> None:
    """Load all samples, and raise AssertionError unless lazy samples, flat views and copies, and all batches equal them."""
    workload, order = context.workload, context.order
    names = list(workload.dtypes)
    small = [workload.split(sample)[1] for sample in context.samples]

    def nest(index: int, tensors: Any) -> Any:
        return workload.nest(dict(zip(names, tensors, strict=True)), small[index])

    context.check(HIT, map(nested.__getitem__, order), order)
    context.check(FLAT_COPIES, (nest(index, _loads(flat[index])) for index in order), order)
    context.check(FLAT_VIEWS, (nest(index, _views(flat[index])) for index in order), order)
    context.check(BLOCK_VIEWS, (nest(index, block[index]) for index in order), order)
    for indices in context.batches:
        context.check(BATCHES, as_batch(workload, nested.read_batch(indices)).samples(), indices)
        for name, batch in ((FLAT_BATCHES, flat.read_batch(indices)), (BLOCK_BATCHES, block.batch(indices))):
            samples = zip(indices, zip(*batch, strict=True), strict=True)
            context.check(name, (nest(index, tensors) for index, tensors in samples), indices)


def _memory(context: Context) -> tuple[float, float]:
    """Return the memory of a process and its children in megabytes, before and after they hold the same samples."""
    nbytes = _QUICK_NBYTES if context.is_quick else _NBYTES
    command = [sys.executable, "-m", "benchmarks.scenarios.shared", str(context.tmpfs), str(nbytes)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{MEMORY}: {done.stderr}")
    before, total = map(float, done.stdout.split())
    return before, total


# --- a process whose children share samples, as workers of a loader do ---


class _Constant(torch.utils.data.Dataset[Any]):
    """Samples of the workload; all elements of the tensors of sample `i` are `i % 2048`."""

    def __init__(self, nbytes: int) -> None:
        self._tensors, self._small = _DIFFUSION.split(_DIFFUSION.sample(0))
        self._count = nbytes // sum(tensor.nbytes for tensor in self._tensors.values())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        tensors = {name: torch.full_like(tensor, index % 2048) for name, tensor in self._tensors.items()}
        return _DIFFUSION.nest(tensors, {**self._small, "index": index})


def _hold(shared: tc.SharedDataset, barrier: Any) -> None:
    """Read every byte of all samples without a copy, and raise AssertionError if a value is wrong."""
    try:
        barrier.wait()
        barrier.wait()  # until the parent has measured
        for index in range(len(shared)):
            tensors, small = _DIFFUSION.split(shared[index])
            for view in _views(tensors.values()):
                if small["index"] != index or {float(view.min()), float(view.max())} != {index % 2048}:
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


def _measure_memory(directory: str, nbytes: str) -> None:
    """Print the memory of this process and its children in megabytes, before and after each child has read all samples.

    Torch alone takes more than 200 MB.
    """
    torch.set_num_threads(1)  # a forked process would wait forever for threads of OpenMP
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(_NUM_PROCESSES + 1)
    with tc.SharedDataset(_Constant(int(nbytes)), f"holders-{os.getpid()}", directory=directory) as shared:
        children = [fork.Process(target=_hold, args=(shared, barrier)) for _ in range(_NUM_PROCESSES)]
        for child in children:
            child.start()
        for _ in range(2):
            barrier.wait()
            print(sum(map(_pss, [os.getpid(), *(child.pid for child in children)])))
            barrier.wait()
        for child in children:
            child.join()


if __name__ == "__main__":
    _measure_memory(*sys.argv[1:])
