"""Scenario `verify`: checking every byte of our shards, compared with plain reads of the same files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows

READINTO = f"{CEILING}, readinto of the same files"
VERIFIED = "tensorcache, verify on 1 thread"
VERIFIED_BY_ALL = "tensorcache, verify on all cores"


@contextmanager
def verify(context: Context) -> Iterator[Rows]:
    """Measure all shards with their indexes and manifest, from the page cache."""
    count, nbytes = context.workload.count, sum(path.stat().st_size for path in context.ours.iterdir())

    def plain() -> int:
        if (read := page_cache.load(context.ours)) != nbytes:
            raise AssertionError(f"{read} bytes of {nbytes} were read")
        return count

    def checked(threads: int) -> int:
        report = tc.verify(context.ours, num_threads=threads)
        if not report.ok or report.num_unverified or report.num_unread:
            raise AssertionError(str(report))
        return report.num_samples

    cores = len(os.sched_getaffinity(0))
    runs = {READINTO: plain, VERIFIED: partial(checked, 1), VERIFIED_BY_ALL: partial(checked, cores)}
    yield context.rows(runs, count)
