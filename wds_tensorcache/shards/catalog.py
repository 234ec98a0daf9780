"""What lies beside the shards of a folder: the manifest, indexes in files of their own, and DALI's `.idx`."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.indexing import scan_shard
from wds_tensorcache.shards.manifest import ShardEntry, read_manifest, write_atomically, write_idx, write_manifest
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.reader import load_index, sidecar_path
from wds_tensorcache.shards.rewrite import rewrite_without
from wds_tensorcache.shards.storage import ShardFile

__all__ = ["MANIFEST", "Catalog", "dali_index_path", "dali_samples", "index", "remove_samples", "write_dali_index"]

MANIFEST = "manifest.json"
_EXTRA = 1  # version of our part of the manifest


class Catalog:
    """The manifest of one folder, changed one shard at a time; several processes may do so at once."""

    def __init__(self, folder: str, fsync: bool = True) -> None:
        self._folder = folder
        self._path = os.path.join(folder, MANIFEST)
        self._fsync = fsync

    def add(self, entry: ShardEntry, index: ShardIndex) -> None:
        """Add or replace a shard."""
        with self._changed() as (entries, caches, fingerprints):
            entries[entry.url] = entry
            caches[entry.url] = {name: len(columns) for name, columns in index.caches.items()}
            fingerprints.pop(entry.url, None)
            if index.fingerprint is not None:
                fingerprints[entry.url] = dict(index.fingerprint)

    def lists(self, entry: ShardEntry) -> bool:
        """Return whether the manifest has a shard, in this state."""
        return entry in self._read()[0]

    def fingerprint(self, url: str) -> Any:
        """Return how a shard was made, None if the manifest does not say so."""
        return self._read()[1].get("fingerprints", {}).get(url)

    def _read(self) -> tuple[list[ShardEntry], dict[str, Any]]:
        return read_manifest(self._path) if os.path.exists(self._path) else ([], {})

    def remove(self, urls: Sequence[str]) -> None:
        """Remove shards."""
        with self._changed() as tables:
            for url in urls:
                for table in tables:
                    table.pop(url, None)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """Give what the manifest says by shard, to change it: entries, counts by cache, fingerprints."""
        with _locked(self._folder):
            for stray in glob.glob(os.path.join(glob.escape(self._folder), f".{MANIFEST}.*.tmp")):
                os.remove(stray)  # of a killed writer: nobody else writes while this one holds the lock
            entries, extra = self._read()
            by_url = {entry.url: entry for entry in entries}
            caches, fingerprints = dict(extra.pop("caches", {})), dict(extra.pop("fingerprints", {}))
            yield by_url, caches, fingerprints
            ours = {"caches": caches} | ({"fingerprints": fingerprints} if fingerprints else {})
            write_manifest(
                self._path,
                [by_url[url] for url in sorted(by_url)],
                {**extra, "version": _EXTRA, **{name: dict(sorted(table.items())) for name, table in ours.items()}},
                fsync=self._fsync,
            )


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keep other writers off the manifest of a folder."""
    try:
        import fcntl
    except ImportError:  # Windows: one writer per folder
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def index(path: str | os.PathLike[str], *, footer: bool = False, idx: bool = True) -> ShardIndex:
    """Index a shard that another writer made, so that opening it needs no scan.

    Args:
        path: One uncompressed tar.
        footer: Append the index to the shard, behind its end-of-archive marker, where tar readers do not look; the shard's
            samples keep their bytes, and a manifest that lists the shard gets its new length. False writes it beside the
            shard, as `PATH.index`.
        idx: Write `NAME.idx` for DALI, too.

    Returns:
        The index: the same as `ShardWriter` makes for the same members.

    Raises:
        FormatError: It is no tar, or a damaged one; the message gives the byte offset.
    """
    path = os.fspath(path)
    file = ShardFile(path)
    try:
        found = scan_shard(file.read, file.nbytes)
    except TensorCacheError as exc:
        raise exc.at(path) from exc
    if footer:
        with open(path, "r+b") as shard:
            # a crash in between leaves bytes behind the archive that no reader looks at
            shard.truncate(found.end + 1024)
            shard.seek(0, os.SEEK_END)
            shard.write(build_footer(found))
            shard.flush()
            os.fsync(shard.fileno())
        if os.path.exists(sidecar_path(path)):
            os.remove(sidecar_path(path))
        folder, name = os.path.split(os.path.abspath(path))
        manifest = os.path.join(folder, MANIFEST)
        if os.path.exists(manifest) and any(entry.url == name for entry in read_manifest(manifest)[0]):
            Catalog(folder).add(ShardEntry(name, len(found.keys), os.path.getsize(path)), found)
    else:
        write_atomically(sidecar_path(path), [build_footer(found, file.nbytes)])
    if idx:
        write_dali_index(dali_index_path(path), found)
    return load_index(ShardFile(path))


def remove_samples(
    path: str, keys: Collection[str], *, footer: bool = True, idx: bool = True, fsync: bool = True
) -> None:
    """Write a shard again without the samples of some keys, with what lies beside it; it goes if no other is left.

    A crash in between leaves a manifest that does not fit, which readers refuse and the next writer with `resume=True` mends.

    Raises:
        FormatError: It is no tar, or a damaged one.
    """
    folder, name = os.path.split(path)
    catalog = Catalog(folder or ".", fsync) if os.path.exists(os.path.join(folder, MANIFEST)) else None
    index = rewrite_without(path, keys, footer=footer, fsync=fsync)
    if index is None:
        if catalog is not None:
            catalog.remove([name])
        for file in (path, dali_index_path(path), sidecar_path(path)):
            if os.path.exists(file):
                os.remove(file)
        return
    if idx:
        write_dali_index(dali_index_path(path), index, fsync)
    if catalog is not None:
        catalog.add(ShardEntry(name, len(index.keys), os.path.getsize(path)), index)


def dali_index_path(path: str) -> str:
    """Return where DALI's tools put the index of the shard at `path`."""
    return os.path.splitext(path)[0] + ".idx"


def write_dali_index(path: str, found: ShardIndex, fsync: bool = True) -> None:
    """Write DALI's index of a shard to `path`."""
    write_idx(path, dali_samples(found), fsync=fsync)


def dali_samples(found: ShardIndex) -> list[list[tuple[str, int, int, str]]]:
    """Return what DALI's index has of each sample, its members in the order of the shard: suffix, begin, bytes and name."""
    suffixes: list[str] = []
    parts: list[tuple[Any, Any, Any]] = []
    everything = np.arange(len(found.keys))
    for name, cache in found.caches.items():
        rows = everything if cache.rows is None else cache.rows
        prefix = f"{name}." if name else ""
        suffixes += [prefix + SKELETON, prefix + TENSORS]
        parts.append((rows, cache.skeleton_begin, cache.skeleton_nbytes))
        parts.append((rows, cache.tensors_begin, found.layouts.nbytes[cache.layout]))
    for suffix, member in found.members.items():
        suffixes.append(suffix)
        parts.append((everything if member.rows is None else member.rows, member.begin, member.nbytes))
    samples: list[list[tuple[str, int, int, str]]] = [[] for _ in everything]
    if parts:
        kinds = np.concatenate([np.full(len(part[0]), number) for number, part in enumerate(parts)])
        rows, begins, sizes = (np.concatenate([part[i].astype(np.int64) for part in parts]) for i in range(3))
        keys = list(found.keys)
        for at in np.argsort(begins).tolist():
            row, suffix = rows.item(at), suffixes[kinds.item(at)]
            samples[row].append((suffix, begins.item(at), sizes.item(at), f"{keys[row]}.{suffix}"))
    return samples
