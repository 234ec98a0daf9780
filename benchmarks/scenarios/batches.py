"""Scenarios `batch_random`, `batch_cold`, `one_tensor`: shuffled batches of stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import page_cache
from benchmarks.ceiling import IN_FLIGHT
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.base import Batch, Peer, Reader
from benchmarks.timing import Rounds, Variant, interleaved

COLD_CEILINGS = (f"{CEILING}, {IN_FLIGHT} threads", f"{CEILING}, WILLNEED {IN_FLIGHT} ahead")


def batch_random(context: Context) -> Rounds:
    """Measure batches in random order, from the page cache. Streams shuffle as their users do."""
    count = context.workload.timed
    with context.readers(_has_batches) as readers, context.ceiling(context.workload.batch_size) as ranges:
        variants = {CEILING: Variant(ranges.read(context.order), count, context.warm(CEILING))}
        for name, reader in readers.items():
            with context.attempt(name):
                _check(context, name, reader)
                variants[name] = Variant(
                    partial(_read, context, reader), count, context.warm(name, partial(_rewind, reader))
                )
        return interleaved(variants, context.rounds)


def batch_cold(context: Context) -> Rounds:
    """Measure the same batches, with files dropped from the page cache and stores opened again before each pass."""
    count = context.workload.timed
    peers = _checked(context)
    opened: list[Reader] = []

    def prepare(store: Path, peer: Peer | None = None) -> None:
        while opened:  # mapped files cannot be dropped
            opened.pop().close()
        _drop(store)
        if peer:
            opened.append(peer.open(store, context.workload))
            _rewind(opened[0])

    with context.ceiling(context.workload.batch_size) as ranges:
        runs = (ranges.read_by_threads(context.order), ranges.read_ahead(context.order))
        before = partial(prepare, context.ours)
        variants = {name: Variant(run, count, before) for name, run in zip(COLD_CEILINGS, runs, strict=True)}
        for peer in peers:
            before = partial(prepare, context.store(peer), peer)
            variants[peer.name] = Variant(lambda: _read(context, opened[0]), count, before)
        try:
            return interleaved(variants, context.rounds)
        finally:
            while opened:
                opened.pop().close()


def one_tensor(context: Context) -> Rounds:
    """Measure batches of one tensor of each sample. Peers without this operation read whole samples."""
    short, path = context.workload.one
    expected = torch.stack([context.workload.split(sample)[0][short] for sample in context.samples])
    batches, count, size = context.batches, context.workload.timed, context.workload.batch_size

    def check(name: str, reader: Reader) -> None:
        found = map(reader.one, batches) if reader.one else reader.ones(count)
        indices = batches if reader.one else torch.arange(count).split(size)
        for batch, wanted in zip(found, indices, strict=True):
            if not torch.equal(batch, expected[torch.as_tensor(wanted)]):
                raise AssertionError(f"{name}: what was read is not what was written")

    def variant(reader: Reader) -> Callable[[], int]:
        if reader.one:
            return lambda: sum(len(reader.one(indices)) for indices in batches)
        return lambda: sum(map(len, reader.ones(count)))

    with context.readers(lambda reader: reader.one or reader.ones) as readers, context.ceiling(size, path) as ranges:
        variants = {CEILING: Variant(ranges.read(context.order), count, context.warm(CEILING))}
        for name, reader in readers.items():
            with context.attempt(name):
                check(name, reader)
                variants[name] = Variant(variant(reader), count, context.warm(name, partial(_rewind, reader)))
        return interleaved(variants, context.rounds)


def _has_batches(reader: Reader) -> object:
    return reader.batch or reader.batches


def _batches(context: Context, reader: Reader) -> Iterator[Batch]:
    return map(reader.batch, context.batches) if reader.batch else reader.batches(context.workload.timed)


def _rewind(reader: Reader) -> None:
    if reader.batch is None:  # a stream
        reader.rewind()


def _read(context: Context, reader: Reader) -> int:
    return sum(batch.count for batch in _batches(context, reader))


def _check(context: Context, name: str, reader: Reader) -> None:
    _rewind(reader)
    samples = (sample for batch in _batches(context, reader) for sample in batch.samples())
    if reader.batch:
        context.check(name, samples, context.order)
    else:
        context.check_shuffled(name, samples)


def _checked(context: Context) -> list[Peer]:
    """Return the peers that can read batches, after a check of each."""
    checked = set()
    with context.readers(_has_batches) as readers:
        for name, reader in readers.items():
            with context.attempt(name):
                _check(context, name, reader)
                checked.add(name)
    return [peer for peer in context.peers if peer.name in checked]


def _drop(store: Path) -> None:
    page_cache.drop(store)
    if (part := page_cache.resident(store)) > 0.05:
        raise Skipped(f"{part:.0%} of {store.name}'s files stayed in the page cache; --folder must be on a real disk")
