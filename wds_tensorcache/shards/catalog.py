"""What lies beside the shards of a folder: the manifest, indexes in files of their own, and DALI's `.idx`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import build_footer, stale_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.manifest import (
    MANIFEST,
    ShardEntry,
    dali_index_path,
    own_file,
    read_manifest,
    write_idx,
    write_manifest,
)
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.remainder import check_end
from wds_tensorcache.shards.shard import load_index
from wds_tensorcache.shards.sidecar import check_replaceable, sidecar_path, stored
from wds_tensorcache.shards.tar.archive import END_OF_ARCHIVE
from wds_tensorcache.storage.atomic import find_temporary, remove_stray, write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.locks import locked_folder

__all__ = ["MANIFEST", "Catalog", "Listing", "dali_index_path", "dali_samples", "index", "write_dali_index"]

_EXTRA = 1  # version of our part of the manifest


@dataclass(slots=True)
class Listing:
    """What a manifest says, each by shard."""

    entries: dict[str, ShardEntry] = field(default_factory=dict)
    caches: dict[str, dict[str, int]] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    _spelled: dict[str, str] = field(init=False)  # `./a.tar`, or an absolute path, by `a.tar`

    def __post_init__(self) -> None:
        spelled = {os.path.basename(url): url for url in self.entries}
        self._spelled = {
            plain: url
            for plain, url in spelled.items()
            if plain != url and os.path.abspath(self._locate(url)) == os.path.abspath(self._locate(plain))
        }

    def _locate(self, url: str) -> str:
        return os.path.join(self.folder, url)

    def find(self, path: str) -> str | None:
        """Return the url by which a file is listed, under whatever name; None if it is not."""
        name = os.path.basename(path)
        for url in (*(url for url in self.entries if os.path.basename(url) == name), *self.entries):
            with contextlib.suppress(OSError, ValueError):
                if os.path.samefile(self._locate(url), path):
                    return url
        return None

    def lists(self, path: str, index: ShardIndex) -> bool:
        """Return whether a shard is listed, in this state."""
        entry = _entry(path, index)
        return self.entries.get(entry.url) == entry

    def fingerprint(self, name: str) -> Any:
        """Return how a shard is said to be made, None if nothing is said."""
        return self.fingerprints.get(self._spelled.get(name, name))

    def add(self, path: str, index: ShardIndex, entry: ShardEntry | None = None) -> None:
        """List a shard, or replace what is said of it; `entry` is for one that has another url or will have another length."""
        entry = entry or _entry(path, index)
        self.remove(entry.url)
        self.entries[entry.url] = entry
        self.caches[entry.url] = {name: len(columns) for name, columns in index.caches.items()}
        if index.fingerprint is not None:
            self.fingerprints[entry.url] = dict(index.fingerprint)

    def remove(self, *urls: str) -> None:
        """Say nothing of some shards."""
        for url in {*urls, *(self._spelled.pop(url, url) for url in urls)}:
            for table in (self.entries, self.caches, self.fingerprints):
                table.pop(url, None)

    def write(self, path: str, urls: Iterable[str], fsync: bool = True) -> None:
        """Write the manifest, with the shards in the order of `urls`."""
        ours: dict[str, Any] = {"version": _EXTRA, "caches": dict(sorted(self.caches.items()))}
        if self.fingerprints:
            ours["fingerprints"] = dict(sorted(self.fingerprints.items()))
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
        caches, fingerprints = extra.pop("caches", {}), extra.pop("fingerprints", {})
        if not isinstance(caches, dict) or not isinstance(fingerprints, dict):
            raise FormatError(f"{self._path}: caches and fingerprints are not both objects")
        return Listing({entry.url: entry for entry in entries}, caches, fingerprints, extra, self.folder)

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
            for stray in find_temporary(self.folder, re.escape(MANIFEST)):
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
            samples keep their bytes. False writes it beside the shard, as `PATH.index`.
        idx: Write `NAME.idx` for DALI, too.

    Returns:
        The index: the same as `ShardWriter` makes for the same members. It keeps the fingerprint that the index before it has,
        or else the manifest. A manifest in the folder of the shard, or of a link to it at `path`, that lists the shard gets its
        length and its numbers of samples. Broken off, the shard reads as before; between the two, for no longer than one call
        of the system, readers of the manifest refuse the shard, and so they do until this is called again.

        Versions of a cache share shards by hard links. A shard with several of these is copied before its footer is written:
        under its other names it stays as it was.

    Raises:
        FileExistsError: A folder, or another shard, has the name of an index that would be written or deleted. Nothing is
            written, as with all errors but the disk's.
        FormatError: It is no tar, or a damaged one, with the byte offset; or bytes that are not an
            index follow the end of its archive: perhaps members after a lost header, or a second tar; or zeros do, where an
            index, the `.idx` or the manifest has more members.
        OSError: The disk is full, …
    """
    path = os.fsdecode(path)
    file = ShardFile(path)
    try:
        found = scan_shard(file.read, file.nbytes)
    except TensorCacheError as exc:
        raise exc.at(path) from exc
    check_end(file, found.end, len(found.keys))
    spellings = list(dict.fromkeys(map(os.path.abspath, (path, os.path.realpath(path)))))
    check_replaceable(*map(sidecar_path, spellings), *[dali_index_path(path)] * idx)
    lists: list[tuple[Catalog, Listing, str]] = []
    with contextlib.nullcontext() if footer else contextlib.suppress(FormatError):
        lists = _lists_of(file, spellings)
    found = replace(found, fingerprint=_fingerprint(file, [listing.fingerprint(url) for _, listing, url in lists]))
    tail = END_OF_ARCHIVE + build_footer(found)
    nbytes = found.end + len(tail)

    def list_it(nbytes: int) -> None:
        for catalog, before, url in lists:
            entry = ShardEntry(url, len(found.keys), nbytes)
            if before.entries[url] != entry:
                with catalog.changed() as listing:
                    listing.add(path, found, entry)
                before.entries[url] = entry

    if footer and (nbytes != file.nbytes or file.read(found.end, nbytes) != tail):
        file = own_file(file)
        # Hazard: a manifest may list the shard by another of its hard links, which is another file from here on.
        lists = [each for each in lists if each[1].find(path) == each[2]]
        with open(path, "r+b") as shard:
            # Hazard: another file may have the name since the scan. What is cut and written is the file that was scanned.
            file.check_is(shard.fileno())
            # Hazard: a kill, or a full disk. The new length is listed, and then it is the shard's, before anything is written:
            # manifest and shard agree from here on, and while the index is not complete, readers scan.
            try:
                list_it(nbytes)
                shard.truncate(nbytes)
            except BaseException:
                list_it(file.nbytes)
                raise
            shard.seek(found.end)
            shard.write(tail)
            shard.flush()
            os.fsync(shard.fileno())
    else:
        if not footer:
            write_atomically(sidecar_path(path), [build_footer(found, file.nbytes)])
        list_it(file.nbytes)
    for beside in map(sidecar_path, spellings if footer else ()):
        if os.path.exists(beside):
            os.remove(beside)
    if idx:
        write_dali_index(dali_index_path(path), found)
    return load_index(ShardFile(path))


def _lists_of(file: ShardFile, spellings: list[str]) -> list[tuple[Catalog, Listing, str]]:
    """Return the manifests in the folders of a shard that list it, each with its url there."""
    lists = []
    for folder in dict.fromkeys(map(os.path.dirname, spellings)):
        catalog = Catalog(folder)
        listing = catalog.read()
        url = listing.find(file.path)
        if url is not None:
            lists.append((catalog, listing, url))
    return lists


def _fingerprint(file: ShardFile, listed: list[Any]) -> Mapping[str, Any] | None:
    """Return how a shard was made: as the index that is there says, or else as a manifest does, in `listed`."""
    before = next(stored(file, lambda each: stale_footer(each.read, each.nbytes, file.nbytes)), None)
    if before is not None and before.fingerprint is not None:
        return before.fingerprint
    return next((each for each in listed if isinstance(each, dict)), None)


def write_dali_index(path: str, found: ShardIndex, fsync: bool = True) -> None:
    """Write DALI's index of a shard to `path`."""
    check_replaceable(path)
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
