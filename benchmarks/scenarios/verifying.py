"""Scenario `verify`: checking every byte of our shards, compared with plain reads of the same files."""

from __future__ import annotations

import os
from functools import partial

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows, require

READINTO = f"{CEILING}, readinto of the same files"
VERIFIED = "tensorcache, verify on 1 thread"
VERIFIED_BY_ALL = "tensorcache, verify on all cores"


def verify(context: Context) -> Rows:
    """Measure all shards with their indexes and manifest, from the page cache."""
    count, nbytes = context.workload.count, sum(path.stat().st_size for path in context.ours.iterdir())

    def plain() -> int:
        require(page_cache.load(context.ours) == nbytes, READINTO, f"not all of {nbytes} bytes were read")
        return count

    def checked(threads: int) -> int:
        report = tc.verify(context.ours, num_threads=threads)
        require(report.ok and not report.num_unverified and not report.num_unread, VERIFIED, str(report))
        return report.num_samples

    cores = len(os.sched_getaffinity(0))
    return context.rows(
        {READINTO: plain, VERIFIED: partial(checked, 1), VERIFIED_BY_ALL: partial(checked, cores)}, count
    )
