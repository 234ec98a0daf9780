"""Index a shard at a url, which another writer made; the object itself is not changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.dali_index import build_dali_index, list_members
from wds_tensorcache.shards.footer import build_footer, read_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import check_replaceable, dali_index_path, sidecar_path
from wds_tensorcache.shards.remote.find_index import scan_remote
from wds_tensorcache.shards.tar import hidden_members
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.remote.fetch import run
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.remote.urls import is_url, is_web, join_url, name_of, shown

__all__ = ["index_url"]


def index_url(url: str, *, dali_index: bool, index_folder: str | None) -> ShardIndex:
    """Scan a shard, and write its indexes next to it, or into `index_folder`; see `write_index`.

    The scan reads the whole shard, by requests that all ask for the same version of the object.

    Raises:
        FileNotFoundError: The shard does not exist.
        FileExistsError: A local file that is not an index has the name of one.
        FormatError: The object is not a tar, is damaged, or was changed during the scan.
        RemoteError: A request failed.
        ValueError: The indexes cannot be written to a web server; or the shard's name cannot be that of a file.
    """
    name = name_of(url)
    if index_folder is None:
        target = url
    elif name in ("", ".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"{shown(url)}: {name!r} is not the name of a shard")
    else:
        target = join_url(index_folder, name) if is_url(index_folder) else os.path.join(index_folder, name)
    if is_url(target) and is_web(target):
        what = "an index cannot be written to a web server"
        raise ValueError(f"{shown(target)}: {what}; pass index_folder=, a local folder or one in an object store")
    objects = ObjectWriter(target) if is_url(target) else None
    file, _ = RemoteFile.of_tail(url, 0)
    try:
        index = scan_remote(file)
        if index.hidden is not None:
            raise hidden_members(index.end, index.hidden)
    except TensorCacheError as exc:
        raise exc.at(shown(url)) from exc
    before = _stored_index(file, objects, sidecar_path(target))
    if before is not None:
        index = replace(index, fingerprint=before.fingerprint, origins=before.origins_of(index.keys))
    written = {sidecar_path(target): build_footer(index, file.nbytes)}
    if dali_index:
        written[dali_index_path(target)] = build_dali_index(list_members(index))
    if objects is None:
        os.makedirs(os.path.dirname(target) or os.curdir, exist_ok=True)
        check_replaceable(*written)
        for path, content in written.items():
            write_atomically(path, [content])
    else:
        for path, content in written.items():
            run(partial(objects.put, path, content))
    return index


def _stored_index(file: RemoteFile, objects: ObjectWriter | None, sidecar: str) -> ShardIndex | None:
    """Return the existing index of a shard: the one at its end if it has a fingerprint, or else the one in its sidecar."""

    def parse(read: Callable[[int, int], bytes], nbytes: int) -> ShardIndex | None:
        with contextlib.suppress(FormatError):
            return read_index(read, nbytes, file.nbytes)
        return None

    own = parse(file.read, file.nbytes)
    if own is not None and own.fingerprint is not None:
        return own
    content = None
    if objects is not None:
        read = run(lambda: objects.read(sidecar))
        content = None if read is None else read[0]
    elif os.path.isfile(sidecar):
        kept = ShardFile(sidecar)
        content = kept.read(0, kept.nbytes)
    found = None if content is None else parse(lambda begin, end: content[begin:end], len(content))
    return found or own
