"""Scenarios `open`, from a folder to the first sample, and `iterate_lazy`, `iterate_touch`, `random_get`: one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from benchmarks.context import CEILING, Context
from benchmarks.peers.base import Peer, Reader
from benchmarks.timing import Rounds


def _count(samples: Iterable[Any]) -> int:
    last = deque(enumerate(samples, 1), maxlen=1)
    return last[0][0] if last else 0


def opened(context: Context) -> Rounds:
    """Measure opening, reading sample 0 and its small values, and closing: microseconds in total, not per sample."""

    def first(reader: Reader) -> object:
        if reader.get:
            return reader.get(0)
        reader.rewind()
        return reader.decode(next(iter(reader.samples())))

    def run(peer: Peer) -> int:
        reader = peer.open(context.store(peer), context.workload)
        first(reader)
        reader.close()
        return 1

    runs = {}
    for peer in context.peers:
        with context.attempt(peer.name):
            reader = peer.open(context.store(peer), context.workload)
            if reader.get or reader.samples:
                context.check(peer.name, [first(reader)], [0])
                runs[peer.name] = partial(run, peer)
            reader.close()
    return context.measure(runs, 1)


def iterate_lazy(context: Context) -> Rounds:
    """Measure every sample in order, its structure and small values decoded, no tensor used."""
    return _in_order(context, lambda _, samples: samples, {})


def iterate_touch(context: Context) -> Rounds:
    """Measure every sample in order, one byte used of each page of its tensors."""
    order = list(range(context.workload.timed))
    with context.ceiling(1) as ranges:  # each row drops a sample before it reads the next one
        return _in_order(context, partial(_touched, context), {CEILING: ranges.read(order)})


def random_get(context: Context) -> Rounds:
    """Measure samples by index in random order, one byte used of each page of their tensors."""
    order = context.order

    def run(reader: Reader) -> int:
        return _count(_touched(context, reader, map(reader.get, order)))

    with context.readers(lambda reader: reader.get) as readers, context.ceiling(1) as ranges:
        runs = {CEILING: ranges.read(order)}
        for name, reader in readers.items():
            with context.attempt(name):
                context.check(name, map(reader.get, order), order)
                runs[name] = partial(run, reader)
        return context.measure(runs)


def _touched(context: Context, reader: Reader, samples: Iterable[Any]) -> Iterator[Any]:
    return map(reader.touch or context.workload.touch, samples)


def _in_order(context: Context, use: Callable[[Reader, Iterable[Any]], Iterable[Any]], runs: dict[str, Any]) -> Rounds:
    timed = context.workload.timed

    def run(reader: Reader) -> int:
        return _count(use(reader, islice(reader.samples(), timed)))

    with context.readers(lambda reader: reader.samples) as readers:
        for name, reader in readers.items():
            with context.attempt(name):
                reader.rewind()
                context.check(name, map(reader.decode, reader.samples()), range(timed))
                runs[name] = partial(run, reader)
        return context.measure(runs, readers=readers)
