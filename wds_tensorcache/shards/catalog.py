"""What lies beside the shards of a folder: the manifest, indexes in files of their own, and DALI's `.idx`."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import build_footer, parse_footer, stale_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.manifest import (
    MANIFEST,
    ShardEntry,
    dali_index_path,
    read_manifest,
    write_atomically,
    write_idx,
    write_manifest,
)
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.remainder import check_end
from wds_tensorcache.shards.shard import load_index, sidecar_path
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.locks import locked_folder, remove_stray

__all__ = ["MANIFEST", "Catalog", "Listing", "dali_index_path", "dali_samples", "index", "write_dali_index"]

_EXTRA = 1  # version of our part of the manifest


@dataclass(slots=True)
class Listing:
    """What a manifest says, each by shard."""

    entries: dict[str, ShardEntry] = field(default_factory=dict)
    caches: dict[str, dict[str, int]] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    # finished or about to be, but not listed before others are changed; and how they are made
    held: dict[str, Any] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)  # not listed any more, and about to be deleted
    extra: dict[str, Any] = field(default_factory=dict)
    _spelled: dict[str, str] = field(init=False)  # `./a.tar` by `a.tar`

    def __post_init__(self) -> None:
        spelled = {os.path.normpath(url): url for url in self.entries}
        self._spelled = {plain: url for plain, url in spelled.items() if plain != url}

    def lists(self, path: str, index: ShardIndex) -> bool:
        """Return whether a shard is listed, in this state."""
        entry = _entry(path, index)
        return self.entries.get(entry.url) == entry

    def fingerprint(self, name: str) -> Any:
        """Return how a shard is said to be made, None if nothing is said."""
        url = self._spelled.get(name, name)
        return self.fingerprints.get(url, self.held.get(url))

    def add(self, path: str, index: ShardIndex) -> None:
        """List a shard, or replace what is said of it."""
        entry = _entry(path, index)
        self.remove(entry.url, self._spelled.pop(entry.url, entry.url))
        self.entries[entry.url] = entry
        self.caches[entry.url] = {name: len(columns) for name, columns in index.caches.items()}
        if index.fingerprint is not None:
            self.fingerprints[entry.url] = dict(index.fingerprint)

    def remove(self, *urls: str) -> None:
        """Say nothing of some shards."""
        for url in urls:
            for table in (self.entries, self.caches, self.fingerprints, self.held):
                table.pop(url, None)
        self.gone = [url for url in self.gone if url not in urls]

    def write(self, path: str, urls: Iterable[str], fsync: bool = True) -> None:
        """Write the manifest, with the shards in the order of `urls`."""
        ours: dict[str, Any] = {"version": _EXTRA, "caches": dict(sorted(self.caches.items()))}
        for name, table in (("fingerprints", self.fingerprints), ("held", self.held)):
            if table:
                ours[name] = dict(sorted(table.items()))
        if self.gone:
            ours["gone"] = sorted(self.gone)
        write_manifest(path, [self.entries[url] for url in urls], {**self.extra, **ours}, fsync=fsync)


class Catalog:
    """The manifest of one folder, changed by one process at a time; several may do so."""

    def __init__(self, folder: str, fsync: bool = True) -> None:
        self.folder = folder
        self._path = os.path.join(folder, MANIFEST)
        self._fsync = fsync

    def read(self) -> Listing:
        """Return what the manifest says."""
        entries, extra = read_manifest(self._path) if os.path.exists(self._path) else ([], {})
        tables = [extra.pop(name, {}) for name in ("caches", "fingerprints", "held")]
        gone = extra.pop("gone", [])
        if not all(isinstance(table, dict) for table in tables) or not isinstance(gone, list):
            raise FormatError(f"{self._path}: caches, fingerprints and held are not all objects, or gone is no list")
        caches, fingerprints, held = map(dict, tables)
        if not all(value is None or isinstance(value, dict) for value in held.values()):
            raise FormatError(f"{self._path}: held has something else than fingerprints: {held!r:.200}")
        return Listing({entry.url: entry for entry in entries}, caches, fingerprints, held, list(map(str, gone)), extra)

    def add(self, path: str, index: ShardIndex) -> None:
        """Add or replace a shard."""
        with self.changed() as listing:
            listing.add(path, index)

    def remove(self, *urls: str) -> None:
        """Remove shards."""
        with self.changed() as listing:
            listing.remove(*urls)

    @contextlib.contextmanager
    def changed(self) -> Iterator[Listing]:
        """Keep other writers off, and write the manifest again as the caller has changed it, unless that failed.

        Raises:
            FileExistsError: Another process keeps the folder locked.
        """
        with locked_folder(self.folder):
            for stray in glob.glob(os.path.join(glob.escape(self.folder), f".{MANIFEST}.*.tmp")):
                remove_stray(stray)  # of a killed writer: the lock keeps other writers out
            listing = self.read()
            yield listing
            listing.write(self._path, sorted(listing.entries), self._fsync)


def _entry(path: str, index: ShardIndex) -> ShardEntry:
    return ShardEntry(os.path.basename(path), len(index.keys), os.path.getsize(path))


def index(path: str | os.PathLike[str], *, footer: bool = False, idx: bool = True) -> ShardIndex:
    """Index a shard that another writer made, so that opening it needs no scan.

    Args:
        path: One uncompressed tar.
        footer: Append the index to the shard, behind its end-of-archive marker, where tar readers do not look; the shard's
            samples keep their bytes, and a manifest that lists the shard gets its new length. False writes it beside the
            shard, as `PATH.index`.
        idx: Write `NAME.idx` for DALI, too.

    Returns:
        The index: the same as `ShardWriter` makes for the same members. It keeps the fingerprint that the index before it has,
        or else the manifest.

    Raises:
        FormatError: It is no tar, or a damaged one, with the byte offset; or bytes that are not an
            index follow the end of its archive: perhaps members after a lost header, or a second tar; or zeros do, where an
            index, the `.idx` or the manifest has more members. Nothing is written then.
    """
    path = os.fsdecode(path)
    file = ShardFile(path)
    try:
        found = scan_shard(file.read, file.nbytes)
    except TensorCacheError as exc:
        raise exc.at(path) from exc
    check_end(file, found.end, len(found.keys))
    folder, name = os.path.split(os.path.abspath(path))
    catalog, listing = Catalog(folder), Listing()
    with contextlib.nullcontext() if footer else contextlib.suppress(FormatError):
        listing = catalog.read()
    found = replace(found, fingerprint=_fingerprint(file, listing.fingerprint(name)))
    if footer:
        with open(path, "r+b") as shard:
            # Hazard: another file may have the name since the scan. What is cut and written is the file that was scanned.
            file.check_is(shard.fileno())
            # a crash in between leaves bytes behind the archive that no reader looks at
            shard.truncate(found.end + 1024)
            shard.seek(0, os.SEEK_END)
            shard.write(build_footer(found))
            shard.flush()
            os.fsync(shard.fileno())
        if os.path.exists(sidecar_path(path)):
            os.remove(sidecar_path(path))
        if any(os.path.normpath(url) == name for url in listing.entries):
            catalog.add(path, found)
    else:
        write_atomically(sidecar_path(path), [build_footer(found, file.nbytes)])
    if idx:
        write_dali_index(dali_index_path(path), found)
    return load_index(ShardFile(path))


def _fingerprint(file: ShardFile, listed: Any) -> Mapping[str, Any] | None:
    """Return how a shard was made: as the index that is there says, or else as the manifest does, in `listed`."""
    before: ShardIndex | None = None
    with contextlib.suppress(OSError, FormatError):
        before = stale_footer(file.read, file.nbytes)
    if before is None:
        with contextlib.suppress(OSError, FormatError):
            beside = ShardFile(sidecar_path(file.path))
            before = parse_footer(beside.read(0, beside.nbytes), file.nbytes)
    if before is not None and before.fingerprint is not None:
        return before.fingerprint
    return listed if isinstance(listed, dict) else None


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
        keys, order = list(found.keys), np.argsort(begins)
        for row, kind, begin, nbytes in zip(
            *(each[order].tolist() for each in (rows, kinds, begins, sizes)), strict=True
        ):
            suffix = suffixes[kind]
            samples[row].append((suffix, begin, nbytes, f"{keys[row]}.{suffix}"))
    return samples
