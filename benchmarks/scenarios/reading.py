"""Scenarios with a row for each peer, or for each of its ways to read the same samples: one after another, and in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from benchmarks.ceiling import IN_FLIGHT, Ranges
from benchmarks.harness import CEILING, Context, Rows, Timed
from benchmarks.peers.base import Batch, Peer, Reader
from benchmarks.workloads import Tensors

COLD_CEILINGS = (f"{CEILING}, {IN_FLIGHT} threads", f"{CEILING}, WILLNEED {IN_FLIGHT} ahead")
_Check = Callable[[Context, str, Reader], None]  # raises AssertionError if the reader of this name reads wrong values
MAP_CEILINGS = (f"{CEILING}, copies out of maps", f"{CEILING}, copies out of maps on 2 threads")


@contextmanager
def opened(context: Context) -> Iterator[Rows]:
    """Measure opening, reading sample 0 and its small values, and closing: microseconds in total, not per sample."""

    def first(reader: Reader) -> object:
        return reader.get(0) if reader.get else next(iter(reader.samples()))

    def run(peer: Peer) -> int:
        reader = peer.open(context.store(peer), context.workload)
        first(reader)
        reader.close()
        return 1

    def check(context: Context, name: str, reader: Reader) -> None:
        context.check(name, [first(reader)], [0])

    with _readers(context, "samples", check) as readers:
        pass
    yield context.rows({peer.name: partial(run, peer) for peer in context.peers if peer.name in readers}, 1)


def iterate_lazy(context: Context) -> AbstractContextManager[Rows]:
    """Measure every sample in order, its structure and small values decoded, no tensor used."""

    def run(reader: Reader) -> int:
        return _count(islice(reader.samples(), context.workload.timed))

    return _rows(context, "samples", _check_in_order, run)


def iterate_touch(context: Context) -> AbstractContextManager[Rows]:
    """Measure every sample in order, one byte used of each page of its tensors."""
    order = range(context.workload.timed)

    def run(reader: Reader) -> int:
        return _count(map(context.workload.touch, islice(reader.samples(), len(order))))

    # one slot: each row drops a sample before it reads the next one
    return _rows(context, "samples", _check_in_order, run, {CEILING: Ranges.read}, 1, order)


def random_get(context: Context) -> AbstractContextManager[Rows]:
    """Measure samples by index in random order, one byte used of each page of their tensors."""
    order = context.order

    def check(context: Context, name: str, reader: Reader) -> None:
        context.check(name, map(reader.get, order), order)

    def run(reader: Reader) -> int:
        return _count(map(context.workload.touch, map(reader.get, order)))

    return _rows(context, "get", check, run, {CEILING: Ranges.read}, 1)


def batch_random(context: Context) -> AbstractContextManager[Rows]:
    """Measure batches in random order, from the page cache. Streams shuffle as their users do."""
    reads = {CEILING: Ranges.read, MAP_CEILINGS[0]: Ranges.copy, MAP_CEILINGS[1]: partial(Ranges.copy, threads=2)}
    batches = context.batches

    def run(reader: Reader) -> int:
        return _count_batches(reader.batches(batches))

    return _rows(context, "batches", _check_batches, run, reads, context.workload.batch_size)


@contextmanager
def batch_cold(context: Context) -> Iterator[Rows]:
    """Measure the same batches, with files dropped from the page cache and stores opened again before each pass."""
    count, batches = context.workload.timed, context.batches
    with _readers(context, "batches", _check_batches) as readers:
        pass
    reopened: list[Reader] = []

    def prepare(peer: Peer) -> None:
        context.drop(context.store(peer))
        reopened.append(peer.open(context.store(peer), context.workload))
        reopened[0].rewind()

    def run() -> int:
        return _count_batches(reopened[0].batches(batches))

    def measure(peer: Peer) -> dict[str, float]:
        try:
            return Timed(run, count, partial(prepare, peer))()
        finally:
            while reopened:
                reopened.pop().close()  # mapped files cannot be dropped, by the next row or in another process

    reads = dict(zip(COLD_CEILINGS, (Ranges.read_by_threads, Ranges.read_ahead), strict=True))
    with context.ceilings(reads, context.workload.batch_size) as ceilings:
        rows: Rows = {name: Timed(read, count, partial(context.drop, context.ours)) for name, read in ceilings.items()}
        peers = [peer for peer in context.peers if peer.name in readers]
        readers.clear()  # what they have mapped could not be dropped
        yield rows | {peer.name: partial(measure, peer) for peer in peers}


def one_tensor(context: Context) -> AbstractContextManager[Rows]:
    """Measure batches of one tensor of each sample. Peers without this operation read whole samples."""
    short, path = context.workload.one
    batches, count, size = context.batches, context.workload.timed, context.workload.batch_size

    def check(context: Context, name: str, reader: Reader) -> None:
        indices: Any = torch.arange(count).split(size) if reader.is_stream else batches
        for batch, chosen in zip(reader.ones(batches), indices, strict=True):
            for tensor, index in zip(batch, chosen, strict=True):
                if not torch.equal(tensor, context.workload.split(context.samples[int(index)])[0][short]):
                    raise AssertionError(f"{name}: what was read is not what was written")

    def run(reader: Reader) -> int:
        return sum(map(len, reader.ones(batches)))

    return _rows(context, "ones", check, run, {CEILING: Ranges.read}, size, tensor=path)


@contextmanager
def loader(context: Context) -> Iterator[Rows]:
    """Measure whole epochs in random order, in stacked batches, from what users train from.

    Workers stay between rounds, and small values are not used.
    """
    workload = context.workload
    context.refuse_ragged()

    def run(epoch: Callable[[], Iterable[Tensors]]) -> int:
        return sum(len(batch[workload.one[0]]) for batch in epoch())

    def check(context: Context, name: str, reader: Reader) -> None:
        for ending, epoch in reader.loaders().items():
            _check_epoch(context, name + ending, epoch())
            run_epoch = partial(run, epoch)
            rows[name + ending] = context.rows({name: run_epoch}, run_epoch())[name]

    rows: Rows = {}
    with _readers(context, "loaders", check):
        yield rows


@contextmanager
def _rows(
    context: Context,
    ability: str,
    check: _Check,
    run: Callable[[Reader], int],
    reads: dict[str, Callable[..., Callable[[], int]]] | None = None,
    num_slots: int = 1,
    order: Sequence[int] | None = None,
    tensor: str | None = None,
) -> Iterator[Rows]:
    """Yield a row for each peer whose reader has an operation, and those of `Context.ceilings`."""
    with (
        context.ceilings(reads or {}, num_slots, order, tensor) as runs,
        _readers(context, ability, check) as readers,
    ):
        runs |= {name: partial(run, reader) for name, reader in readers.items()}
        yield context.rows(runs, rewinds={name: reader.rewind for name, reader in readers.items()})


@contextmanager
def _readers(context: Context, ability: str, check: _Check) -> Iterator[dict[str, Reader]]:
    """Open each peer whose reader has an operation, and check what it reads."""
    readers: dict[str, Reader] = {}
    with ExitStack() as stack:
        for peer in context.peers:
            if peer.open is None:
                continue
            with context.attempt(peer.name):
                reader = peer.open(context.store(peer), context.workload)
                stack.callback(reader.close)
                if getattr(reader, ability):
                    reader.rewind()
                    check(context, peer.name, reader)
                    readers[peer.name] = reader
        yield readers


def _check_in_order(context: Context, name: str, reader: Reader) -> None:
    context.check(name, reader.samples(), range(context.workload.timed))


def _check_batches(context: Context, name: str, reader: Reader) -> None:
    samples = (sample for batch in reader.batches(context.batches) for sample in batch.samples())
    if reader.is_stream:
        context.check_shuffled(name, samples)
    else:
        context.check(name, samples, context.order)


def _check_epoch(context: Context, name: str, batches: Iterable[Tensors]) -> None:
    """Raise AssertionError unless an epoch has nearly every sample, none twice, with the tensors as written."""
    workload = context.workload
    written = {workload.digests(workload.split(sample)[0]) for sample in context.samples}
    read: list[Any] = []
    for batch in batches:
        read += [
            workload.digests({key: batch[key][row] for key in workload.dtypes})
            for row in range(len(batch[workload.one[0]]))
        ]
    if not written.issuperset(read) or len(set(read)) != len(read) or len(read) < len(written) - workload.batch_size:
        raise AssertionError(f"{name}: what was read is not what was written")


def _count(samples: Iterable[Any]) -> int:
    last = deque(enumerate(samples, 1), maxlen=1)
    return last[0][0] if last else 0


def _count_batches(batches: Iterable[Batch]) -> int:
    return sum(batch.count for batch in batches)
