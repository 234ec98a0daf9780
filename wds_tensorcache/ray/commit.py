"""The driver's part of a write, before and after its tasks.

The driver prepares the folder, lists the finished shards in the manifest, and deletes unlisted shards.

While a write runs, its folder contains a marker file. In a local folder, the driver locks this file during the write.
Without locks, as in an object store, a write counts as running until its marker is deleted. The shards of a write are named
`part-WRITE-TASK-IDATTEMPT-SHARD.tar`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import xxhash

from wds_tensorcache.errors import InvalidKeyError, list_names
from wds_tensorcache.reading.find_shards import shard_names
from wds_tensorcache.shards.fingerprint import check_same
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import MANIFEST, FoundShard, Manifest, ShardEntry, change_manifest
from wds_tensorcache.shards.names import dali_index_path, sidecar_path
from wds_tensorcache.storage.folder import Folder, folder_of
from wds_tensorcache.storage.locks import Flock, is_held
from wds_tensorcache.storage.urls import shown
from wds_tensorcache.writing.resume import load_finished
from wds_tensorcache.writing.writer import check_limits

Shards = dict[str, tuple[ShardEntry, ShardIndex]]  # by name
Mode = Literal["create", "append", "overwrite", "build"]
# files of shards, and the lock on their pattern; the groups are the shard without `.tar`, the number and the id of the write
_PART = re.compile(r"\.?(part-([0-9]{3,})-[0-9]{6,}-([0-9a-f]{8})[0-9a-f]{6}-(?:[0-9]{6,}|%06d))\..*", re.DOTALL)
_MARKER = re.compile(r"\.ray-([0-9a-f]{8})\.writing")


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The properties that all tasks of one write share.

    Attributes:
        folder: Path or url of the folder of the shards, the same on all nodes.
        mode: Mode of the write. With `"build"`, finished shards of failed tasks stay in the folder, for the next build.
        number: Number of the write in the folder; later writes have higher numbers, so their samples follow those before.
        id: Eight random hex digits, part of the name of each file of this write.
        key: Name of the column with the keys.
        options: Options of `ShardWriter`.
    """

    folder: str
    mode: Mode
    number: int
    id: str
    key: str
    options: Mapping[str, Any]


def _marker(write: str) -> str:
    return f".ray-{write}.writing"


def check_running(job: WriteJob) -> None:
    # a late task must leave no shards
    if folder_of(job.folder).read(_marker(job.id)) is None:
        problem = "the write has ended, or this node sees another folder of this name"
        raise RuntimeError(f"{shown(job.folder)}: {problem}; share the folder between all nodes")


def _other_writes(folder: Folder, job: WriteJob) -> dict[str, bool]:
    """Return whether other writes with a marker may be running, by id."""
    ids = {match[1]: name for name in folder.names() if (match := _MARKER.fullmatch(name)) and match[1] != job.id}
    return {write: folder.is_remote or is_held(folder.locate(name)) for write, name in ids.items()}


def _load_shards(folder: Folder, names: Iterable[str]) -> Shards:
    paths = {folder.locate(name): name for name in names}
    finished = load_finished(map(FoundShard, paths))
    return {paths[path]: (finished.entry(path), index) for path, index in finished.indexes.items()}


def listed_shards(job: WriteJob) -> Shards:
    folder = folder_of(job.folder)
    return _load_shards(folder, Manifest.of(folder).entries)


def _list(manifest: Manifest, shards: Shards) -> None:
    for entry, index in shards.values():
        manifest.add(entry, index)


def delete_shards(folder: Folder, names: Iterable[str]) -> None:
    """Delete shards and their indexes, if they exist."""
    folder.delete([file for name in names for file in (name, dali_index_path(name), sidecar_path(name))])


@contextlib.contextmanager
def start_write(path: str, mode: Mode, key: str, options: Mapping[str, Any]) -> Iterator[WriteJob]:
    """Prepare a folder for a write, or raise FileExistsError. At the end, remove the write's unlisted shards."""
    # a task would raise it only when it makes its first shard
    check_limits(options["max_samples"], options.get("max_nbytes", 1))
    folder = folder_of(path)
    folder.make()
    numbers = [int(match[2]) for match in map(_PART.fullmatch, folder.names()) if match]
    job = WriteJob(path, mode, 1 + max(numbers, default=-1), secrets.token_hex(4), key, options)
    with contextlib.ExitStack() as locks:
        # Two writes may start at once. Each write makes its marker before it looks for markers, so at least one write finds the
        # marker of the other.
        if folder.is_remote:
            folder.new_file(_marker(job.id)).finish()
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            locks.callback(Flock(folder.locate(_marker(job.id)), flags, wait_s=60).close)
        try:
            # an empty manifest hides the shards from readers until the write is complete
            change_manifest(folder, lambda manifest: _prepare(folder, job, manifest))
        except BaseException:
            folder.delete([_marker(job.id)])
            raise
        try:
            yield job
        finally:
            _end(folder, job)


def _prepare(folder: Folder, job: WriteJob, manifest: Manifest) -> None:
    """Check that a write may begin, and update the manifest."""
    writes, names, mode = _other_writes(folder, job), folder.names(), job.mode
    shards = shard_names(names)
    in_progress = [write for write in writes if writes[write] or mode == "create"]
    if mode != "append" and in_progress:
        problem = f"another write is in progress, or was killed, see the file {_marker(in_progress[0])}"
        remedy = "wait until it ends, or delete that file, or write to another folder"
        raise FileExistsError(f"{shown(job.folder)}: {problem}; {remedy}")
    if mode == "create" and (manifest.entries or shards):
        remedy = "write to another folder, or pass append=True, or overwrite=True, which deletes the shards"
        raise FileExistsError(f"{shown(job.folder)} contains {len(shards)} shards; {remedy}")
    if mode == "append" and MANIFEST not in names:
        # shards of a killed write may repeat keys
        _list(manifest, _load_shards(folder, [name for name in shards if not _PART.fullmatch(name)]))
    if mode == "build":
        _adopt(folder, job, manifest)
    if mode in ("overwrite", "build"):
        folder.delete(map(_marker, writes))


def commit(job: WriteJob, names: Sequence[str]) -> None:
    """List the shards of a write in one change of the manifest. An overwrite deletes all other shards.

    Raises:
        InvalidKeyError: A key occurs more than once.
        FileExistsError: The mode is "create", and another write has finished in the folder since this write began.
    """
    folder = folder_of(job.folder)
    shards = _load_shards(folder, names)
    _check_unique(job, shards)

    def change(manifest: Manifest) -> None:
        listed = [name for name in manifest.entries if name not in shards]
        if job.mode == "overwrite":
            manifest.remove(*listed)
            listed = []
        elif job.mode == "create" and listed:
            problem = f"{shown(job.folder)}: another write has finished there meanwhile"
            raise FileExistsError(f"{problem}; write to another folder, or pass append=True")
        if listed and shards:
            _check_unique(job, {**_load_shards(folder, listed), **shards})
        _list(manifest, shards)

    change_manifest(folder, change)
    if job.mode == "overwrite":
        delete_shards(folder, set(shard_names(folder.names())) - set(names))


def key_digests(keys: Iterable[str]) -> np.ndarray[Any, Any]:
    """Hash each key to 16 bytes."""
    hashes = (xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass")) for key in keys)
    return np.frombuffer(b"".join(hashes), "S16")


def _check_unique(job: WriteJob, shards: Shards) -> None:
    digests = key_digests(shard_keys(shards))
    unique, counts = np.unique(digests, return_counts=True)
    if doubled := set(unique[counts > 1].tolist()):
        pairs = zip(shard_keys(shards), digests.tolist(), strict=True)
        names = dict.fromkeys(key for key, digest in pairs if digest in doubled)
        problem = f"{len(names)} keys occur more than once, for example {list_names(names)}"
        remedy = "make the keys unique, pass key= with the name of another column, or leave out existing samples"
        raise InvalidKeyError(f"{shown(job.folder)}: {problem}; {remedy}")


def shard_keys(shards: Shards) -> Iterator[str]:
    return chain.from_iterable(index.keys for _, index in shards.values())


def _end(folder: Folder, job: WriteJob) -> None:
    """Remove the marker, unlisted shards, and the manifest of an empty folder."""
    # first the marker, so that a late task finds that the write has ended
    folder.delete([_marker(job.id)])
    if job.mode == "build":
        change_manifest(folder, lambda manifest: _adopt(folder, job, manifest))
    listed = Manifest.of(folder).entries
    writes = _other_writes(folder, job)
    takes_all = job.mode in ("build", "overwrite")

    def is_rest(name: str) -> bool:
        match = _PART.fullmatch(name)
        if match is None or f"{match[1]}.tar" in listed:
            return False
        return match[3] == job.id or (takes_all and not writes.get(match[3]))

    folder.delete(list(filter(is_rest, folder.names())))
    if not listed and not shard_names(folder.names()) and not writes:
        folder.delete([MANIFEST])


def _adopt(folder: Folder, job: WriteJob, manifest: Manifest) -> None:
    """List finished shards of killed and failed builds; check all fingerprints."""
    unlisted = [name for name in shard_names(folder.names()) if name not in manifest.entries]
    shards = _load_shards(folder, (*manifest.entries, *unlisted))
    for name, (_, index) in shards.items():
        fingerprint = index.fingerprint if index.fingerprint is not None else manifest.fingerprint(name)
        check_same(f"{shown(job.folder)}/{name}", fingerprint, job.options["fingerprint"])
    # Two attempts of one task may both have finished shards, with the same keys in other combinations. Shards with more samples
    # come first. A shard with a key that is already listed is left out, so its other samples are computed again.
    keys = {key for name in manifest.entries for key in shards[name][1].keys}
    for name in sorted(unlisted, key=lambda name: (-len(shards[name][1].keys), name)):
        new = list(shards[name][1].keys)
        if keys.isdisjoint(new):
            _list(manifest, {name: shards[name]})
            keys.update(new)
