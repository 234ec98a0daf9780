"""Indexes of remote shards in a folder, for later runs and processes.

The name of a file contains a digest of the shard's url. A file contains one line of JSON (`_head`), then the index in the form
of a sidecar (FORMAT.md 4).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from wds_tensorcache.codec.header import parse_json
from wds_tensorcache.shards.footer import parse_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.storage.atomic import remove_temporary, write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.node_cache.identity import digest_of, unsigned
from wds_tensorcache.storage.remote.retry import ObjectInfo

_VARIABLE = "TENSORCACHE_INDEXES"  # a folder, or `off`
_MAX_NBYTES = 1 << 30
_MAX_LINE_NBYTES = 1 << 16
_SUFFIX = ".kept"
_MIN_FILES = 8  # an index longer than `_MAX_NBYTES` divided by this number is not kept
_PRUNES_EVERY = 64  # about one of this many writes adds up the files


def default_folder() -> str | None:
    """Return the folder of kept indexes. None if it is switched off, or if this user has no home.

    `$TENSORCACHE_INDEXES` names the folder, or is `off`. The default is a folder in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return None if chosen.lower() == "off" else os.path.abspath(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # the rules of XDG: a relative path is ignored
        return os.path.join(base if os.path.isabs(base) else Path.home() / ".cache", "wds_tensorcache", "indexes")
    except RuntimeError:  # a user without a home
        return None


class KeptIndexes:
    """A folder of remote shards' indexes, shared by any number of processes.

    If the folder cannot be used, indexes are requested again. The first write, and some later ones, remove the least recently
    used indexes if all together exceed 1 GiB.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._is_written = False

    def _path(self, url: str) -> str:
        digest = hashlib.sha256(unsigned(url).encode("utf-8", "surrogateescape")).hexdigest()
        return os.path.join(self.folder, digest[:40] + _SUFFIX)

    def has(self, url: str) -> bool:
        """Return whether the folder contains an index of a shard. The index may be stale."""
        return os.path.exists(self._path(url))

    def read(self, url: str, info: ObjectInfo) -> ShardIndex | None:
        """Return the kept index of a shard in the state `info`."""
        index = None
        # a file that is damaged, or not of this package: fetch the index again
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            file = ShardFile(self._path(url))
            if info.tag is None or file.nbytes > _MAX_NBYTES // _MIN_FILES:
                return None
            content = file.read(0, file.nbytes)
            line = content[:_MAX_LINE_NBYTES].partition(b"\n")[0]
            head = parse_json(line)
            if head == _head(url, info, head["digest"]):
                index = parse_index(content[len(line) + 1 :], info.nbytes)
                index = index and replace(index, digest=head["digest"])
                os.utime(file.path)  # marks the file as recently used
        return index

    def write(self, url: str, info: ObjectInfo, footer: bytes, *, digest: str | None = None) -> None:
        """Store `footer`, a shard's index in the form of a sidecar.

        Nothing is stored if it is too long, `info` has no tag, or the disk fails. `digest` is the digest of the shard's own
        index, whose bytes may differ from `footer`.
        """
        line = json.dumps(_head(url, info, digest)).encode("ascii") + b"\n"
        is_long = len(line) > _MAX_LINE_NBYTES or len(line) + len(footer) > _MAX_NBYTES // _MIN_FILES
        if info.tag is None or is_long:
            return
        with contextlib.suppress(OSError):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            write_atomically(self._path(url), [line, footer], fsync=False)
            if not self._is_written or random.random() * _PRUNES_EVERY < 1:
                self._is_written = True
                self._prune()

    def _prune(self) -> None:
        """Remove the least recently used files if all together exceed `_MAX_NBYTES`."""
        remove_temporary(self.folder, rf"[0-9a-f]{{40}}\{_SUFFIX}")
        kept = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process has removed it
                    if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        kept.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(nbytes for _, nbytes, _ in kept)
        for _, nbytes, path in sorted(kept) if total > _MAX_NBYTES else ():
            if total > _MAX_NBYTES - _MAX_NBYTES // 10:
                with contextlib.suppress(OSError):
                    os.remove(path)
                    total -= nbytes


def _head(url: str, info: ObjectInfo, digest: Any) -> dict[str, Any]:
    return {
        "url": str(url),
        "tag": info.tag,
        "nbytes": info.nbytes,
        "object": digest_of(url, info).hex(),
        "is_own": True,  # earlier versions also kept sidecars that were not compared with the shard
        "digest": digest,
        "check": xxh3_64_hexdigest(str(digest).encode()),  # nothing else covers the digest
    }
