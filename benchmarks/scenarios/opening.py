"""Scenario `open`: from a folder to the first sample. Microseconds in total, not per sample."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.context import Context
from benchmarks.peers.base import Peer, Reader
from benchmarks.timing import Rounds, Variant, interleaved

__all__ = ["opened"]


def opened(context: Context) -> Rounds:
    """Measure opening, reading sample 0 and its small values, and closing."""

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
