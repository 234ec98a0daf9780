"""Scenario `worker_handoff`: handing samples from two `DataLoader` workers to the main process, and using them there."""

from __future__ import annotations

import resource
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows
from benchmarks.peers import unstack
from benchmarks.workloads import Generated

LAZY = "lazy samples, read in the main process"
TENSORS = "samples of tensors"
COLLATED = "batches by read_batch"
DEFAULT_COLLATED = "batches by default_collate"


def worker_handoff(context: Context) -> Rows:
    """Measure batches in random order. The main process uses one byte of each page of every tensor; workers stay alive."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each tensor of a sample crosses as a file descriptor
    context.stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    cache = context.enter(tc.open(context.ours))
    workload, batches = context.workload, context.batches

    def collated(index: int) -> Any:
        tensors, small = workload.split(cache.read_batch(batches[index]))
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
        return unstack(workload, tensors, {name: _plain(values) for name, values in small.items()})

    workers = {"num_workers": 2, "persistent_workers": True}
    realized = Generated(lambda index: tc.realize(cache[index]), len(cache))
    in_batches = Generated(collated, len(batches))
    loaders = {
        LAZY: DataLoader(cache, batch_sampler=batches, collate_fn=list, **workers),
        TENSORS: DataLoader(realized, batch_sampler=batches, collate_fn=list, **workers),
        COLLATED: DataLoader(in_batches, batch_size=None, **workers),
        DEFAULT_COLLATED: DataLoader(cache, batch_sampler=batches, collate_fn=default_collate, **workers),
    }
    runs: dict[str, Any] = {}
    for name, source in loaders.items():
        use, samples_of = (use_samples, iter) if name in (LAZY, TENSORS) else (use_batch, separate)
        context.check(name, chain.from_iterable(map(samples_of, source)), context.order)
        runs[name] = lambda use=use, source=source: sum(map(use, source))
    return context.rows(runs)


def _plain(values: Any) -> Any:
    """Return small values of a batch, of which `default_collate` makes a tensor of numbers, and two of pairs."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return list(zip(*map(_plain, values), strict=True)) if isinstance(values[0], torch.Tensor) else values
