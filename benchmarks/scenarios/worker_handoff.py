"""Scenario `worker_handoff`: handing samples from two `DataLoader` workers to the main process, and using them there."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
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
TORCH_LOADER = "batches by tc.torch_loader"


class _Each(Dataset[Any]):
    """The results of `read` for each index, or each list of indices."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        return self._read(index)


@contextmanager
def worker_handoff(context: Context) -> Iterator[Rows]:
    """Measure batches in random order. The main process uses one byte of each page of every tensor; workers stay alive."""
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
        read = cache.read_batch(indices, collate="pad" if workload.ragged else "stack")
        tensors, small = workload.split(read)
        return workload.nest(tensors, {name: list(values) for name, values in small.items()})

    workers = {"num_workers": 2, "persistent_workers": True}
    in_samples = {
        LAZY: DataLoader(cache, batch_sampler=batches, collate_fn=list, **workers),
        TENSORS: DataLoader(
            _Each(lambda index: tc.realize(cache[index])), batch_sampler=batches, collate_fn=list, **workers
        ),
    }
    in_batches = {COLLATED: DataLoader(_Each(collated), sampler=batches, batch_size=None, **workers)}
    if not workload.ragged:
        in_batches[DEFAULT_COLLATED] = DataLoader(cache, batch_sampler=batches, collate_fn=default_collate, **workers)
    # the same samples in the same order, as a view of the cache
    in_batches[TORCH_LOADER] = tc.torch_loader(
        cache[context.order], workload.batch_size, collate="pad" if workload.ragged else "stack", **workers
    )
    runs = {}
    for name, source in in_samples.items():
        context.check(name, chain.from_iterable(source), context.order)
        runs[name] = partial(_samples_of, source, context)
    for name, source in in_batches.items():
        context.check(name, chain.from_iterable(_separate(item, context) for item in source), context.order)
        runs[name] = partial(_batches_of, source, context)
    return context.rows(runs)


def _separate(batch: Any, context: Context) -> list[Any]:
    """Return the samples of a batch, for the check. `default_collate` makes a tensor of numbers, and two of pairs."""

    def plain(values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            return values.tolist()
        return list(zip(*map(plain, values), strict=True)) if isinstance(values[0], torch.Tensor) else values

    tensors, small = context.workload.split(batch)
    return unstack(context.workload, tensors, by_sample({name: plain(values) for name, values in small.items()}))


def _samples_of(source: DataLoader[Any], context: Context) -> int:
    seen = 0
    for sample in chain.from_iterable(source):
        context.workload.touch(sample)
        seen += 1
    return seen


def _batches_of(source: DataLoader[Any], context: Context) -> int:
    seen = 0
    for batch in source:
        context.workload.touch(batch)
        seen += len(context.workload.split(batch)[0][context.workload.one[0]])
    return seen
