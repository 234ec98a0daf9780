"""The tensors of many samples, in order. Those of remote shards are fetched ahead on threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import ByteSource, MemorySource
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.reading.batches_ahead import NUM_THREADS, remote_url
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.storage.threads import Threads, run_in_order

NUM_AHEAD = NUM_THREADS // 2  # `run_in_order` submits twice as many samples ahead
_MAX_NBYTES = 1 << 22  # of one sample; the tensors of a larger one are read when they are used
_Found = tuple[int, dict[str, Lazy], Exception | None]


@contextmanager
def pool_for(cache: Cache[Any]) -> Iterator[Threads | None]:
    """Open threads that hide the latency of a cache with remote shards; None for local shards, which have none."""
    if remote_url([cache]) is None:
        yield None
        return
    pool = Threads(NUM_THREADS, "tensorcache-look")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def tensors_ahead(cache: Cache[Any], numbers: Sequence[int]) -> Iterator[_Found]:
    """Yield the index of each sample, its lazy tensors by name, and the error if it cannot be read, in order.

    Memory: tensors of remote shards are in memory if all of their sample take at most 4 MiB, for at most 17 samples at once.
    """

    def find(number: int) -> _Found:
        try:
            lazies = flatten(cache[number])
            return number, lazies if pool is None else _fetched(lazies), None
        except (TensorCacheError, OSError) as exc:
            return number, {}, exc

    with pool_for(cache) as pool:
        yield from run_in_order(numbers, find, pool, NUM_AHEAD)


def _fetched(lazies: dict[str, Lazy]) -> dict[str, Lazy]:
    """Return lazy tensors in memory, from one request for all tensors of a member."""
    members: dict[int, list[Lazy]] = {}
    for lazy in lazies.values():
        members.setdefault(id(lazy._source), []).append(lazy)
    memory: dict[int, tuple[ByteSource, int]] = {}
    for key, some in members.items():
        begin, end = min(each._reference.begin for each in some), max(each._reference.end for each in some)
        if end - begin > _MAX_NBYTES:
            return lazies
        content: Any = some[0]._source.read(begin, end)
        memory[key] = MemorySource(memoryview(content)), begin
    found = {}
    for name, lazy in lazies.items():
        source, offset = memory[id(lazy._source)]
        reference = lazy._reference
        moved = replace(reference, begin=reference.begin - offset, end=reference.end - offset)
        found[name] = type(lazy)(moved, source)
    return found
