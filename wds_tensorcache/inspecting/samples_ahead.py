"""Reads of the tensors of many samples, in order. Threads fetch tensors of remote shards ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.reading.batches_ahead import NUM_THREADS, remote_url
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.storage.threads import Threads, run_in_order

_Result = TypeVar("_Result")
READ_ERRORS = TensorCacheError, OSError
_Read = tuple[int, dict[str, Lazy], "TensorCacheError | OSError | None"]
_MAX_NBYTES = 1 << 22  # of a member; the tensors of a larger member are read when they are used


def map_samples(cache: Cache[Any], indices: Sequence[int], run: Callable[[int], _Result]) -> Iterator[_Result]:
    """Yield `run(index)` for each index, in order. For remote shards, threads run up to 16 samples ahead."""
    if remote_url([cache]) is None:
        yield from map(run, indices)
        return
    pool = Threads(NUM_THREADS, "tensorcache-look")
    try:
        yield from run_in_order(indices, run, pool, NUM_THREADS // 2)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_samples(cache: Cache[Any], indices: Sequence[int]) -> Iterator[_Read]:
    """Yield each sample's index, lazy tensors by name, and error or None.

    Memory: the tensors of a remote sample are copied into memory, unless a member has more than 4 MiB of them.
    """
    is_remote = remote_url([cache]) is not None

    def read(index: int) -> _Read:
        try:
            lazies = flatten(cache[index])
            return index, _fetch(lazies) if is_remote else lazies, None
        except READ_ERRORS as exc:
            return index, {}, exc

    return map_samples(cache, indices, read)


def _fetch(lazies: dict[str, Lazy]) -> dict[str, Lazy]:
    """Read lazy tensors into memory by one request for each member."""
    members: dict[int, list[Lazy]] = {}
    for lazy in lazies.values():
        members.setdefault(id(lazy._source), []).append(lazy)
    moved: dict[int, Lazy] = {}
    for tensors in members.values():
        begin = min(lazy._reference.begin for lazy in tensors)
        end = max(lazy._reference.end for lazy in tensors)
        if end - begin > _MAX_NBYTES:
            return lazies
        content: Any = tensors[0]._source.read(begin, end)
        source = MemorySource(memoryview(content))
        for lazy in tensors:
            r = lazy._reference
            moved[id(lazy)] = type(lazy)(replace(r, begin=r.begin - begin, end=r.end - begin), source)
    return {name: moved[id(lazy)] for name, lazy in lazies.items()}
