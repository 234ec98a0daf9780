"""Find the index of a remote shard: in a folder of indexes, on disk from an earlier run, in the shard, or in its sidecar."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace

from wds_tensorcache.errors import FormatError, RemoteError
from wds_tensorcache.shards.footer import build_footer, parse_index, read_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.index_paths import sidecar_path
from wds_tensorcache.shards.load_index import check_sidecar
from wds_tensorcache.shards.remote.kept_indexes import KeptIndexes
from wds_tensorcache.shards.tar import BLOCK
from wds_tensorcache.storage.files import Files, ShardFile
from wds_tensorcache.storage.node_cache.cache import read_remote
from wds_tensorcache.storage.readahead import ReadAhead, Readers
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.fetch import run
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.remote.urls import is_url, join_url, keep_secrets, name_of
from wds_tensorcache.storage.threads import Threads

__all__ = ["FindIndex", "scan_remote"]

_TAIL_NBYTES = 1 << 16  # of a shard whose number of samples is unknown
_BASE_NBYTES = 1 << 14
_SAMPLE_NBYTES = 64  # an index takes 30 to 60 bytes a sample; a tail that is too short costs a second request
_MAX_TAIL_NBYTES = 1 << 22
_MAX_INDEX_NBYTES = 1 << 28  # of a sidecar
_LONG_NBYTES = 1 << 26  # an index up to this length may be more than a quarter of its shard
_MARKER_NBYTES = 2048  # the end-of-archive marker and the zeros after it
_NUM_SCANNING = 4  # requests at a time for a shard without an index, of 4 MiB each
_DENIED = (401, 403)  # of stores that do not tell a missing object from one that may not be read


@dataclass(frozen=True, slots=True)
class FindIndex:
    """The places where the indexes of remote shards are looked for.

    Attributes:
        folder: Folder or url of a folder that contains `NAME.tar.index` for shards `NAME.tar`; None if there is none.
        kept: Indexes of earlier runs; None to fetch all indexes.
    """

    folder: str | None = None
    kept: KeptIndexes | None = None

    def load(
        self, url: str, files: Files, num_samples: int | None = None, *, may_scan: bool = True
    ) -> ShardIndex | None:
        """Return the index of a shard. An index from elsewhere may be stale, so some tar headers are compared with it.

        Args:
            files: Open files, which remember the length and the tag of the shard.
            num_samples: Number of samples that the manifest lists, from which the length of the index is guessed.
            may_scan: Read the whole shard if it has no index. False returns None for such a shard.

        Raises:
            MissingShardError: The shard does not exist.
            FormatError: The shard is not a tar, is damaged, or has changed.
            RemoteError: A request failed.

        Cost: one request, of the shard's end, in most cases. With a kept index, one request of its state. A shard without an
            index is read as a whole.
        """
        elsewhere = self._elsewhere(url, files)
        if elsewhere is not None:
            _check(elsewhere, files.remote(url))
            return elsewhere
        client, kept = client_for(url), self.kept
        try:
            if kept is not None and kept.has(url):
                file = files.fix(url, files.known_state(url) or run(lambda: client.stat(url)))
                known = kept.read(url, file.state)
                if known is not None:
                    return known
            guess = _TAIL_NBYTES if num_samples is None else _BASE_NBYTES + num_samples * _SAMPLE_NBYTES
            state, tail = run(lambda: client.read_tail(url, min(guess, _MAX_TAIL_NBYTES)))
        except FileNotFoundError as exc:
            raise files.missing(url) from exc
        file = files.fix(url, state)
        index = read_footer(_Tail(file, tail).read, state.nbytes, len(tail))
        if index is None:
            index = self._sidecar(keep_secrets(url, sidecar_path(url)), state.nbytes)
            if index is not None:
                _check(index, file)
        if index is None and not may_scan:
            return None
        if index is None:
            index = scan_remote(file)
        # a shard with hidden members is scanned again, and reported, in each run
        if kept is not None and index.hidden is None:
            kept.write(url, file.state, build_footer(index, state.nbytes), digest=index.digest)
        return index

    def _elsewhere(self, url: str, files: Files) -> ShardIndex | None:
        """Return the index in `folder`, if it declares the length of the shard."""
        name = name_of(url)
        if self.folder is None or "/" in name or "\\" in name:
            return None
        if is_url(self.folder):
            content = _read_if_there(join_url(self.folder, sidecar_path(name)))
        else:
            content = _read_local_if_there(os.path.join(self.folder, sidecar_path(name)))
        if content is None:
            return None
        nbytes = files.expected_nbytes(url)
        if nbytes is None:
            trailer = read_trailer(lambda begin, end: content[begin:end], len(content))
            if trailer is not None:
                nbytes = trailer.shard_nbytes
                files.expect_remote(url, nbytes)
        index = None if nbytes is None else parse_index(content, nbytes)
        # a manifest lists the digest of the index in or next to the shard; this one may have been made by another tool
        return None if index is None else replace(index, digest=None)

    def _sidecar(self, url: str, shard_nbytes: int) -> ShardIndex | None:
        content = _read_if_there(url)
        return None if content is None else parse_index(content, shard_nbytes)


class _Tail:
    """The end of a shard, for `read_footer`, which asks for the whole index and for the end-of-archive marker before it."""

    def __init__(self, file: RemoteFile, tail: bytes) -> None:
        self._file, self._tail = file, tail
        self._begin = file.nbytes - len(tail)
        place = read_trailer(self.read, file.nbytes, file.nbytes)
        if place is None:
            return
        begin, end = place.begin, place.end
        if file.nbytes - begin > max(_LONG_NBYTES, file.nbytes // 4):
            # Hazard: a hostile shard of many gigabytes could make a reader fetch and hold all of it.
            what = f"the index has {file.nbytes - begin:,} of the shard's {file.nbytes:,} bytes, expected at most a quarter"
            raise FormatError(what, offset=begin, kind="index")
        first = end if begin - end <= _MARKER_NBYTES else begin
        if first < self._begin:
            # the rest of the index and the marker, in one request
            self._tail = file.read(first, self._begin) + tail
            self._begin = first

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)` of the shard."""
        if begin >= self._begin:
            return self._tail[begin - self._begin : end - self._begin]
        return self._file.read(begin, end)


def _check(index: ShardIndex, file: RemoteFile) -> None:
    """Compare a sidecar with its shard by one round of requests."""

    def read_blocks(begins: list[int]) -> list[bytes]:
        blocks = [bytearray(BLOCK) for _ in begins]
        read_remote([(file, begin, [block]) for begin, block in zip(begins, blocks, strict=True)])
        return list(map(bytes, blocks))

    check_sidecar(index, file.read, file.nbytes, read_blocks)


def scan_remote(file: RemoteFile) -> ShardIndex:
    """Return the index of a shard without one, from its tar headers. Cost: the whole shard, several requests at a time."""
    with (
        Threads(_NUM_SCANNING, "tensorcache-scan") as pool,
        ReadAhead(file, Readers(pool, _NUM_SCANNING)) as ahead,
    ):
        return scan_shard(ahead.read, file.nbytes)


def _read_local_if_there(path: str) -> bytes | None:
    try:
        file = ShardFile(path)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise
    if file.nbytes > _MAX_INDEX_NBYTES:
        raise FormatError(f"has {file.nbytes:,} bytes, more than the index of any shard", kind="index").at(path)
    return file.read(0, file.nbytes)


def _read_if_there(url: str) -> bytes | None:
    try:
        return run(lambda: client_for(url).read_whole(url, _MAX_INDEX_NBYTES))[1]
    except FileNotFoundError:
        return None
    except RemoteError as exc:
        if exc.status in _DENIED:
            return None
        raise
