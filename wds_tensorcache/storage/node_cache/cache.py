"""A node's cache: reads of remote files through a local folder, or directly when the folder cannot be used."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from wds_tensorcache.arguments import user_level
from wds_tensorcache.storage.node_cache.block_file import BLOCK, BlockFile, Evicted
from wds_tensorcache.storage.node_cache.fill import Fetch, Range, Wanted, block_runs, fill
from wds_tensorcache.storage.node_cache.folder import CacheFolder, open_folder
from wds_tensorcache.storage.node_cache.identity import digest_of
from wds_tensorcache.storage.node_cache.unusable import Busy, CacheUnusable
from wds_tensorcache.storage.remote.fetch import fetch_many, largest_gap, run_all
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.threads import Threads, per_process

_SYNC_S = 60.0


def fetch_blocks(ranges: Sequence[Range]) -> None:
    """Read ranges, but no gaps between them: those blocks are present, or another process is fetching them."""
    fetch_many(ranges, merges=False)


def open_node_cache(
    path: str | os.PathLike[str], max_nbytes: int | None = None, fetch: Fetch = fetch_blocks, max_open: int = 128
) -> NodeCache:
    """Open the cache in a folder, which is created if needed.

    Args:
        path: Path of the folder.
        max_nbytes: The most bytes that the files of the folder may take on disk; None for all but a fiftieth of the disk.
        fetch: Reads ranges of remote files.
        max_open: The most local files that stay open while no read needs them.

    Raises:
        NotImplementedError, OSError, ValueError: As `open_folder`.
        ValueError: `max_nbytes` is not positive.
    """
    if max_nbytes is not None and max_nbytes < 1:
        raise ValueError(f"cache_nbytes={max_nbytes}, expected at least 1, or None")
    return NodeCache(open_folder(path, max_nbytes), fetch, max_open)


def read_remote(ranges: Iterable[tuple[Any, int, Sequence[Any]]]) -> None:
    """Read ranges of remote files as `fetch_many` does, those of cached files through their cache."""
    by_cache: dict[NodeCache | None, list[Range]] = {}
    for extent in ranges:
        by_cache.setdefault(extent[0].cache if isinstance(extent[0], CachedFile) else None, []).append(extent)
    for cache, ranges_of_cache in by_cache.items():
        if cache is None:
            fetch_many(ranges_of_cache)
        else:
            cache.read_many(ranges_of_cache)


class NodeCache:
    """The cache in a folder.

    Args:
        folder: Folder of the cache.
        fetch: Reads ranges of remote files.
        max_open: The most local files that stay open while no read needs them.

    Threads/fork/pickle: safe everywhere; a copy in another process uses the same folder.
    """

    def __init__(self, folder: CacheFolder, fetch: Fetch = fetch_blocks, max_open: int = 128) -> None:
        self.folder, self._fetch, self._max_open = folder, fetch, max_open
        self._open: dict[bytes, BlockFile] = {}  # by digest
        self._written: dict[bytes, int] = {}  # by digest, lengths of files with blocks that this process has not synced
        self._is_warned = False
        self._rests_until = 0.0
        self._syncs_at = inf  # time of the next `sync` by a thread
        self._syncer = per_process(lambda: Threads(1, "tensorcache-sync"))

    def __reduce__(self) -> Any:
        return NodeCache, (self.folder, self._fetch, self._max_open)

    def file(
        self, url: str, nbytes: int | None = None, tag: str | None = None, manifest: str | None = None
    ) -> CachedFile:
        """Return a remote file that is read through this cache; the arguments are those of `RemoteFile`."""
        return CachedFile(self, url, nbytes, tag, manifest)

    def read_many(self, ranges: Sequence[Range]) -> None:
        """Read ranges of `CachedFile`s; fetch absent blocks first.

        Raises:
            RemoteError, FormatError, FileNotFoundError: As `fetch_many`.
        """
        by_file: dict[CachedFile, list[Range]] = {}
        for extent in self._read_present(ranges):
            by_file.setdefault(_as_cached(extent[0]), []).append(extent)
        files = list(by_file)
        # Each file takes two descriptors until its blocks are there.
        count = max(1, self._max_open // 2)
        for at in range(0, len(files), count):
            self._read({file: by_file[file] for file in files[at : at + count]})

    def _read_present(self, ranges: Sequence[Range]) -> list[Range]:
        """Read the ranges whose blocks are known to be present; return all other ranges."""
        open_files: dict[RemoteFile, BlockFile | None] = {}
        present, rest, now_s = list[tuple[BlockFile, Range]](), list[Range](), time.monotonic()
        for extent in ranges:
            remote, begin, _ = extent
            if remote not in open_files:
                open_files[remote] = self.find_local(_as_cached(remote), now_s)
            file = open_files[remote]
            if file is not None and file.find_absent(0, begin // BLOCK, -(-_end(extent) // BLOCK)) < 0:
                present.append((file, extent))
            else:
                rest.append(extent)
        if present:
            good = _read_all(present)
            evicted = {file for file in {file for file, _ in present} if not file.is_current()}
            rest += [
                extent for (file, extent), is_good in zip(present, good, strict=True) if not is_good or file in evicted
            ]
        return rest

    def _read(self, by_file: Mapping[CachedFile, Sequence[Range]]) -> None:
        local = self._prepare(by_file)
        local_ranges = [(local[file], extent) for file, ranges in by_file.items() if file in local for extent in ranges]
        good = _read_local(local_ranges)
        # Bytes count only if the file was not evicted during the read. One system call for each file.
        evicted = {file for file in local.values() if not file.is_current()}
        failed = [
            extent for (file, extent), is_good in zip(local_ranges, good, strict=True) if not is_good or file in evicted
        ]
        failed += [extent for file, ranges in by_file.items() if file not in local for extent in ranges]
        if failed:
            # without the cache, gaps between near ranges may be fetched with them
            (fetch_many if self._fetch is fetch_blocks else self._fetch)(failed)

    def _prepare(self, by_file: Mapping[CachedFile, Sequence[Range]]) -> dict[CachedFile, BlockFile]:
        """Fetch the absent blocks of all ranges at once, as far as the folder can hold them; return the local files."""
        local: dict[CachedFile, BlockFile] = {}
        is_resting = time.monotonic() < self._rests_until
        self._learn_tags(by_file)
        wanted = []
        try:
            for file, ranges in by_file.items():
                begins, ends = [begin for _, begin, _ in ranges], list(map(_end, ranges))
                file.check_range(min(begins), max(ends))
                if file.state.tag is None:
                    self._warn("the server sends neither an ETag nor a date, so that changes would not be noticed")
                    continue
                try:
                    block_file = self._local(file, is_resting)
                    if block_file is None:
                        continue
                    block_file.note_use(time.monotonic())
                    absent = block_file.absent(block_runs(begins, ends))
                    if absent:
                        # a request would fetch small gaps, too: they are stored as well
                        absent = block_file.absent(block_runs(begins, ends, largest_gap(file.url) // BLOCK))
                except (OSError, Busy) as exc:
                    if isinstance(exc, OSError):
                        self._warn(exc)
                    continue  # other files may be better
                except CacheUnusable as exc:
                    is_resting = True
                    self._rest(exc)
                    continue
                local[file] = block_file
                if absent:
                    wanted.append(Wanted(file, block_file, absent))
                    self._written[file.digest] = file.nbytes
            if wanted and not is_resting:
                fill(self.folder, wanted, self._fetch)
                self._sync_soon()
        except Busy:  # no warning: the next read may find room
            return local
        except CacheUnusable as exc:
            self._rest(exc)
        return local

    def _rest(self, reason: CacheUnusable) -> None:
        self._rests_until = time.monotonic() + reason.rest_s
        self._warn(reason)

    def _local(self, file: CachedFile, is_resting: bool) -> BlockFile | None:
        """Return the local file, opened or created if needed; None if there is none and the cache is resting.

        Raises:
            NoRoom, Busy: There is no room for the file.
            OSError: The folder or its disk cannot be written.
        """
        block_file = self._open.get(file.digest)
        if block_file is None or not block_file.is_current():
            if is_resting:
                return None
            block_file = self.folder.open_file(file.digest, file.nbytes)
            while len(self._open) >= self._max_open:
                with suppress(StopIteration, RuntimeError):  # another thread changes it, too
                    self._open.pop(next(iter(self._open)), None)
            self._open[file.digest] = block_file
        return block_file

    def find_local(self, file: CachedFile, now_s: float) -> BlockFile | None:
        """Return the local file if it is open. It may have been evicted. `now_s` is the time of `time.monotonic`."""
        block_file = self._open.get(file.known_digest) if file.known_digest else None
        if block_file is not None:
            block_file.note_use(now_s)
        return block_file

    def _learn_tags(self, files: Iterable[CachedFile]) -> None:
        """Request the tags that are not known, since names of local files contain them. At most one request for each file."""
        unknown = [file.ask for file in files if file.state.tag is None and not file.is_asked]
        if unknown:
            run_all(unknown)

    def sync(self) -> None:
        """Wait until the blocks that this process fetched are on disk, so that a crash of the machine does not lose them."""
        with suppress(KeyError):  # no more
            while True:
                self.folder.sync_file(*self._written.popitem())

    def _sync_soon(self) -> None:
        """Call `sync` on a thread once a minute. By then, the system has written most of the blocks anyway."""
        now = time.monotonic()
        self._syncs_at = min(self._syncs_at, now + _SYNC_S)
        if now < self._syncs_at:
            return
        self._syncs_at = inf
        self._syncer().submit(self.sync)

    def close(self) -> None:
        """Close all local files that no read needs, after `sync`."""
        self.sync()
        self._open.clear()

    def _warn(self, reason: Exception | str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warnings.warn(f"reading without the cache in {self.folder.path}: {reason}", stacklevel=user_level())


class CachedFile(RemoteFile):
    """A remote file that is read through a node's cache.

    Args:
        cache: The cache.
        url, nbytes, tag, manifest: As for `RemoteFile`.

    Threads/fork/pickle: any thread and any forked process may read; a pickle holds the cache's folder, url, length and tag.
    """

    def __init__(
        self,
        cache: NodeCache,
        url: str,
        nbytes: int | None = None,
        tag: str | None = None,
        manifest: str | None = None,
    ) -> None:
        super().__init__(url, nbytes, tag, manifest)
        self.cache = cache
        self.known_digest: bytes | None = None  # `digest`, once it was computed

    @property
    def digest(self) -> bytes:
        """Digest of url, length and tag, which must be known."""
        if self.known_digest is None:
            self.known_digest = digest_of(self.url, self.state)
        return self.known_digest

    def _fetch(self, ranges: Sequence[Range]) -> None:
        self.cache.read_many(ranges)

    def __reduce__(self) -> Any:
        return CachedFile, (self.cache, self.url, *self.identity, self.manifest)


def _as_cached(file: RemoteFile) -> CachedFile:
    assert isinstance(file, CachedFile)
    return file


def _end(wanted: Range) -> int:
    _, begin, buffers = wanted
    return begin + (len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers)))


def _read_local(wanted: Sequence[tuple[BlockFile, Range]]) -> list[bool]:
    """Fill the buffers of ranges from local files; return which were read. All other ranges are absent, or cannot be read.

    The bytes are right if `BlockFile.is_current` returns True afterwards.
    """
    good = [_has_all(file, extent) for file, extent in wanted]
    present = [i for i, is_good in enumerate(good) if is_good]
    for i, is_good in zip(present, _read_all([wanted[i] for i in present]), strict=True):
        good[i] = is_good
    return good


def _has_all(file: BlockFile, wanted: Range) -> bool:
    begin, end = wanted[1], _end(wanted)
    try:
        return not file.absent([(begin // BLOCK, -(-end // BLOCK))] if end > begin else [], refresh=True)
    except OSError:
        return False


def _read_all(wanted: Sequence[tuple[BlockFile, Range]]) -> list[bool]:
    """Fill the buffers of ranges whose blocks are present; return which were read."""
    return [_read_one(file, begin, buffers) for file, (_, begin, buffers) in wanted]


def _read_one(file: BlockFile, begin: int, buffers: Sequence[Any]) -> bool:
    try:
        file.read_into(buffers, begin)
    except (OSError, Evicted):
        return False
    return True
