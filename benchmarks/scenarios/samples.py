"""Scenarios `open`, from a folder to the first sample, and `iterate_lazy`, `iterate_touch`, `random_get`: one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from benchmarks.context import CEILING, Context
from benchmarks.peers.base import Peer, Reader
from benchmarks.timing import Rounds, Variant, interleaved


def opened(context: Context) -> Rounds:
    """Measure opening, reading sample 0 and its small values, and closing: microseconds in total, not per sample."""

    def first(reader: Reader) -> object:
        if reader.get:
            return reader.get(0)
        reader.rewind()
        return reader.decode(next(iter(reader.samples())))

    def variant(peer: Peer) -> Callable[[], int]:
        def run() -> int:
            reader = peer.open(context.store(peer), context.workload)
            first(reader)
            reader.close()
            return 1

        return run

    variants: dict[str, Variant] = {}
    for peer in context.peers:
        with context.attempt(peer.name):
            reader = peer.open(context.store(peer), context.workload)
            if reader.get or reader.samples:
                context.check(peer.name, [first(reader)], [0])
                variants[peer.name] = Variant(variant(peer), 1, context.warm(peer.name))
            reader.close()
    return interleaved(variants, context.rounds)


def iterate_lazy(context: Context) -> Rounds:
    """Measure every sample in order, its structure and small values decoded, no tensor used."""
    timed = context.workload.timed

    def variant(reader: Reader) -> Callable[[], int]:
        def run() -> int:
            counted = deque(enumerate(islice(reader.samples(), timed), 1), maxlen=1)
            return counted[0][0]

        return run

    return _in_order(context, variant, [])


def iterate_touch(context: Context) -> Rounds:
    """Measure every sample in order, one byte used of each page of its tensors."""
    timed = context.workload.timed

    def variant(reader: Reader) -> Callable[[], int]:
        touch = reader.touch or context.workload.touch

        def run() -> int:
            seen = 0
            for sample in islice(reader.samples(), timed):
                touch(sample)
                seen += 1
            return seen

        return run

    return _in_order(context, variant, list(range(timed)))


def random_get(context: Context) -> Rounds:
    """Measure samples by index in random order, one byte used of each page of their tensors."""
    order = context.order

    def variant(get: Callable[[int], Any], touch: Callable[[Any], object]) -> Callable[[], int]:
        def run() -> int:
            seen = 0
            for index in order:
                touch(get(index))
                seen += 1
            return seen

        return run

    with context.readers(lambda reader: reader.get) as readers:
        variants = {}
        for name, reader in readers.items():
            with context.attempt(name):
                context.check(name, map(reader.get, order), order)
                run = variant(reader.get, reader.touch or context.workload.touch)
                variants[name] = Variant(run, len(order), context.warm(name))
        return _beside_ceiling(context, variants, order)


def _in_order(context: Context, variant: Callable[[Reader], Callable[[], int]], ceiling: list[int]) -> Rounds:
    timed = context.workload.timed
    with context.readers(lambda reader: reader.samples) as readers:
        variants = {}
        for name, reader in readers.items():
            with context.attempt(name):
                reader.rewind()
                context.check(name, map(reader.decode, reader.samples()), range(timed))
                variants[name] = Variant(variant(reader), timed, context.warm(name, reader.rewind))
        return _beside_ceiling(context, variants, ceiling)


def _beside_ceiling(context: Context, variants: dict[str, Variant], order: list[int]) -> Rounds:
    if not order:
        return interleaved(variants, context.rounds)
    with context.ceiling(1) as ranges:  # each row drops a sample before it reads the next one
        return interleaved(
            {CEILING: Variant(ranges.read(order), len(order), context.warm(CEILING)), **variants}, context.rounds
        )
