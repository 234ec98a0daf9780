"""Scenario `shared`: samples in shared memory, by `tc.SharedDataset` and by a block of fixed shapes; memory of 8 processes.

The block is the usual solution with `multiprocessing.shared_memory`: one array `[N, …]` for each position of a flat tuple of
tensors, reserved for all N samples at once, and one byte for each sample that is 1 if the sample is present.
"""

from __future__ import annotations

import itertools
import mmap
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.base import by_sample, unstack
from benchmarks.timing import Rounds, Variant, interleaved
from benchmarks.workloads import WORKLOADS

_WORKLOAD = "diffusion"
_ROOT = Path(__file__).parent.parent.parent
_NBYTES, _QUICK_NBYTES = 10**9, 10**7  # tensor bytes of the samples that the 8 processes share

FIRST, HIT = "first hit of a process, lazy", "hit, lazy"
VIEWS, LOADED, BATCHES = "hit, views of all tensors", "hit, all tensors loaded", "read_batch"
PICKLE = "pickle.loads"
FLAT_VIEWS, BLOCK_VIEWS = "flat tensors, views", "block, views"
FLAT_COPIES, BLOCK_COPIES = "flat tensors, copies", "block, copies"
FLAT_BATCHES, BLOCK_BATCHES = "flat tensors, read_batch", "block, batch"
MEMORY, ADDED = "8 processes with 1 GB, MB", "8 processes, added by 1 GB, MB"
BATCH_CEILING = f"{CEILING}, batches"


class _ListDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset of samples in a list."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class _Block:
    """Flat tuples of tensors in shared memory, loaded at their first access. A hit returns views, a batch is a copy."""

    def __init__(self, dataset: _ListDataset) -> None:
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
    if context.workload.name != _WORKLOAD:
        return {}
    if not sys.platform.startswith("linux"):
        raise Skipped("SharedDataset needs locks that only Linux has")
    workload, order = context.workload, context.order
    tensors = [tuple(workload.split(sample)[0].values()) for sample in context.samples]
    with ExitStack() as stack:

        def share(samples: Sequence[Any], name: str) -> tc.SharedDataset:
            return stack.enter_context(tc.SharedDataset(_ListDataset(samples), name, directory=context.tmpfs))

        nested, flat = share(context.samples, "nested"), share(tensors, "flat")
        reopened: list[tc.SharedDataset] = []  # the last one is opened before each pass, as by another process

        def reopen() -> None:
            reopened.append(share(context.samples, "nested"))
            for opened in reopened[:-1]:
                opened.close()

        block = _Block(_ListDataset(tensors))
        stack.callback(block.close)
        copies = [pickle.dumps(sample, 5) for sample in context.samples]
        rows = {
            HIT: _each(order, nested.__getitem__),
            VIEWS: _each(order, lambda index: _views(workload.split(nested[index])[0].values())),
            LOADED: _each(order, lambda index: _loads(workload.split(nested[index])[0].values())),
            PICKLE: _each(order, lambda index: pickle.loads(copies[index])),
            FLAT_VIEWS: _each(order, lambda index: _views(flat[index])),
            BLOCK_VIEWS: _each(order, block.__getitem__),
            FLAT_COPIES: _each(order, lambda index: _loads(flat[index])),
            BLOCK_COPIES: _each(order, lambda index: [tensor.clone() for tensor in block[index]]),
            BATCHES: _batches(context.batches, nested.read_batch),
            FLAT_BATCHES: _batches(context.batches, flat.read_batch),
            BLOCK_BATCHES: _batches(context.batches, block.batch),
        }
        _check(context, nested, flat, block)
        variants = {name: Variant(run, len(order)) for name, run in rows.items()}
        for name, num_slots in ((CEILING, 1), (BATCH_CEILING, context.workload.batch_size)):
            variants[name] = Variant(_plain_copies(stack, context, tensors, num_slots), len(order))
        variants[FIRST] = Variant(_each(order, lambda index: reopened[-1][index]), len(order), reopen)
        found = interleaved(variants, context.rounds)
    measured = [_memory(context) for _ in range(min(3, context.rounds))]
    found[MEMORY] = [total for _, total in measured]
    found[ADDED] = [total - before for before, total in measured]
    return found


def _each(order: list[int], get: Callable[[int], object]) -> Callable[[], int]:
    def run() -> int:
        seen = 0
        for index in order:
            get(index)
            seen += 1
        return seen

    return run


def _batches(batches: list[list[int]], read: Callable[[list[int]], object]) -> Callable[[], int]:
    def run() -> int:
        seen = 0
        for indices in batches:
            read(indices)
            seen += len(indices)
        return seen

    return run


def _views(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load(copy=False) for tensor in tensors]


def _loads(tensors: Any) -> list[torch.Tensor]:
    return [tensor.load() for tensor in tensors]


def _plain_copies(
    stack: ExitStack, context: Context, samples: Sequence[tuple[torch.Tensor, ...]], num_slots: int
) -> Callable[[], int]:
    """Return a function that copies the bytes of each sample from one map into `num_slots` recycled arrays in turn."""
    content = [b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in each) for each in samples]
    ends = np.cumsum([len(each) for each in content]).tolist()
    extents = list(zip([0, *ends], ends, strict=False))
    path = context.tmpfs / f"plain-{num_slots}"
    path.write_bytes(b"".join(content))
    stack.callback(path.unlink)
    with open(path, "rb") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    slots = itertools.cycle([np.zeros(max(map(len, content)), np.uint8) for _ in range(num_slots)])

    def copy(index: int) -> Any:
        begin, end = extents[index]
        copied = next(slots)[: end - begin]
        copied[:] = source[begin:end]
        return copied

    for index in context.order[:32]:
        if copy(index).tobytes() != content[index]:
            raise AssertionError(f"the ceiling's bytes of sample {index} are not those of its tensors")
    return _each(context.order, copy)


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
        tensors, others = workload.split(nested.read_batch(indices))
        context.check(BATCHES, unstack(workload, tensors, by_sample(others)), indices)
        for name, batch in ((FLAT_BATCHES, flat.read_batch(indices)), (BLOCK_BATCHES, block.batch(indices))):
            samples = zip(indices, zip(*batch, strict=True), strict=True)
            context.check(name, (nest(index, tensors) for index, tensors in samples), indices)


def _memory(context: Context) -> tuple[float, float]:
    """Return the memory of a process and its 8 children in megabytes, before and after they hold the same samples."""
    is_quick = context.workload.count < WORKLOADS[_WORKLOAD].count
    nbytes = _QUICK_NBYTES if is_quick else _NBYTES
    command = [sys.executable, "-m", "benchmarks.children.holders", str(context.tmpfs), str(nbytes)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{MEMORY}: {done.stderr}")
    before, total = map(float, done.stdout.split())
    return before, total
