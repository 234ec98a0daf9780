"""Indexes of remote shards, from a folder, earlier runs, shards or sidecars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wds_tensorcache.errors import FormatError, RemoteError
from wds_tensorcache.shards.footer import build_footer, parse_index, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.kept_indexes import KeptIndexes
from wds_tensorcache.shards.load_index import check_sidecar, find_index, scan
from wds_tensorcache.shards.names import sidecar_path
from wds_tensorcache.storage.files import File
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole
from wds_tensorcache.storage.urls import keep_secrets, name_of

_TAIL_NBYTES = 1 << 16  # first read of a shard whose number of samples is unknown
_BASE_NBYTES = 1 << 14
_SAMPLE_NBYTES = 64  # an index takes 30 to 60 bytes a sample; a tail that is too short costs a second request
_MAX_TAIL_NBYTES = 1 << 22
_DENIED = (401, 403)  # of stores that do not distinguish missing objects from forbidden objects


@dataclass(frozen=True, slots=True)
class RemoteIndexes:
    """Places of remote shards' indexes, besides the shards and their sidecars."""

    folder: str | None = None  # path or url of a folder that contains `NAME.tar.index` for shards `NAME.tar`
    kept: KeptIndexes | None = None  # from earlier runs

    def load(self, file: File, num_samples: int | None = None, *, may_scan: bool = True) -> ShardIndex | None:
        """Load the index of a shard.

        None if only a scan of the whole shard would give it, and `may_scan` is False. Cost: in most cases one request, for the
        state of the shard or for its last bytes. `num_samples` determines the number of requested bytes.

        Raises:
            MissingShardError: The shard does not exist.
            FormatError: The shard is not a tar, is damaged, or has changed.
            RemoteError: A request failed.
        """
        assert isinstance(file, RemoteFile)
        index = self._in_folder(file)
        if index is not None:
            return index
        url, kept = file.url, self.kept
        if kept is not None and kept.has(url):
            if file.identity[1] is None:
                file.ask()
            index = kept.read(url, file.state)
            if index is not None:
                return index
        guess = _TAIL_NBYTES if num_samples is None else _BASE_NBYTES + num_samples * _SAMPLE_NBYTES
        tail = file.read_tail(min(guess, _MAX_TAIL_NBYTES))

        sidecar = keep_secrets(url, sidecar_path(url))
        index = find_index(file, lambda: _read_if_allowed(lambda: read_whole(sidecar)), tail=tail)
        if index is None and may_scan:
            index = scan(file)
        # a shard with hidden members is scanned again, and reported, in each run
        if kept is not None and index is not None and index.hidden is None:
            kept.write(url, file.state, build_footer(index, file.nbytes), digest=index.digest)
        return index

    def _in_folder(self, file: RemoteFile) -> ShardIndex | None:
        """Return the index in `folder` if it is valid for the shard."""
        name = name_of(file.url)
        if self.folder is None or "/" in name or "\\" in name:
            return None
        folder = folder_of(self.folder)
        content = _read_if_allowed(lambda: folder.read(sidecar_path(name)))
        if content is None:
            return None
        trailer = read_trailer(lambda begin, end: content[begin:end], len(content), file.identity[0])
        if trailer is None:
            return None
        try:
            index = parse_index(content, trailer.shard_nbytes)
            if index is None:
                return None
            file.expect(trailer.shard_nbytes)
            check_sidecar(index, file)
        except FormatError as exc:
            raise exc.at(file.path) from exc
        # a manifest lists the digest of the index in or next to the shard; another tool may have made this index
        return replace(index, digest=None)


def _read_if_allowed(read: Callable[[], bytes | None]) -> bytes | None:
    """Call `read`; return None if the index is missing or denied."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except RemoteError as exc:
        if exc.status in _DENIED:
            return None
        raise
