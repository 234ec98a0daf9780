"""Index a shard that another writer made, or list all shards of a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wds_tensorcache.errors import FormatError, InvalidKeyError, TensorCacheError
from wds_tensorcache.reading.find_shards import file_identity, shard_names
from wds_tensorcache.shards.after_end import check_end, load_whole
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.footer import build_footer, declared_digest, stale_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.index_paths import check_replaceable, dali_index_path, sidecar_path
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.manifest import MANIFEST, Catalog, Listing, ShardEntry, stored_digest
from wds_tensorcache.shards.shard import load_index
from wds_tensorcache.shards.sidecar import open_sidecar, stored
from wds_tensorcache.shards.tar.headers import END_OF_ARCHIVE
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.locks import is_being_written
from wds_tensorcache.storage.remote.urls import is_url, shown
from wds_tensorcache.writing.destination.index_url import index_url

__all__ = ["FolderReport", "index_folder", "index_shard", "write_index"]

_CHUNK_NBYTES = 1 << 22


def write_index(
    path: str | os.PathLike[str],
    *,
    footer: bool = False,
    dali_index: bool = True,
    index_folder: str | os.PathLike[str] | None = None,
) -> ShardIndex:
    """Index a shard that another writer made, so that opening it needs no scan.

    The index keeps the fingerprint in an older index of the shard, or else the one in the manifest. For samples whose keys are
    in an older index, it also keeps the digests of items and the original names. Manifests that list the shard get its new
    length, numbers of samples and digest. These manifests may be in the folder of the shard and, if `path` is a link, in the
    folder of the link. If a manifest in the folder of `path` does not list a shard `*.tar`, the shard is added, unless a writer
    holds the folder.

    After an interruption, the shard can be read as before, with one exception: between the updates of manifest and shard, an
    interruption makes readers of the manifest refuse the shard until the next call of this function.

    Versions of a cache share shards by hard links. A shard with several hard links is copied before its footer is written,
    so that the file under its other names does not change.

    A shard at a url is read once as a whole, and not changed. Its indexes are written next to it, or into `index_folder`, from
    which `tc.open(…, index_folder=…)` reads them. Manifests stay as they are.

    Args:
        path: One uncompressed tar, or its url.
        footer: Append the index after the shard's end-of-archive marker, where tar readers stop; no sample's bytes change.
            False writes a sidecar, `PATH.index`. Must be False for a url.
        dali_index: Write `NAME.idx` for DALI, too.
        index_folder: For a shard at a url: folder for the indexes, local or in an object store. A shard on a web server needs
            one.

    Returns:
        The index, equal to the one that `ShardWriter` makes for the same members.

    Raises:
        FileExistsError: A folder, or another shard, has the name of an index to write or delete. Before this error, or any
            other error except OSError, nothing is written.
        FormatError: The file is not a tar, or is damaged; the error has the byte offset.
        FormatError: Bytes other than an index follow the end of the archive, for example members after a lost header.
        FormatError: Zeros follow the end of the archive, but an index, the `.idx` file or the manifest lists more members.
        OSError: The disk is full, …
        RemoteError: A request failed.
        ValueError: `footer` is True for a url; `index_folder` is not None for a local shard; or the indexes cannot be written
            to a web server.
    """
    return index_shard(os.fsdecode(path), footer, dali_index, index_folder)[0]


def index_shard(
    path: str, footer: bool, dali_index: bool, index_folder: str | os.PathLike[str] | None = None
) -> tuple[ShardIndex, str | None]:
    """Index a shard as `write_index` does; return the index, and the path of the manifest to which the shard was added."""
    if is_url(path):
        if footer:
            raise ValueError(f"{shown(path)}: objects cannot be extended; pass footer=False")
        folder = None if index_folder is None else os.fsdecode(index_folder)
        return index_url(path, dali_index=dali_index, index_folder=folder), None
    if index_folder is not None:
        raise ValueError(
            f"{path} is local: index_folder= is for shards at urls, since the index must be next to the shard"
        )
    file = ShardFile(path)
    try:
        found = scan_shard(file.read, file.nbytes)
    except TensorCacheError as exc:
        raise exc.at(path) from exc
    check_end(file, found.end, len(found.keys))
    spellings = list(dict.fromkeys(map(os.path.abspath, (path, os.path.realpath(path)))))
    check_replaceable(*map(sidecar_path, spellings), *[dali_index_path(path)] * dali_index)
    lists: list[tuple[Catalog, Listing, str]] = []
    added = None
    with contextlib.nullcontext() if footer else contextlib.suppress(FormatError):
        # without a footer, the shard does not change, and nothing is written to the folder of a link's target
        lists = _lists_of(file, spellings if footer else spellings[:1])
        added = _unlisted_in(spellings[0], lists)
    before = next(stored(file, lambda each: stale_footer(each.read, each.nbytes, file.nbytes)), None)
    fingerprint = _fingerprint(before, [listing.fingerprint(url) for _, listing, url in lists])
    origins = None if before is None else before.origins_of(found.keys)
    found = replace(found, fingerprint=fingerprint, origins=origins)
    tail = END_OF_ARCHIVE + build_footer(found)
    nbytes = found.end + len(tail)

    def list_it(nbytes: int, digest: Callable[[str], str | None]) -> None:
        for catalog, listing, url in lists:
            entry = ShardEntry(url, len(found.keys), nbytes, digest(os.path.join(catalog.folder, url)))
            if listing.entries.get(url) != entry:
                with catalog.changed() as current:
                    current.add(path, found, entry)
                listing.entries[url] = entry

    if footer and (nbytes != file.nbytes or file.read(found.end, nbytes) != tail):
        file = _own_file(file)
        # Hazard: a manifest may list the shard under another hard link. After the copy, that is a different file, which
        # keeps its length, so its entry must not change.
        lists = [each for each in lists if each[1].find(path) == each[2]]
        with open(path, "r+b") as shard:
            # Hazard: since the scan, another file may have got this name; it must not be truncated.
            file.check_is(shard.fileno())
            # Hazard: a kill or a full disk may stop the write. So the manifest gets the new length first, then the shard,
            # and then the index is written. Meanwhile the lengths agree, and readers, finding no whole index, scan the shard.
            try:
                list_it(nbytes, lambda _: declared_digest(lambda begin, end: tail[begin:end], len(tail)))
                shard.truncate(nbytes)
            except BaseException:
                list_it(file.nbytes, stored_digest)
                raise
            shard.seek(found.end)
            shard.write(tail)
            shard.flush()
            os.fsync(shard.fileno())
    else:
        nbytes = file.nbytes
        if not footer:
            sidecar = build_footer(found, nbytes)
            # Hazard: a kill between the two files must not leave the digest of an older index in the manifest.
            older = open_sidecar(path)
            if older is not None and older.read(0, older.nbytes) != sidecar:
                list_it(nbytes, lambda _: None)
            write_atomically(sidecar_path(path), [sidecar])
    if added is not None:
        lists.append((Catalog(os.path.dirname(added)), Listing(), os.path.basename(path)))
    list_it(nbytes, stored_digest)
    for beside in map(sidecar_path, spellings if footer else ()):
        if os.path.exists(beside):
            os.remove(beside)
    if dali_index:
        write_dali_index(dali_index_path(path), found)
    return load_index(ShardFile(path)), added


def _lists_of(file: ShardFile, spellings: list[str]) -> list[tuple[Catalog, Listing, str]]:
    """Return the manifests in the folders of `spellings` that list the shard, each with the url that it uses."""
    lists = []
    for folder in dict.fromkeys(map(os.path.dirname, spellings)):
        catalog = Catalog(folder)
        listing = catalog.read()
        url = listing.find(file.path)
        if url is not None:
            lists.append((catalog, listing, url))
    return lists


def _unlisted_in(path: str, lists: list[tuple[Catalog, Listing, str]]) -> str | None:
    """Return the path of the manifest in the folder of a shard if it lists other shards only; None if a writer may add it."""
    folder, name = os.path.split(path)
    manifest = os.path.join(folder, MANIFEST)
    is_listed = any(catalog.folder == folder for catalog, *_ in lists)
    if is_listed or not shard_names([name]) or not os.path.exists(manifest) or is_being_written(folder):
        return None
    return manifest


def _fingerprint(before: ShardIndex | None, listed: list[Any]) -> Mapping[str, Any] | None:
    """Return the fingerprint in the existing index of a shard, or else the first one in `listed`."""
    if before is not None and before.fingerprint is not None:
        return before.fingerprint
    return next((each for each in listed if isinstance(each, dict)), None)


def _own_file(file: ShardFile) -> ShardFile:
    """Return the file. If it has several hard links, several versions may share it: replace it by a copy, and return that.

    Raises:
        FormatError: Another file has replaced the shard since it was opened.
    """
    if os.fstat(file.fd).st_nlink < 2:
        return file
    parts = (file.read(at, min(at + _CHUNK_NBYTES, file.nbytes)) for at in range(0, file.nbytes, _CHUNK_NBYTES))
    if ShardFile(file.path).identity != file.identity:
        raise FormatError("another file has replaced the shard since it was opened; try again").at(file.path)
    write_atomically(os.path.realpath(file.path), parts)
    return ShardFile(file.path)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The shards that a new manifest of a folder lists.

    Attributes:
        num_samples: Number of samples by name of the shard.
        added: Names of shards that the manifest did not list before.
        removed: Paths of shards that it listed, but that do not exist.
        num_repeated: Number of keys that occur in several of the shards.
    """

    num_samples: dict[str, int]
    added: list[str]
    removed: list[str]
    num_repeated: int


def index_folder(folder: str, *, footer: bool, dali_index: bool, show: Callable[[int, int], object]) -> FolderReport:
    """Write the manifest of a folder anew from its shards `*.tar`. Index those that have no index, as `write_index` does.

    Entries for shards in subfolders stay if the shards exist. A shard with several names, such as links, is listed once.
    Nothing is written through a link: the index of its target becomes a separate file next to the link.

    Args:
        footer, dali_index: As for `write_index`.
        show: Function that is called with the number of shards that were read, and of all.

    Raises:
        FileExistsError: A writer holds the folder.
        FileNotFoundError: The folder has no shards.
        FormatError: A shard or the manifest is damaged. The manifest stays as it is.
    """
    if is_being_written(folder):
        raise FileExistsError(f"{folder}: a writer is writing shards there; wait until it ends")
    names = shard_names(os.listdir(folder))
    if not names:
        raise FileNotFoundError(f"{folder} has no *.tar")
    catalog = Catalog(folder)
    before, indexes = catalog.read(), dict[str, ShardIndex]()
    listed = {os.path.normpath(url): url for url in before.entries}
    removed = [url for name, url in listed.items() if not os.path.exists(os.path.join(folder, name))]
    # Hazard: links give a shard several names, and readers refuse a manifest that lists one file twice.
    name_by_file: dict[tuple[int, int], str] = {}
    for name in [*(name for name, url in listed.items() if url not in removed), *names]:
        name_by_file.setdefault(file_identity(os.path.join(folder, name)), name)
    names = sorted(set(names).intersection(name_by_file.values()))
    for number, name in enumerate(names):
        show(number, len(names))
        path = os.path.join(folder, name)
        index = load_whole(path)
        if index.digest is None:
            # Hazard: the target of a link may be in another folder, or a blob of the Hub, which is named by its content.
            index = write_index(path, footer=footer and not os.path.islink(path), dali_index=dali_index)
        if index.fingerprint is None:
            index = replace(index, fingerprint=before.fingerprint(name))
        if dali_index:  # an older `.idx` may be stale
            with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                write_dali_index(dali_index_path(path), index)
        indexes[name] = index
    with catalog.changed() as listing:
        listing.remove(*removed)
        for name, index in indexes.items():
            listing.add(os.path.join(folder, name), index)
    counts = {name: len(index.keys) for name, index in indexes.items()}
    num_repeated = len(KeyTable((index.keys, None) for index in indexes.values()).shared())
    return FolderReport(counts, [name for name in names if name not in listed], removed, num_repeated)
