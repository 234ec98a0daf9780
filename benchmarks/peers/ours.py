"""This library: shards by `ShardWriter`, read by `tc.open`; a row for each way of reading that costs differently."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.peers import DECODED, LOADED, NAME, ONE_THREAD, READ, TWO_THREADS, VIEWS
from benchmarks.peers.base import Batch, Batches, Peer, Reader, by_sample, unstack
from benchmarks.workloads import Tensors, Workload, tensor_at

_PREFETCHED = 2  # batches that the Loader reads ahead; epochs by read_batch keep as many alive


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


def _open(
    folder: Path,
    workload: Workload,
    *,
    threads: int | None = None,
    decoded: bool = False,
    only: Sequence[str] = ("samples", "get", "batches", "ones"),
) -> Reader:
    """Open shards for some operations; `decoded` reads all small values of a batch, too."""
    opened = tc.open(folder, num_threads=threads)
    collate, path, size = _collate(workload), workload.one[1], workload.batch_size

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
    options = {"shuffle": True, "last_batch": "drop", "collate": _collate(workload)}
    loader = tc.Loader(opened, workload.batch_size, num_threads=2, prefetch_batches=_PREFETCHED, **options)

    def batches(sizes: Batches) -> Iterator[Batch]:
        endless = chain.from_iterable(repeat(loader))
        return (as_batch(workload, read) for read in islice(endless, len(sizes)))

    def loaders() -> dict[str, Any]:
        return {"": lambda: (workload.split(read)[0] for read in loader)}

    def close() -> None:
        loader.close()
        opened.close()

    return Reader(batches=batches, is_stream=True, loaders=loaders, close=close)


def peers() -> list[Peer]:
    """Return our rows."""
    write, write_synced = partial(_write, fsync=False), partial(_write, fsync=True)
    options = {
        ONE_THREAD: {"threads": 1, "only": ["batches"]},
        TWO_THREADS: {"threads": 2, "only": ["batches", "loaders"]},
        READ: {"decoded": True, "only": ["batches"]},
        DECODED: {"threads": 1, "decoded": True, "only": ["batches"]},
    }
    return [
        Peer(name=NAME, open=_open, write=write, write_synced=write_synced),
        Peer(name=VIEWS, open=_open_views, store=NAME),
        Peer(name=LOADED, open=_open_loader, store=NAME),
        *(Peer(name=name, open=partial(_open, **chosen), store=NAME) for name, chosen in options.items()),
    ]
