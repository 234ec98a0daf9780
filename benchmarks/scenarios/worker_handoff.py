"""Scenario `worker_handoff`: handing samples from two `DataLoader` workers to the main process, and using them there."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows
from benchmarks.peers.base import by_sample, unstack

LAZY = "lazy samples, read in the main process"
TENSORS = "samples of tensors"
COLLATED = "batches by read_batch"
DEFAULT_COLLATED = "batches by default_collate"


class _Each(Dataset[Any]):
    """The results of `read` for each index, or each list of indices."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        return self._read(index)


@contextmanager
def worker_handoff(context: Context) -> Iterator[Rows]:
    """Measure batches in random order. The main process uses one byte of each page of every tensor; workers stay alive."""
    context.refuse_ragged()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each tensor of a sample crosses as a file descriptor
    try:
        with tc.open(context.ours) as cache:
            yield _rows(context, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _rows(context: Context, cache: Any) -> Rows:
    workload, batches = context.workload, context.batches

    def collated(indices: Sequence[int]) -> Any:
        tensors, small = workload.split(cache.read_batch(indices))
        return workload.nest(tensors, {name: list(values) for name, values in small.items()})

    def use_samples(samples: list[Any]) -> int:
        for sample in samples:
            workload.touch(sample)
        return len(samples)

    def use_batch(batch: Any) -> int:
        workload.touch(batch)
        return len(workload.split(batch)[0][workload.one[0]])

    def separate(batch: Any) -> list[Any]:
        tensors, small = workload.split(batch)
        return unstack(workload, tensors, by_sample({name: _plain(values) for name, values in small.items()}))

    workers = {"num_workers": 2, "persistent_workers": True}
    realized = _Each(lambda index: tc.realize(cache[index]))
    in_samples = {
        LAZY: DataLoader(cache, batch_sampler=batches, collate_fn=list, **workers),
        TENSORS: DataLoader(realized, batch_sampler=batches, collate_fn=list, **workers),
    }
    in_batches = {
        COLLATED: DataLoader(_Each(collated), sampler=batches, batch_size=None, **workers),
        DEFAULT_COLLATED: DataLoader(cache, batch_sampler=batches, collate_fn=default_collate, **workers),
    }
    for name, source in in_samples.items():
        context.check(name, chain.from_iterable(source), context.order)
    for name, source in in_batches.items():
        context.check(name, chain.from_iterable(map(separate, source)), context.order)
    runs = {name: partial(_sum, use_samples, source) for name, source in in_samples.items()}
    return context.rows(runs | {name: partial(_sum, use_batch, source) for name, source in in_batches.items()})


def _sum(use: Callable[[Any], int], source: Iterable[Any]) -> int:
    return sum(map(use, source))


def _plain(values: Any) -> Any:
    """Return small values of a batch, of which `default_collate` makes a tensor of numbers, and two of pairs."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return list(zip(*map(_plain, values), strict=True)) if isinstance(values[0], torch.Tensor) else values
