"""Fetch absent blocks. One process of the node fetches each block, while other processes fetch other blocks or wait."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from wds_tensorcache.storage.node_cache.block_file import BLOCK, BlockFile, BlockRuns
from wds_tensorcache.storage.node_cache.folder import Bypass, CacheFolder, lock_within
from wds_tensorcache.storage.range_locks import RangeLocks
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile

_MAX_REQUEST_NBYTES = 1 << 23
_MAX_WAVE_NBYTES = 1 << 26  # bytes in memory at a time

# a remote file, the offset of the first byte, and 1-D buffers that are filled in order
Range = tuple[Any, int, Sequence[Any]]


class Wanted(NamedTuple):
    """Blocks of a remote file that will be read, and the local file for them."""

    remote: RemoteFile
    file: BlockFile
    runs: BlockRuns


def block_runs(begins: Sequence[int], ends: Sequence[int], gap: int = 0) -> BlockRuns:
    """Return the blocks of byte ranges `[begin, end)`, ascending, merged where at most `gap` blocks are between them."""
    runs: BlockRuns = []
    for begin, end in sorted(zip(begins, ends, strict=True)):
        first, last = begin // BLOCK, -(-end // BLOCK)
        if begin >= end:
            continue
        if runs and first <= runs[-1][1] + gap:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return runs


@contextmanager
def _errors_of_disk() -> Iterator[None]:
    """Raise Bypass for an OSError of the disk. Do not use this around requests, whose errors are OSErrors, too."""
    try:
        yield
    except OSError as exc:
        raise Bypass(str(exc)) from exc


def fill(folder: CacheFolder, wanted: Sequence[Wanted]) -> None:
    """Fetch absent blocks; stop if their file is evicted.

    Locks: a process waits only while it holds no lock of a block. Otherwise two processes could wait for each other.

    Raises:
        Bypass: Not all blocks could be fetched into the cache.
        FormatError, MissingShardError, RemoteError: As for `fetch_many`.
    """
    while wanted:
        held: list[RangeLocks] = []
        try:
            with _errors_of_disk():
                claimed, busy = _claim(wanted, held)
                if claimed:
                    folder.reserve([(entry.file, entry.runs) for entry in claimed])
            _fetch_claimed(claimed)
        finally:
            for locks in held:
                locks.close()
        _wait(busy)
        with _errors_of_disk():
            refreshed = [entry._replace(runs=entry.file.absent(entry.runs)) for entry in busy]
        wanted = [entry for entry in refreshed if entry.runs]


def _open_locks(entry: Wanted) -> RangeLocks | None:
    """Open a file for locks of its blocks; return None if it was evicted. The locks also exclude other threads."""
    try:
        locks = RangeLocks(entry.file.path)
    except OSError:
        return None
    if os.path.samestat(os.fstat(locks.fd), entry.file.status):
        return locks
    locks.close()
    return None


def _claim(todo: Sequence[Wanted], held: list[RangeLocks]) -> tuple[list[Wanted], list[Wanted]]:
    """Lock runs of absent blocks, until the caller closes the locks, which are appended to `held`.

    Returns:
        The blocks that this process must fetch, and the runs in which another process is fetching blocks.
    """
    claimed, busy = [], []
    for entry in todo:
        locks = _open_locks(entry)
        if locks is None:
            continue
        held.append(locks)
        locked = [(first, last) for first, last in entry.runs if locks.lock(first, last - first)]
        # another process may have fetched them, or evicted the file, before this process had the lock
        absent = entry.file.absent(locked) if entry.file.is_current() else []
        if absent:
            claimed.append(entry._replace(runs=absent))
        if len(locked) < len(entry.runs):
            busy.append(entry._replace(runs=[run for run in entry.runs if run not in set(locked)]))
    return claimed, busy


def _wait(busy: Sequence[Wanted]) -> None:
    """Wait until each of the blocks was stored, or the process that fetches the block has failed."""
    for entry in busy:
        locks = _open_locks(entry)
        if locks is None:
            continue
        with closing(locks):
            for first, last in entry.runs:
                lock_within(locks, first, last - first, shared=True)
                locks.unlock(first, last - first)


def _fetch_claimed(claimed: Sequence[Wanted]) -> None:
    """Fetch and publish blocks in waves, to bound the use of memory."""
    step = _MAX_REQUEST_NBYTES // BLOCK
    pieces = [
        (entry, (at, min(last, at + step)))
        for entry in claimed
        for first, last in entry.runs
        for at in range(first, last, step)
    ]
    ends = accumulate(BLOCK * (last - first) for _, (first, last) in pieces)
    for _, wave in groupby(zip(ends, pieces, strict=True), lambda piece: piece[0] // _MAX_WAVE_NBYTES):
        _fetch_wave([piece for _, piece in wave])


def _fetch_wave(wave: Sequence[tuple[Wanted, tuple[int, int]]]) -> None:
    extents = [entry.file.extent(run) for entry, run in wave]
    memory = memoryview(bytearray(sum(end - begin for begin, end in extents)))
    ranges: list[Range] = []
    at = 0
    for (entry, _), (begin, end) in zip(wave, extents, strict=True):
        ranges.append((entry.remote, begin, [memory[at : at + end - begin]]))
        at += end - begin
    # no gaps: the blocks between the ranges are present, or another process is fetching them
    fetch_many(ranges, merges=False)
    with _errors_of_disk():
        for (entry, run), (_, _, (content,)) in zip(wave, ranges, strict=True):
            entry.file.publish(run, content)
