"""Scenario `verify`: checking every byte of our shards, compared with plain reads of the same files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import wds_tensorcache as tc
from benchmarks.harness import CEILING, Context, Rows

READINTO = f"{CEILING}, readinto of the same files"
VERIFIED = "tensorcache, verify on 1 thread"
VERIFIED_BY_ALL = "tensorcache, verify on all cores"
_PIECE_NBYTES = 1 << 20


@contextmanager
def verify(context: Context) -> Iterator[Rows]:
    """Measure all shards with their indexes and manifest, from the page cache."""
    paths, count = sorted(context.ours.glob("*.tar")), context.workload.count
    nbytes = sum(path.stat().st_size for path in paths)

    def plain() -> int:
        buffer, seen = bytearray(_PIECE_NBYTES), 0
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while read := file.readinto(buffer):
                    seen += read
        if seen != nbytes:
            raise AssertionError(f"{seen} bytes of {nbytes} were read")
        return count

    def checked(threads: int) -> int:
        report = tc.verify(context.ours, num_threads=threads)
        if not report.ok or report.num_unverified or report.num_unread:
            raise AssertionError(str(report))
        return report.num_samples

    cores = len(os.sched_getaffinity(0))
    runs = {READINTO: plain, VERIFIED: partial(checked, 1), VERIFIED_BY_ALL: partial(checked, cores)}
    yield context.rows(runs, count)
