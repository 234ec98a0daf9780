"""The driver's part of a write: prepare the folder, list the finished shards in the manifest, remove what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from wds_tensorcache.errors import InvalidKeyError, list_names
from wds_tensorcache.ray.tasks.adopt import adopt
from wds_tensorcache.ray.tasks.folder import WriteFolder, index_names
from wds_tensorcache.ray.tasks.jobs import Part, WriteJob, part_of, writing_name
from wds_tensorcache.reading.find_shards import shard_names
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import MANIFEST, Manifest
from wds_tensorcache.storage.urls import shown

Mode = Literal["create", "append", "overwrite", "build"]


@contextlib.contextmanager
def writing(
    folder: WriteFolder, mode: Mode, key: str, allow: tuple[type, ...], options: Mapping[str, Any]
) -> Iterator[WriteJob]:
    """Prepare a folder for a write, and remove at the end what is not listed in the manifest.

    An empty manifest hides the shards of the write from readers until it is complete. With mode `"build"`, finished shards of
    this write, and those that killed builds have left, are listed in any case, also if the `with` block raises.

    Raises:
        FileExistsError: With mode `"create"`, the folder contains shards, or another write is in progress or was killed; with
            `"overwrite"` or `"build"`, another write is in progress.
        StaleCacheError: With mode `"build"`, a shard has another fingerprint.
        FormatError: A shard that the folder contains is damaged.
    """
    numbers = [file.number for file in map(part_of, folder.names()) if file is not None]
    job = WriteJob(folder.path, 1 + max(numbers, default=-1), key, allow, options, keeps_shards=mode == "build")
    # Two writes may start at once. Each makes its marker before it looks for markers, so one finds the other's.
    folder.begin(job.id)
    try:
        writes = folder.writes()
        del writes[job.id]
        folder.change(lambda manifest: _prepare(folder, mode, manifest, writes, options))
    except BaseException:
        folder.finish(job.id)
        raise
    try:
        yield job
    finally:
        _end(folder, job, mode)


def _prepare(
    folder: WriteFolder, mode: Mode, manifest: Manifest, writes: Mapping[str, bool], options: Mapping[str, Any]
) -> None:
    """Check that a write may begin, and list shards that the folder contains but does not list."""
    names = folder.names()
    shards = shard_names(names)
    running = [writing_name(write) for write, is_running in writes.items() if is_running or mode == "create"]
    if mode != "append" and running:
        what = f"{shown(folder.path)}: another write is in progress, or was killed, see the file {running[0]}"
        raise FileExistsError(f"{what}; wait until it ends, or delete that file, or write to another folder")
    if mode == "create" and (manifest.entries or shards):
        remedy = "write to another folder, or pass append=True, or overwrite=True, which deletes the shards"
        raise FileExistsError(f"{shown(folder.path)} contains {len(shards)} shards; {remedy}")
    if mode == "append" and MANIFEST not in names:
        # shards of a killed write may be doubles
        for name, index in folder.load(name for name in shards if part_of(name) is None).items():
            folder.add(manifest, name, index)
    if mode == "build":
        adopt(folder, manifest, options["fingerprint"])
    if mode in ("overwrite", "build"):
        folder.remove(map(writing_name, writes))


def commit(folder: WriteFolder, parts: Sequence[Part], mode: Mode) -> None:
    """List the shards of all parts in the manifest, in one change.

    Args:
        folder: Folder of the write.
        parts: Results of its tasks.
        mode: As for `writing`. With `"overwrite"`, all other shards of the folder are deleted after the change.

    Raises:
        InvalidKeyError: Two samples have one key. Nothing is listed.
        FileExistsError: With mode `"create"`, another write has finished in the folder meanwhile. Nothing is listed.
        FormatError: A shard is damaged.
        FileNotFoundError: A shard has vanished.
    """
    names = [name for part in parts for name in part.names]
    _check_unique(folder, parts, names)
    indexes = folder.load(names)

    def change(manifest: Manifest) -> None:
        old = list(manifest.entries)
        if mode == "create" and old and not set(names) <= set(old):
            what = f"{shown(folder.path)}: another write has finished there meanwhile"
            raise FileExistsError(f"{what}; write to another folder, or pass append=True")
        if mode == "overwrite":
            manifest.remove(*old)
        else:
            _check_new(folder, manifest, indexes)
        for name, index in indexes.items():
            folder.add(manifest, name, index)

    folder.change(change)
    if mode == "overwrite":
        folder.remove(index_names(set(shard_names(folder.names())) - set(names)))


def _end(folder: WriteFolder, job: WriteJob, mode: Mode) -> None:
    """Remove the marker and the shards that are not listed; if the folder then has no shards, also its empty manifest."""
    # first the marker, so that a late task finds that the write has ended
    folder.finish(job.id)
    if mode == "build":
        folder.change(lambda manifest: adopt(folder, manifest, job.options["fingerprint"]))
    listed = set(folder.read().entries)
    running = {write for write, is_running in folder.writes().items() if is_running}
    takes_all = mode in ("build", "overwrite")

    def is_rest(name: str) -> bool:
        file = part_of(name)
        if file is None or f"{file.stem}.tar" in listed:
            return False
        return file.write == job.id or (takes_all and file.write not in running)

    folder.remove(filter(is_rest, folder.names()))
    if not listed and not shard_names(folder.names()) and not folder.writes():
        folder.remove([MANIFEST])


def _check_unique(folder: WriteFolder, parts: Sequence[Part], names: Sequence[str]) -> None:
    """Raise InvalidKeyError if two samples of a write have one key. Cost: 16 bytes per sample, sorted once."""
    hashes = np.concatenate([np.zeros((0, 2), np.uint64), *(part.hashes() for part in parts)])
    if len(np.unique(hashes, axis=0)) < len(hashes):
        raise _doubled(folder, names)


def _doubled(folder: WriteFolder, names: Iterable[str]) -> InvalidKeyError:
    seen, doubles = set[str](), dict[str, None]()
    for index in folder.load(names).values():
        for key in index.keys:
            if key in seen:
                doubles[key] = None
            seen.add(key)
    what = f"{len(doubles)} keys occur more than once in the dataset, for example {list_names(doubles)}"
    remedy = "make the keys unique, or pass key= with the name of another column"
    return InvalidKeyError(f"{shown(folder.path)}: {what}; {remedy}")


def _check_new(folder: WriteFolder, manifest: Manifest, indexes: Mapping[str, ShardIndex]) -> None:
    """Raise InvalidKeyError if a listed shard contains one of the new keys."""
    new = {key for index in indexes.values() for key in index.keys}
    others = [url for url in manifest.entries if url not in indexes]
    for name, index in folder.load(others if new else ()).items():
        shared = [key for key in index.keys if key in new]
        if shared:
            what = (
                f"{shown(folder.path)}: {name} contains {len(shared)} of the new keys, for example {list_names(shared)}"
            )
            raise InvalidKeyError(f"{what}; leave these samples out, or write to another folder")
