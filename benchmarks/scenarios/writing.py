"""Scenarios `write` (into memory) and `write_fsync` (until it is on disk): samples in memory, into a new folder."""

from __future__ import annotations

import os
import shutil
from functools import partial

from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows, Timed, require
from benchmarks.peers import Peer

PLAIN = f"{CEILING}, same bytes"
_PIECE_NBYTES = 1 << 20


def write(context: Context, *, fsync: bool = False) -> Rows:
    """Measure writing into a file system in memory, without the disk; or until all files and folders are on the disk.

    A peer that can sync its files itself does so.
    """
    folder = context.new_folder(None if fsync else "/dev/shm") / "written"
    samples = context.samples[: context.workload.written]
    content = memoryview(b"")

    def anew() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not fsync:
            page_cache.back_memory(folder / "plain", content)

    def run(peer: Peer) -> int:
        is_synced = fsync and peer.write_synced is not None
        (peer.write_synced if is_synced else peer.write)(folder, context.workload, samples)
        if fsync and not is_synced:
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
    require((folder / "plain").read_bytes() == content, PLAIN, "what was written is not the bytes of our shards")
    return rows
