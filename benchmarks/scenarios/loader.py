"""Scenario `loader`: whole epochs in random order, in stacked batches, from the loaders that users train from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import xxhash

import wds_tensorcache as tc
from benchmarks.context import Context, Skipped
from benchmarks.peers import LOADED
from benchmarks.timing import Rounds, Variant, interleaved

READ_BATCH = "tensorcache, read_batch on 2 threads"
_PREFETCHED = 2  # batches that our loader reads ahead; the comparison keeps as many alive


def loader(context: Context) -> Rounds:
    """Measure a whole epoch. Workers stay between rounds, and small values are not used."""
    workload = context.workload
    if workload.ragged:
        raise Skipped("no loader stacks samples of different shapes without padding")
    size, count = workload.batch_size, workload.count // workload.batch_size * workload.batch_size
    with ExitStack() as stack:
        cache = stack.enter_context(tc.open(context.ours, num_threads=2))
        order = tc.EpochOrder(len(cache), seed=0)(0, range(count)).reshape(-1, size)

        def in_rows(batch: Any) -> dict[str, torch.Tensor]:
            return workload.split(batch)[0]

        def read_batches() -> Iterator[Any]:
            alive: deque[Any] = deque(maxlen=_PREFETCHED + 1)
            for numbers in order:
                alive.append(cache.read_batch(numbers))
                yield in_rows(alive[-1])

        ours = tc.Loader(cache, size, shuffle=True, last_batch="drop", num_threads=2, prefetch_batches=_PREFETCHED)
        stack.callback(ours.close)
        epochs: dict[str, Callable[[], Iterable[Any]]] = {READ_BATCH: read_batches, LOADED: lambda: map(in_rows, ours)}
        owners = {name: name for name in epochs}
        readers = stack.enter_context(context.readers(lambda reader: reader.loaders or reader.batch))
        for peer, reader in readers.items():
            with context.attempt(peer):
                for name, batches in reader.loaders().items():
                    epochs[f"{peer}, {name}"] = partial(iter, batches)
                    owners[f"{peer}, {name}"] = peer
        variants = {}
        for name, batches in epochs.items():
            with context.attempt(name):
                _check(context, name, batches())
                run = partial(_epoch, workload.one[0], batches)
                variants[name] = Variant(run, run(), partial(context.warm, owners[name]))
        return interleaved(variants, context.rounds)


def _epoch(name: str, batches: Callable[[], Iterable[Any]]) -> int:
    return sum(len(batch[name]) for batch in batches())


def _check(context: Context, name: str, batches: Iterable[Any]) -> None:
    """Raise AssertionError unless an epoch has nearly every sample, none twice, with the tensors as written."""
    workload = context.workload
    known = {_digests(workload.split(sample)[0], workload.dtypes) for sample in context.samples}
    seen: list[Any] = []
    for batch in batches:
        rows = len(batch[workload.one[0]])
        seen += [_digests({key: batch[key][row] for key in workload.dtypes}, workload.dtypes) for row in range(rows)]
    if not known.issuperset(seen) or len(set(seen)) != len(seen) or len(seen) < len(known) - workload.batch_size:
        raise AssertionError(f"{name}: what was read is not what was written")


def _digests(tensors: dict[str, torch.Tensor], dtypes: dict[str, torch.dtype]) -> tuple[int, ...]:
    return tuple(
        xxhash.xxh3_64_intdigest(torch.as_tensor(tensors[name]).to(dtype).contiguous().view(torch.uint8).numpy())
        for name, dtype in dtypes.items()
    )
