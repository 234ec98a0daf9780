"""A node's cache: reads of remote files through a local folder.

One process of the node fetches each block, while other processes fetch other blocks or wait. If the folder cannot be used,
reads bypass it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from wds_tensorcache.arguments import user_level
from wds_tensorcache.storage.locks import RangeLocks
from wds_tensorcache.storage.node_cache.block_file import BLOCK, BlockFile, BlockRuns, Evicted
from wds_tensorcache.storage.node_cache.folder import Bypass, CacheFolder, lock_within, open_folder
from wds_tensorcache.storage.node_cache.identity import digest_of
from wds_tensorcache.storage.remote.fetch import Range, fetch_many, largest_gap, run_all
from wds_tensorcache.storage.remote.remote_file import RemoteFile

_MAX_REQUEST_NBYTES = 1 << 23
_MAX_WAVE_NBYTES = 1 << 26  # bytes in memory at a time


def open_node_cache(path: str | os.PathLike[str], max_nbytes: int | None = None, max_open: int = 128) -> NodeCache:
    """Open the cache in a folder. See `open_folder` for errors, and `NodeCache` for `max_open`."""
    return NodeCache(open_folder(path, max_nbytes), max_open)


def read_remote(ranges: Iterable[Range]) -> None:
    """Read ranges of remote files as `fetch_many` does, through their caches. Files without a cache are read directly."""
    by_cache: dict[NodeCache | None, list[Range]] = {}
    for extent in ranges:
        by_cache.setdefault(extent[0].cache, []).append(extent)
    for cache, extents in by_cache.items():
        (fetch_many if cache is None else cache.read_many)(extents)


class NodeCache:
    """A cache of remote files in a local folder.

    Args:
        max_open: Maximum number of local files that stay open while no read needs them.

    Threads/fork/pickle: safe everywhere; a copy in another process uses the same folder.
    """

    def __init__(self, folder: CacheFolder, max_open: int) -> None:
        self.folder, self._max_open = folder, max_open
        self._open: dict[bytes, BlockFile] = {}  # by digest
        self._is_warned = False
        self._rests_until = 0.0

    def __reduce__(self) -> Any:
        return NodeCache, (self.folder, self._max_open)

    def read_many(self, ranges: Sequence[Range]) -> None:
        """Read ranges of files as `fetch_many` does, through local files."""
        now_s = time.monotonic()
        by_file: dict[RemoteFile, list[Range]] = {}
        for extent in _read_present(ranges, {file: self.find_local(file, now_s) for file, *_ in ranges}):
            by_file.setdefault(extent[0], []).append(extent)
        files = list(by_file)
        # Each file takes two descriptors until its blocks are present.
        count = max(1, self._max_open // 2)
        for at in range(0, len(files), count):
            part = files[at : at + count]
            local = self._prepare({file: by_file[file] for file in part})
            absent = _read_present([extent for file in part for extent in by_file[file]], local)
            if absent:
                fetch_many(absent)

    def _prepare(self, by_file: Mapping[RemoteFile, Sequence[Range]]) -> dict[RemoteFile, BlockFile | None]:
        """Fetch absent blocks of the ranges; return the local files."""
        local: dict[RemoteFile, BlockFile | None] = {}
        wanted: list[_Wanted] = []
        for digest, kept in list(self._open.items()):
            if not kept.is_current():  # a mapped file takes space on disk until it is closed
                self._open.pop(digest, None)
        # names of local files contain the tags; at most one request for each file
        run_all([file.ask for file in by_file if file.state.tag is None and not file.is_asked])
        for file, ranges in by_file.items():
            begins, ends = [begin for _, begin, _ in ranges], list(map(_end, ranges))
            file.check_range(min(begins), max(ends))
            if file.state.tag is None:
                self._warn("the server sends neither an ETag nor a date, so that changes would not be noticed")
                continue
            try:
                local[file] = block_file = self._local(file)
                if block_file is None:
                    continue
                block_file.note_use(time.monotonic())
                absent = block_file.absent(_block_runs(begins, ends))
                if absent:
                    # a request would fetch small gaps, too: they are stored as well
                    gap = largest_gap(file.url) // BLOCK
                    wanted.append(_Wanted(file, block_file, block_file.absent(_block_runs(begins, ends, gap))))
            except OSError as exc:
                self._warn(exc)  # other files may still be usable
            except Bypass as exc:
                self._rest(exc)
        if wanted and not self._is_resting():
            try:
                _fill(self.folder, wanted)
            except Bypass as exc:
                self._rest(exc)
        return local

    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def _rest(self, exc: Bypass) -> None:
        self._rests_until = time.monotonic() + exc.rest_s
        if str(exc):
            self._warn(exc)

    def _warn(self, reason: Exception | str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warnings.warn(f"reading without the cache in {self.folder.path}: {reason}", stacklevel=user_level())

    def _local(self, file: RemoteFile) -> BlockFile | None:
        """Open or create the local file; return None while the cache rests."""
        file.digest = digest = file.digest or digest_of(file.url, file.state)
        block_file = self._open.get(digest)
        if block_file is None or not block_file.is_current():
            if self._is_resting():
                return None
            block_file = self.folder.open_file(digest, file.nbytes)
            while len(self._open) >= self._max_open:
                with suppress(StopIteration, RuntimeError):  # another thread changes the dict, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[digest] = block_file
        return block_file

    def find_local(self, file: RemoteFile, now_s: float) -> BlockFile | None:
        """Return the local file, perhaps evicted; None if it is not open. `now_s` is the current time by `time.monotonic`."""
        block_file = self._open.get(file.digest) if file.digest else None
        if block_file is not None:
            block_file.note_use(now_s)
        return block_file

    def close(self) -> None:
        """Close each local file as soon as no read needs it."""
        self._open.clear()


def _end(extent: Range) -> int:
    _, begin, buffers = extent
    return begin + sum(map(len, buffers))


def _read_present(ranges: Sequence[Range], local: Mapping[RemoteFile, BlockFile | None]) -> list[Range]:
    """Read the ranges whose blocks are present; return the other ranges."""
    rest, done = list[Range](), dict[BlockFile, list[Range]]()
    for extent in ranges:
        remote, begin, buffers = extent
        file, end = local.get(remote), _end(extent)
        if file is None or (begin < end and file.find_absent(0, begin // BLOCK, -(-end // BLOCK)) >= 0):
            rest.append(extent)
            continue
        try:
            file.read_into(buffers, begin)
        except (OSError, Evicted):
            rest.append(extent)
        else:
            done.setdefault(file, []).append(extent)
    for file, extents in done.items():
        # Bytes count only if the file was not evicted during the read. One system call for each file.
        if not file.is_current():
            rest += extents
    return rest


class _Wanted(NamedTuple):
    """Blocks of a remote file to read, and its local file."""

    remote: RemoteFile
    file: BlockFile
    runs: BlockRuns


def _block_runs(begins: Sequence[int], ends: Sequence[int], gap: int = 0) -> BlockRuns:
    """Return the blocks of byte ranges, merged across up to `gap` blocks."""
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


def _fill(folder: CacheFolder, wanted: Sequence[_Wanted]) -> None:
    """Fetch absent blocks; stop if their file is evicted."""
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
        # Deadlock: two processes that wait while they hold locks of blocks could wait for each other.
        _wait(busy)
        with _errors_of_disk():
            refreshed = [entry._replace(runs=entry.file.absent(entry.runs)) for entry in busy]
        wanted = [entry for entry in refreshed if entry.runs]


def _open_locks(entry: _Wanted) -> RangeLocks | None:
    """Open a file's block locks; return None if it was evicted."""
    try:
        # an open file of its own, so that the locks also exclude other threads
        locks = RangeLocks(entry.file.path)
    except OSError:
        return None
    if os.path.samestat(os.fstat(locks.fd), entry.file.status):
        return locks
    locks.close()
    return None


def _claim(todo: Sequence[_Wanted], held: list[RangeLocks]) -> tuple[list[_Wanted], list[_Wanted]]:
    """Lock runs of absent blocks; return claimed and busy runs. The locks are added to `held`."""
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
        if len(locked) < len(entry.runs):  # another process is fetching the other runs
            busy.append(entry._replace(runs=[run for run in entry.runs if run not in set(locked)]))
    return claimed, busy


def _wait(busy: Sequence[_Wanted]) -> None:
    """Wait until other processes have stored the blocks, or have failed."""
    for entry in busy:
        locks = _open_locks(entry)
        if locks is None:
            continue
        with closing(locks):
            for first, last in entry.runs:
                lock_within(locks, first, last - first, shared=True)
                locks.unlock(first, last - first)


def _fetch_claimed(claimed: Sequence[_Wanted]) -> None:
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


def _fetch_wave(wave: Sequence[tuple[_Wanted, tuple[int, int]]]) -> None:
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
