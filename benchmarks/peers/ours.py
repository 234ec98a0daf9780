"""This library: shards by `ShardWriter`, read by `tc.open`; a row for each way of reading that costs differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
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


def _collate(workload: Workload) -> Any:
    return "pad" if workload.ragged else "stack"


def as_batch(workload: Workload, read: Any) -> Batch:
    """Return a batch of `read_batch` or `Loader`."""
    tensors, small = workload.split(read)
    return Batch(len(tensors[workload.one[0]]), lambda: unstack(workload, tensors, by_sample(small)))


def open_cache(folder: Path, workload: Workload, *, threads: int | None = None, decoded: bool = False) -> Reader:
    """Open shards; `decoded` reads all small values of a batch, too."""
    opened = tc.open(folder, num_threads=threads)
    collate, path = _collate(workload), workload.one[1]

    @cache
    def narrow() -> Any:
        return opened.select([path])

    def batch(indices: Sequence[int]) -> Batch:
        read = opened.read_batch(indices, collate=collate)
        if decoded:
            for values in workload.split(read)[1].values():
                list(values)
        return as_batch(workload, read)

    def one(indices: Sequence[int]) -> torch.Tensor:
        read: torch.Tensor = tensor_at(narrow().read_batch(indices), path)
        return read

    return Reader(samples=lambda: iter(opened), get=opened.__getitem__, batch=batch, one=one, close=opened.close)


def _open_for_batches(folder: Path, workload: Workload, *, threads: int | None, decoded: bool = False) -> Reader:
    reader = open_cache(folder, workload, threads=threads, decoded=decoded)
    return replace(reader, samples=None, get=None, one=None)


def _open_views(folder: Path, workload: Workload) -> Reader:
    whole = open_cache(folder, workload)

    def viewed(sample: Any) -> Any:
        tensors, small = workload.split(sample)
        return workload.nest({name: tensor.load(copy=False) for name, tensor in tensors.items()}, small)

    def samples() -> Iterator[Any]:
        return map(viewed, whole.samples())

    def get(index: int) -> Any:
        return viewed(whole.get(index))

    return Reader(samples=samples, get=get, close=whole.close)


def open_loader(folder: Path, workload: Workload, batch_size: int | None = None) -> Reader:
    """Open shards, and a `Loader` on two threads, which shuffles; its epochs follow each other."""
    size, collate = batch_size or workload.batch_size, _collate(workload)
    opened = tc.open(folder)
    loader = tc.Loader(opened, size, shuffle=True, last_batch="drop", num_threads=2, collate=collate)

    def close() -> None:
        loader.close()
        opened.close()

    def batches(count: int) -> Iterator[Batch]:
        seen = 0
        while seen < count:
            for read in loader:
                batch = as_batch(workload, read)
                seen += batch.count
                yield batch
                if seen >= count:
                    break

    return Reader(batches=batches, close=close)


def peers() -> list[Peer]:
    """Return our rows."""
    write, write_synced = partial(_write, fsync=False), partial(_write, fsync=True)
    rows = [
        Peer(name=VIEWS, open=_open_views, store=NAME),
        Peer(name=ONE_THREAD, open=partial(_open_for_batches, threads=1), store=NAME),
        Peer(name=TWO_THREADS, open=partial(_open_for_batches, threads=2), store=NAME),
        Peer(name=LOADED, open=open_loader, store=NAME),
        Peer(name=READ, open=partial(_open_for_batches, threads=None, decoded=True), store=NAME),
        Peer(name=DECODED, open=partial(_open_for_batches, threads=1, decoded=True), store=NAME),
    ]
    return [Peer(name=NAME, open=open_cache, write=write, write_synced=write_synced), *rows]
