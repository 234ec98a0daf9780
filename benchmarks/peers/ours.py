"""This library: shards by `ShardWriter`, read by `tc.open`; a row for each way of reading that costs differently."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.peers import NAME, Batch, Batches, Peer, Reader, unstack
from benchmarks.workloads import Tensors, Workload, tensor_at

VIEWS = "tensorcache, views"
ONE_THREAD = "tensorcache, 1 thread"
TWO_THREADS = "tensorcache, 2 threads"
READ = "tensorcache, small values read"
DECODED = "tensorcache, 1 thread, small values read"
LOADED = "tensorcache, Loader on 2 threads"

_PREFETCHED = 2  # batches that the Loader reads ahead; epochs by read_batch keep as many alive


def write(
    folder: Path, workload: Workload, samples: Iterable[Any], max_samples: int = 50_000, fsync: bool = False
) -> None:
    """Write samples into shards, with their indices as keys."""
    with tc.ShardWriter(folder / "%06d.tar", fsync=fsync, max_samples=max_samples) as writer:
        for index, sample in enumerate(samples):
            writer.write(f"{index:08d}", sample)


def as_batch(workload: Workload, read: Any) -> Batch:
    """Return a batch of `read_batch` or `Loader`."""
    tensors, small = workload.split(read)
    return Batch(len(tensors[workload.one[0]]), lambda: unstack(workload, tensors, small))


def _open(
    folder: Path,
    workload: Workload,
    only: Sequence[str] = ("samples", "get", "batches", "ones"),
    threads: int | None = None,
    decoded: bool = False,
) -> Reader:
    """Open shards for some operations; `decoded` reads all small values of a batch, too."""
    opened = tc.open(folder, num_threads=threads)
    path, size, collate = workload.one[1], workload.batch_size, "pad" if workload.ragged else "stack"

    def batch(indices: Sequence[int]) -> Batch:
        read = opened.read_batch(indices, collate=collate)
        if decoded:
            for values in workload.split(read)[1].values():
                list(values)
        return as_batch(workload, read)

    def ones(batches: Batches) -> Iterator[torch.Tensor]:
        narrow = opened.select([path])
        return (tensor_at(narrow.read_batch(indices), path) for indices in batches)

    def epoch() -> Iterator[Tensors]:
        alive = deque[Any](maxlen=_PREFETCHED + 1)
        for indices in tc.EpochOrder(len(opened), seed=0)(0, range(len(opened) // size * size)).reshape(-1, size):
            alive.append(opened.read_batch(indices))
            yield workload.split(alive[-1])[0]

    operations = {
        "samples": lambda: iter(opened),
        "get": opened.__getitem__,
        "batches": lambda batches: map(batch, batches),
        "ones": ones,
        "loaders": lambda: {"": epoch},
    }
    return Reader(close=opened.close, **{name: operations[name] for name in only})


def viewed(workload: Workload, sample: Any) -> Any:
    """Return a sample with views of its lazy tensors."""
    tensors, small = workload.split(sample)
    return workload.nest({name: tensor.load(copy=False) for name, tensor in tensors.items()}, small)


def _open_views(folder: Path, workload: Workload) -> Reader:
    opened, view = tc.open(folder), partial(viewed, workload)
    return Reader(samples=lambda: map(view, opened), get=lambda index: view(opened[index]), close=opened.close)


def _open_loader(folder: Path, workload: Workload) -> Reader:
    """Open shards, and a `Loader` on two threads, which shuffles; its epochs follow each other."""
    opened = tc.open(folder)
    options = {"shuffle": True, "last_batch": "drop", "collate": "pad" if workload.ragged else "stack"}
    loader = tc.Loader(opened, workload.batch_size, num_threads=2, prefetch_batches=_PREFETCHED, **options)

    def batches(sizes: Batches) -> Iterator[Batch]:
        endless = chain.from_iterable(repeat(loader))
        return (as_batch(workload, read) for read in islice(endless, len(sizes)))

    def close() -> None:
        loader.close()
        opened.close()

    loaders = {"": lambda: (workload.split(read)[0] for read in loader)}
    return Reader(batches=batches, is_stream=True, loaders=lambda: loaders, close=close)


PEERS = [
    Peer(NAME, _open, write, partial(write, fsync=True)),
    Peer(VIEWS, _open_views, store=NAME),
    Peer(LOADED, _open_loader, store=NAME),
    Peer(ONE_THREAD, partial(_open, only=["batches"], threads=1), store=NAME),
    Peer(TWO_THREADS, partial(_open, only=["batches", "loaders"], threads=2), store=NAME),
    Peer(READ, partial(_open, only=["batches"], decoded=True), store=NAME),
    Peer(DECODED, partial(_open, only=["batches"], threads=1, decoded=True), store=NAME),
]
