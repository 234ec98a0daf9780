"""Scenarios `write` (into memory) and `write_fsync` (until it is on disk): samples in memory, into a new folder."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from benchmarks import page_cache
from benchmarks.ceiling import plain_write
from benchmarks.context import CEILING, Context
from benchmarks.peers.base import Peer
from benchmarks.timing import Rounds, Variant, interleaved

PLAIN = f"{CEILING}, same bytes"


def write(context: Context) -> Rounds:
    """Measure writing into a file system in memory, without the disk."""
    return _write(context, context.tmpfs / "written", fsync=False)


def write_fsync(context: Context) -> Rounds:
    """Measure writing onto the disk, until all files and folders are synced, by the peer itself if it can."""
    return _write(context, context.scratch / "written", fsync=True)


def _write(context: Context, folder: Path, *, fsync: bool) -> Rounds:
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

    variants: dict[str, Variant] = {}
    for peer in context.peers:
        if peer.write is None:
            continue
        anew()
        with context.attempt(peer.name):
            run(peer)
            reader = peer.open(folder, context.workload)
            context.check(peer.name, reader.samples(), range(len(samples)))
            reader.close()
            variants[peer.name] = Variant(partial(run, peer), len(samples), anew)
        if peer.write_synced:
            content = memoryview(b"".join(path.read_bytes() for path in sorted(folder.glob("*.tar"))))
    anew()

    def ceiling() -> int:
        plain_write(folder / "plain", content, fsync=fsync)
        return len(samples)

    ceiling()
    if (folder / "plain").read_bytes() != content:
        raise AssertionError(f"{PLAIN}: what was written is not the bytes of our shards")
    try:
        return interleaved({PLAIN: Variant(ceiling, len(samples), anew), **variants}, context.rounds)
    finally:
        shutil.rmtree(folder)
