"""Scenarios `write` (into memory) and `write_fsync` (until it is on disk): samples in memory, into a new folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows, Timed
from benchmarks.peers.base import Peer

PLAIN = f"{CEILING}, same bytes"
_PIECE_NBYTES = 1 << 20


@contextmanager
def write(context: Context) -> Iterator[Rows]:
    """Measure writing into a file system in memory, without the disk."""
    with _written(context, context.tmpfs / "written", fsync=False) as rows:
        yield rows


@contextmanager
def write_fsync(context: Context) -> Iterator[Rows]:
    """Measure writing onto the disk, until all files and folders are synced, by the peer itself if it can."""
    with _written(context, context.scratch / "written", fsync=True) as rows:
        yield rows


@contextmanager
def _written(context: Context, folder: Path, *, fsync: bool) -> Iterator[Rows]:
    samples = context.samples[: context.workload.written]
    content = memoryview(b"")

    def anew() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not fsync:
            page_cache.back_memory(folder / "plain", content)

    def run(peer: Peer) -> int:
        if fsync and peer.write_synced:
            peer.write_synced(folder, context.workload, samples)
        else:
            peer.write(folder, context.workload, samples)
            if fsync:
                page_cache.sync(folder)
        return len(samples)

    def ceiling() -> int:
        with (folder / "plain").open("wb", buffering=0) as file:
            for begin in range(0, len(content), _PIECE_NBYTES):
                file.write(content[begin : begin + _PIECE_NBYTES])
            if fsync:
                os.fsync(file.fileno())
        return len(samples)

    rows: Rows = {PLAIN: Timed(ceiling, len(samples), anew)}
    for peer in context.peers:
        if peer.write is None:
            continue
        anew()
        with context.attempt(peer.name):
            run(peer)
            reader = peer.open(folder, context.workload)
            context.check(peer.name, reader.samples(), range(len(samples)))
            reader.close()
            rows[peer.name] = Timed(partial(run, peer), len(samples), anew)
        if peer.write_synced:
            content = memoryview(b"".join(path.read_bytes() for path in sorted(folder.glob("*.tar"))))
    anew()
    ceiling()
    if (folder / "plain").read_bytes() != content:
        raise AssertionError(f"{PLAIN}: what was written is not the bytes of our shards")
    try:
        yield rows
    finally:
        shutil.rmtree(folder)
