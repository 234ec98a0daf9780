"""This library: shards by `ShardWriter`, read by `tc.open`; a row for each way of reading that costs differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.peers import DECODED, LOADED, NAME, ONE_THREAD, READ, TWO_THREADS, VIEWS
from benchmarks.peers.base import Batch, Peer, Reader, by_sample, unstack
from benchmarks.workloads import Workload, tensor_at


def _write(folder: Path, workload: Workload, samples: Sequence[Any], *, fsync: bool) -> None:
    with tc.ShardWriter(folder / "%06d.tar", fsync=fsync, max_samples=50_000) as writer:
        for index, sample in enumerate(samples):
            writer.write(f"{index:08d}", sample)


def _open(folder: Path, workload: Workload, *, threads: int | None = None, decoded: bool = False) -> Reader:
    cache = tc.open(folder, num_threads=threads)
    narrow = cache.select([workload.one[1]])
    one = workload.one[0]

    def batch(indices: Sequence[int]) -> Batch:
        if workload.ragged:
            read = cache.read_batch(indices, collate="pad")
        else:
            read = cache.read_batch(indices)
        tensors, small = workload.split(read)
        if decoded:
            for values in small.values():
                list(values)
        return Batch(len(tensors[one]), lambda: unstack(workload, tensors, by_sample(small)))

    def read_one(indices: Sequence[int]) -> torch.Tensor:
        read: torch.Tensor = tensor_at(narrow.read_batch(indices), workload.one[1])
        return read

    return Reader(samples=lambda: iter(cache), get=cache.__getitem__, batch=batch, one=read_one, close=cache.close)


def _open_for_batches(folder: Path, workload: Workload, *, threads: int | None, decoded: bool = False) -> Reader:
    return replace(_open(folder, workload, threads=threads, decoded=decoded), samples=None, get=None, one=None)


def _open_views(folder: Path, workload: Workload) -> Reader:
    whole = _open(folder, workload)

    def viewed(sample: Any) -> Any:
        tensors, small = workload.split(sample)
        return workload.nest({name: tensor.load(copy=False) for name, tensor in tensors.items()}, small)

    def samples() -> Iterator[Any]:
        return map(viewed, whole.samples())

    def get(index: int) -> Any:
        return viewed(whole.get(index))

    return Reader(samples=samples, get=get, close=whole.close)


def _open_loader(folder: Path, workload: Workload) -> Reader:
    cache = tc.open(folder)
    loader = tc.Loader(
        cache,
        workload.batch_size,
        shuffle=True,
        last_batch="drop",
        num_threads=2,
        collate="pad" if workload.ragged else "stack",
    )

    def close() -> None:
        loader.close()
        cache.close()

    def batches(count: int) -> Iterator[Batch]:
        seen = 0
        while seen < count:
            for read in loader:
                tensors, small = workload.split(read)
                seen += len(tensors[workload.one[0]])
                yield Batch(len(tensors[workload.one[0]]), partial(_samples, workload, tensors, small))
                if seen >= count:
                    break

    return Reader(batches=batches, close=close)


def _samples(workload: Workload, tensors: Any, small: Any) -> list[Any]:
    return unstack(workload, tensors, by_sample(small))


def peers() -> list[Peer]:
    """Return our rows."""
    write, write_synced = partial(_write, fsync=False), partial(_write, fsync=True)
    rows = [
        Peer(name=VIEWS, open=_open_views, store=NAME),
        Peer(name=ONE_THREAD, open=partial(_open_for_batches, threads=1), store=NAME),
        Peer(name=TWO_THREADS, open=partial(_open_for_batches, threads=2), store=NAME),
        Peer(name=LOADED, open=_open_loader, store=NAME),
        Peer(name=READ, open=partial(_open_for_batches, threads=None, decoded=True), store=NAME),
        Peer(name=DECODED, open=partial(_open_for_batches, threads=1, decoded=True), store=NAME),
    ]
    return [Peer(name=NAME, open=_open, write=write, write_synced=write_synced), *rows]
