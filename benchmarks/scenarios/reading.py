"""Scenarios with a row for each peer, or for each of its ways to read the same samples: one after another, and in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import page_cache
from benchmarks.ceiling import IN_FLIGHT, Ranges
from benchmarks.harness import CEILING, Context, Rows, Run, Skipped, Timed, require
from benchmarks.peers import Batches, Peer, Reader
from benchmarks.workloads import Tensors

COLD_CEILINGS = (f"{CEILING}, {IN_FLIGHT} threads", f"{CEILING}, WILLNEED {IN_FLIGHT} ahead")
MAP_CEILINGS = (f"{CEILING}, copies out of maps", f"{CEILING}, copies out of maps on 2 threads")


def opened(context: Context) -> Rows:
    """Measure opening, reading sample 0 and its small values, and closing: microseconds in total, not per sample."""

    def first(reader: Reader) -> Any:
        return reader.get(0) if reader.get else next(iter(reader.samples()))

    def run(peer: Peer) -> int:
        reader = peer.open(context.store(peer), context.workload)
        first(reader)
        reader.close()
        return 1

    names = set(_readers(context, "samples", lambda name, reader: context.check(name, [first(reader)], [0])))
    context.stack.close()
    return context.rows({peer.name: partial(run, peer) for peer in context.peers if peer.name in names}, 1)


def iterate_lazy(context: Context) -> Rows:
    """Measure every sample in order, its structure and small values decoded, no tensor used."""
    return _rows(context, "samples", lambda reader: _count(islice(reader.samples(), context.workload.timed)))


def iterate_touch(context: Context) -> Rows:
    """Measure every sample in order, one byte used of each page of its tensors."""
    order, touch = range(context.workload.timed), context.workload.touch
    # one slot, since each row drops a sample before it reads the next one
    ceilings = context.ceilings({CEILING: Ranges.read}, 1, order)
    return _rows(context, "samples", lambda reader: _count(map(touch, islice(reader.samples(), len(order)))), ceilings)


def random_get(context: Context) -> Rows:
    """Measure samples by index in random order, one byte used of each page of their tensors."""
    order, touch = context.order, context.workload.touch
    ceilings = context.ceilings({CEILING: Ranges.read}, 1)
    return _rows(context, "get", lambda reader: _count(map(touch, map(reader.get, order))), ceilings)


def batch_random(context: Context) -> Rows:
    """Measure batches in random order, from the page cache. Streams shuffle as their users do."""
    reads = {CEILING: Ranges.read, MAP_CEILINGS[0]: Ranges.copy, MAP_CEILINGS[1]: partial(Ranges.copy, threads=2)}
    ceilings, batches = context.ceilings(reads, context.workload.batch_size), context.batches
    return _rows(context, "batches", lambda reader: _count_batches(reader, batches), ceilings)


def batch_cold(context: Context) -> Rows:
    """Measure the same batches, with files dropped from the page cache and stores opened again before each pass."""
    count, batches = context.workload.timed, context.batches
    names = set(_readers(context, "batches"))
    reopened: list[Reader] = []
    context.stack.close()  # what readers have mapped could not be dropped

    def drop(store: Path) -> None:
        if (part := page_cache.drop(store)) > 0.05:
            raise Skipped(f"{part:.0%} of {store.name} stayed in the page cache; set TMPDIR to a folder on a real disk")

    def prepare(peer: Peer) -> None:
        drop(context.store(peer))
        reopened.append(peer.open(context.store(peer), context.workload))
        reopened[0].rewind()

    def measure(peer: Peer) -> dict[str, float]:
        try:
            return Timed(lambda: _count_batches(reopened[0], batches), count, partial(prepare, peer))()
        finally:
            while reopened:
                reopened.pop().close()  # mapped files cannot be dropped, by the next row or in another process

    reads = dict(zip(COLD_CEILINGS, (partial(Ranges.read, threads=IN_FLIGHT), Ranges.read_ahead), strict=True))
    ceilings = context.ceilings(reads, context.workload.batch_size)
    rows: Rows = {name: Timed(read, count, partial(drop, context.ours)) for name, read in ceilings.items()}
    return rows | {peer.name: partial(measure, peer) for peer in context.peers if peer.name in names}


def one_tensor(context: Context) -> Rows:
    """Measure batches of one tensor of each sample. Peers without this operation read whole samples."""
    batches, size, path = context.batches, context.workload.batch_size, context.workload.one[1]
    ceilings = context.ceilings({CEILING: Ranges.read}, size, tensor=path)
    return _rows(context, "ones", lambda reader: sum(map(len, reader.ones(batches))), ceilings)


def loader(context: Context) -> Rows:
    """Measure whole epochs in random order, in stacked batches, from what users train from.

    Workers stay between rounds, and small values are not used.
    """
    rows: Rows = {}

    def run(epoch: Callable[[], Iterable[Tensors]]) -> int:
        return sum(len(batch[context.workload.one[0]]) for batch in epoch())

    def check(name: str, reader: Reader) -> None:
        for ending, epoch in reader.loaders().items():
            _check_epoch(context, name + ending, epoch())
            rows[name + ending] = context.rows({name: partial(run, epoch)}, run(epoch))[name]

    _readers(context, "loaders", check)
    return rows


def _rows(context: Context, ability: str, run: Callable[[Reader], int], ceilings: Mapping[str, Run] = {}) -> Rows:
    """Return the rows of ceilings, and one for each peer whose reader has an operation."""
    readers = _readers(context, ability)
    runs = dict(ceilings) | {name: partial(run, reader) for name, reader in readers.items()}
    return context.rows(runs, rewinds={name: reader.rewind for name, reader in readers.items()})


def _readers(context: Context, ability: str, check: Callable[[str, Reader], None] | None = None) -> dict[str, Reader]:
    """Open each peer whose reader has an operation, and check what it reads."""
    readers: dict[str, Reader] = {}
    for peer in context.peers:
        with context.attempt(peer.name):
            reader = peer.open(context.store(peer), context.workload)
            context.stack.callback(reader.close)
            if getattr(reader, ability):
                reader.rewind()
                (check or partial(_check, context, ability))(peer.name, reader)
                readers[peer.name] = reader
    return readers


def _check(context: Context, ability: str, name: str, reader: Reader) -> None:
    """Raise AssertionError if an operation of a reader reads wrong values."""
    workload, order = context.workload, context.order
    if ability == "samples":
        context.check(name, reader.samples(), range(workload.timed))
    elif ability == "get":
        context.check(name, map(reader.get, order), order)
    elif ability == "ones":
        tensors = (tensor for batch in reader.ones(context.batches) for tensor in batch)
        for tensor, index in zip(tensors, range(workload.timed) if reader.is_stream else order, strict=True):
            require(torch.equal(tensor, workload.split(context.samples[index])[0][workload.one[0]]), name)
    else:
        samples = (sample for batch in reader.batches(context.batches) for sample in batch.samples())
        if not reader.is_stream:
            context.check(name, samples, order)
            return
        indices = context.check_any(name, samples)
        is_shuffled = len(indices) == len(set(indices)) == workload.timed and indices != sorted(indices)
        require(is_shuffled, name, "a sample was read twice, or nothing was shuffled")


def _check_epoch(context: Context, name: str, batches: Iterable[Tensors]) -> None:
    """Raise AssertionError unless an epoch has nearly every sample, none twice, with the tensors as written."""
    workload = context.workload
    written = {workload.digests(workload.split(sample)[0]) for sample in context.samples}
    read: list[Any] = []
    for batch in batches:
        rows = zip(*(batch[key] for key in workload.names), strict=True)
        read += [workload.digests(dict(zip(workload.names, row, strict=True))) for row in rows]
    is_whole = len(set(read)) == len(read) >= len(written) - workload.batch_size
    require(written.issuperset(read) and is_whole, name)


def _count(samples: Iterable[Any]) -> int:
    last = deque(enumerate(samples, 1), maxlen=1)
    return last[0][0] if last else 0


def _count_batches(reader: Reader, batches: Batches) -> int:
    # no name keeps a batch while the next one is read: the ceilings have memory for one batch, too
    return sum(map(attrgetter("count"), reader.batches(batches)))
