"""Indexes of shards that other writers made, and manifests of folders."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wds_tensorcache.errors import FormatError, InvalidKeyError, TarFormatError
from wds_tensorcache.reading.find_shards import file_identity, shard_names
from wds_tensorcache.shards.after_end import REMOTE_REMEDY, check_end, load_whole
from wds_tensorcache.shards.dali_index import check_replaceable, write_dali_index
from wds_tensorcache.shards.footer import build_footer, read_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.load_index import load_index, scan
from wds_tensorcache.shards.manifest import MANIFEST, Manifest, ShardEntry, change_manifest, entry_of
from wds_tensorcache.shards.names import dali_index_path, sidecar_path
from wds_tensorcache.storage.atomic import remove_temporary
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.folder import Folder, folder_of
from wds_tensorcache.storage.locks import find_writer, locked_folder
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.urls import is_url, is_web, name_of, shown


def write_index(
    path: str | os.PathLike[str],
    *,
    dali_index: bool = True,
    index_folder: str | os.PathLike[str] | None = None,
) -> ShardIndex:
    """Write the index of a shard that another writer made. With this sidecar, `PATH.index`, opening the shard needs no scan.

    The index keeps the fingerprint in an older index of the shard, or else the fingerprint in the manifest. It also keeps the
    digests of items and the original names of samples whose keys are in an older index. If a manifest in the
    folder of `path` lists the shard, its numbers of samples and its digest are updated. If the manifest does not list a
    shard `*.tar`, the shard is added, unless a writer holds the folder. After an interruption, the shard can be read as before.

    A shard at a url is read once as a whole. Its indexes are written next to it, or into `index_folder`, from which
    `tc.open(…, index_folder=…)` reads them. Manifests stay as they are.

    Args:
        path: One uncompressed tar, or its url; it is not changed.
        dali_index: Write `NAME.idx` for DALI, too.
        index_folder: Folder for the indexes of a shard at a url, local or in an object store. Required for a shard on a web
            server.

    Returns:
        The index, equal to the index that `ShardWriter` makes for the same members.

    Raises:
        FileExistsError: A folder, or another shard, has the name of an index to write; or the folder is locked for a minute.
        InvalidKeyError: `NAME.idx` cannot represent the name of a member, for example a name with a space. Before all errors
            except this error and OSError, nothing is written.
        FormatError: The file is not a tar, or is damaged; the error has the byte offset. Or unknown bytes follow the end of the
            archive. Or zeros follow it, although an index or, for a local shard, the manifest lists more members.
        OSError: A file cannot be read or written, for example because the disk is full.
        RemoteError, ImportError: A request failed; or the url needs a package that is not installed.
        ValueError: `index_folder` is not None for a local shard, or the indexes cannot be written to a web server.
    """
    return index_shard(os.fsdecode(path), dali_index, index_folder)[0]


def index_shard(
    path: str, dali_index: bool, index_folder: str | os.PathLike[str] | None = None
) -> tuple[ShardIndex, str | None]:
    """Index a shard as `write_index` does. Return the index, and the path of the manifest if it got a new entry."""
    is_remote = is_url(path)
    if index_folder is not None and not is_remote:
        raise ValueError(
            f"{path} is local: index_folder= is for shards at urls, since the index must be next to the shard"
        )
    if not is_remote and os.path.isdir(path):
        raise FormatError(f"{path} is a folder, expected a tar; `tensorcache index {path}` indexes all shards in it")
    folder, name = _place_of(path, None if index_folder is None else os.fsdecode(index_folder))
    file = RemoteFile(path) if is_remote else ShardFile(path)
    index = scan(file)
    check_end(file, index.end, len(index.keys))
    folder.make()
    written = [sidecar_path(name), *[dali_index_path(name)] * dali_index]
    if not folder.is_remote:
        check_replaceable(*map(folder.locate, written))
        # left by a killed call; a call that runs now writes its file again
        remove_temporary(folder.path, "|".join(map(re.escape, written)))
    manifest, url, is_added = Manifest(), None, False
    with contextlib.suppress(FormatError):  # a damaged manifest stays as it is
        if not is_remote:
            manifest = Manifest.of(folder)
            url = _find(manifest, folder, path)
            if url is None and shard_names([name]) and os.path.exists(folder.locate(MANIFEST)):
                is_added = not find_writer(folder.path or os.curdir)
    older = folder.read(sidecar_path(name))
    stored = _stored_index(file, older)
    if stored is not None and stored.end > index.end:  # of a shard at a url: `check_end` reads only local sidecars
        problem = f"zeros, although {sidecar_path(name)} says that the archive ends at byte {stored.end}"
        remedy = f"if another shard has replaced that of the index, delete the index; otherwise, {REMOTE_REMEDY}"
        raise TarFormatError(f"{problem}; {remedy}", offset=index.end, kind="trailing").at(file.path)
    index = _with_older(index, stored, None if url is None else manifest.fingerprint(url))
    sidecar = build_footer(index, file.nbytes)

    def list_shard(entry: ShardEntry) -> None:
        if Manifest.of(folder).entries.get(entry.url) != entry:
            change_manifest(folder, lambda manifest: manifest.add(entry, index))

    if url is not None or is_added:
        with locked_folder(folder.path or os.curdir):
            pass  # a folder that another process keeps locked is refused before anything is written
    # A kill between the two files must not leave the digest of an older index in the manifest.
    if url is not None and manifest.entries[url].digest is not None and older != sidecar:
        list_shard(ShardEntry(url, len(index.keys), file.nbytes))
    folder.write(sidecar_path(name), sidecar)
    if not is_remote:
        index = load_index(ShardFile(path))  # with the digest that readers find
    if url is not None or is_added:
        list_shard(entry_of(path, index, url))
    if dali_index:
        write_dali_index(folder, name, index)
    return index, folder.locate(MANIFEST) if is_added else None


def _place_of(path: str, index_folder: str | None) -> tuple[Folder, str]:
    if not is_url(path):
        return folder_of(os.path.dirname(path)), os.path.basename(path)
    name = name_of(path)
    if index_folder is None:
        index_folder = path.rpartition("/")[0]
    elif name in ("", ".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"{shown(path)}: {name!r} is not the name of a shard")
    if is_url(index_folder) and is_web(index_folder):
        remedy = "pass index_folder=, a local folder or one in an object store"
        raise ValueError(f"{shown(index_folder)}: an index cannot be written to a web server; {remedy}")
    return folder_of(index_folder), name


def _stored_index(file: ShardFile | RemoteFile, sidecar: bytes | None) -> ShardIndex | None:
    """Return the stored index of a shard, preferably with a fingerprint."""

    def parse(read: Callable[[int, int], bytes], nbytes: int) -> ShardIndex | None:
        with contextlib.suppress(FormatError):
            return read_index(read, nbytes, file.nbytes)
        return None

    own = parse(file.read, file.nbytes)
    if sidecar is None or (own is not None and own.fingerprint is not None):
        return own
    return parse(lambda begin, end: sidecar[begin:end], len(sidecar)) or own


def _with_older(index: ShardIndex, older: ShardIndex | None, fingerprint: Any) -> ShardIndex:
    """Return `index` with the origins and the fingerprint of an older index."""
    if older is not None and older.fingerprint is not None:
        fingerprint = older.fingerprint
    # else the fingerprint in the manifest, whose JSON may be of any type
    elif not isinstance(fingerprint, dict):
        fingerprint = None
    return replace(index, fingerprint=fingerprint, origins=None if older is None else older.origins_of(index.keys))


def _find(manifest: Manifest, folder: Folder, path: str) -> str | None:
    """Return the manifest's url of the file at `path`, or None."""
    name = os.path.basename(path)
    for url in (*(url for url in manifest.entries if os.path.basename(url) == name), *manifest.entries):
        with contextlib.suppress(OSError, ValueError):
            # their spellings may differ
            if os.path.samefile(folder.locate(url), path):
                return url
    return None


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The shards that a new manifest of a folder lists."""

    num_samples: dict[str, int]  # by name of the shard
    added: list[str]  # names of shards that the manifest did not list before
    removed: list[str]  # urls of shards that the manifest listed before, but that do not exist
    num_repeated: int  # keys that occur in several of the shards


def index_folder(folder: str, *, dali_index: bool, show: Callable[[int, int], object]) -> FolderReport:
    """List a folder's shards `*.tar` in its manifest. Index shards without a current index, as `write_index` does.

    Entries for shards in subfolders stay if the shards exist. A shard with several names, such as links, is listed once.
    With `dali_index`, each `.idx` is written anew. `show` is called with the number of shards read so far, and the number of
    all shards.

    Raises:
        FileExistsError: A writer holds the folder.
        FileNotFoundError: The folder has no shards.
        FormatError: A shard or the manifest is damaged. The manifest may then list new shards before the damaged shard.
    """
    if writer := find_writer(folder):
        raise FileExistsError(
            f"{folder}: a writer in {writer} is writing shards there; close it, or wait until it ends"
        )
    names = shard_names(os.listdir(folder))
    if not names:
        raise FileNotFoundError(f"{folder} has no *.tar")
    shards = folder_of(folder)
    before, indexes = Manifest.of(shards), dict[str, ShardIndex]()
    listed = {os.path.normpath(url): url for url in before.entries}
    removed = [url for url in before.entries if not os.path.exists(os.path.join(folder, url))]
    # Links give a shard several names, and readers refuse a manifest that lists one file twice.
    name_by_file: dict[tuple[int, int], str] = {}
    for name in [*(name for name, url in listed.items() if url not in removed), *names]:
        name_by_file.setdefault(file_identity(os.path.join(folder, name)), name)
    names = sorted(set(names).intersection(name_by_file.values()))
    for number, name in enumerate(names):
        show(number, len(names))
        path = os.path.join(folder, name)
        index = None
        try:
            index = load_whole(path)
        except FormatError as exc:
            if exc.kind != "index":  # a stale sidecar
                raise
        if index is None or index.digest is None:
            index = write_index(path, dali_index=False)
        if index.fingerprint is None:
            index = replace(index, fingerprint=before.fingerprint(name))
        if dali_index:  # an older `.idx` may be stale
            with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                write_dali_index(shards, name, index)
        indexes[name] = index

    def change(manifest: Manifest) -> None:
        # a writer that has started since may have written a removed shard again
        manifest.remove(*(url for url in removed if not os.path.exists(os.path.join(folder, url))))
        for name, index in indexes.items():
            manifest.add(entry_of(os.path.join(folder, name), index), index)

    change_manifest(shards, change)
    counts = {name: len(index.keys) for name, index in indexes.items()}
    num_repeated = len(KeyTable((index.keys, None) for index in indexes.values()).shared())
    return FolderReport(counts, [name for name in names if name not in listed], removed, num_repeated)
