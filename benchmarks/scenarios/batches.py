"""Scenarios `batch_random`, `batch_cold`, `one_tensor`: shuffled batches of stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import page_cache
from benchmarks.ceiling import IN_FLIGHT
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.base import Batch, Peer, Reader
from benchmarks.timing import Rounds, Variant, interleaved

COLD_CEILINGS = (f"{CEILING}, {IN_FLIGHT} threads", f"{CEILING}, WILLNEED {IN_FLIGHT} ahead")


def batch_random(context: Context) -> Rounds:
    """Measure batches in random order, from the page cache. Streams shuffle as their users do."""
    with context.readers(_has_batches) as readers, context.ceiling(context.workload.batch_size) as ranges:
        runs = {CEILING: ranges.read(context.order)}
        runs |= {name: partial(_read, context, readers[name]) for name in _checked(context, readers)}
        return context.measure(runs, readers=readers)


def batch_cold(context: Context) -> Rounds:
    """Measure the same batches, with files dropped from the page cache and stores opened again before each pass."""
    count = context.workload.timed
    with context.readers(_has_batches) as readers:
        checked = _checked(context, readers)
    readers.clear()  # what they have mapped could not be dropped
    opened: list[Reader] = []

    def prepare(store: Path, peer: Peer | None = None) -> None:
        while opened:  # mapped files cannot be dropped
            opened.pop().close()
        page_cache.drop(store)
        if (part := page_cache.resident(store)) > 0.05:
            raise Skipped(
                f"{part:.0%} of {store.name}'s files stayed in the page cache; --folder must be on a real disk"
            )
        if peer:
            opened.append(peer.open(store, context.workload))
            opened[0].rewind()

    with context.ceiling(context.workload.batch_size) as ranges:
        plain = (ranges.read_by_threads(context.order), ranges.read_ahead(context.order))
        before = partial(prepare, context.ours)
        variants = {name: Variant(run, count, before) for name, run in zip(COLD_CEILINGS, plain, strict=True)}
        for peer in context.peers:
            if peer.name in checked:
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

    def read(reader: Reader) -> Iterator[torch.Tensor]:
        return map(reader.one, batches) if reader.one else reader.ones(count)

    with context.readers(lambda reader: reader.one or reader.ones) as readers, context.ceiling(size, path) as ranges:
        runs = {CEILING: ranges.read(context.order)}
        for name, reader in readers.items():
            with context.attempt(name):
                indices: Any = batches if reader.one else torch.arange(count).split(size)
                for batch, wanted in zip(read(reader), indices, strict=True):
                    if not torch.equal(batch, expected[torch.as_tensor(wanted)]):
                        raise AssertionError(f"{name}: what was read is not what was written")
                runs[name] = lambda reader=reader: sum(map(len, read(reader)))
        return context.measure(runs, readers=readers)


def _has_batches(reader: Reader) -> object:
    return reader.batch or reader.batches


def _batches(context: Context, reader: Reader) -> Iterator[Batch]:
    return map(reader.batch, context.batches) if reader.batch else reader.batches(context.workload.timed)


def _read(context: Context, reader: Reader) -> int:
    return sum(batch.count for batch in _batches(context, reader))


def _checked(context: Context, readers: dict[str, Reader]) -> list[str]:
    """Return the names of the readers whose batches have the values that were written."""
    checked = []
    for name, reader in readers.items():
        with context.attempt(name):
            reader.rewind()
            samples = (sample for batch in _batches(context, reader) for sample in batch.samples())
            if reader.batch:
                context.check(name, samples, context.order)
            else:
                context.check_shuffled(name, samples)
            checked.append(name)
    return checked
