"""Rows of `batch_random` for small samples: the cost of safe copies from maps of shards that may be cut short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import wds_tensorcache as tc
from benchmarks.context import Context
from benchmarks.peers import DECODED, ONE_THREAD
from benchmarks.peers.base import by_sample, unstack
from benchmarks.timing import Variant

__all__ = ["BARE", "PREAD", "WITHOUT_LEASE", "safe_copies"]

WITHOUT_LEASE, BARE, PREAD = ", no lease", ", io=mmap", ", io=pread"


@contextmanager
def safe_copies(context: Context) -> Iterator[dict[str, Variant]]:
    """Yield the rows, each checked: with shards open for writing, which prevents leases, and with other `io` methods."""
    names = {ONE_THREAD: False, DECODED: True}
    with ExitStack() as stack:
        variants = {}
        for suffix, io in ((WITHOUT_LEASE, "auto"), (BARE, "mmap"), (PREAD, "pread")):
            cache = stack.enter_context(tc.open(context.ours, num_threads=1, io=io))
            for name, is_decoded in names.items():
                run = partial(_read, context, cache, suffix == WITHOUT_LEASE, is_decoded)
                run(name + suffix)
                variants[name + suffix] = Variant(run, context.workload.timed, context.warm(name))
        yield variants


def _read(context: Context, cache: tc.TensorCache, is_written: bool, is_decoded: bool, check: str = "") -> int:
    """Read the batches and return the number of samples; compare them with the originals if `check` names the row."""
    workload, count = context.workload, 0
    with ExitStack() as writers:
        for path in sorted(context.ours.glob("*.tar")) if is_written else ():
            writers.enter_context(open(path, "r+b"))
        for indices in context.batches:
            tensors, small = workload.split(cache.read_batch(indices))
            if is_decoded:
                for values in small.values():
                    list(values)
            if check:
                context.check(check, unstack(workload, tensors, by_sample(small)), indices)
            count += len(tensors[workload.one[0]])
    return count
