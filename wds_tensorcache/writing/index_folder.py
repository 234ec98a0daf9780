"""Write the manifest of a folder anew from its shards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from wds_tensorcache.errors import InvalidKeyError
from wds_tensorcache.reading.find_shards import shard_names
from wds_tensorcache.shards.after_end import load_whole
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.manifest import Catalog
from wds_tensorcache.storage.locks import is_being_written
from wds_tensorcache.writing.index_shard import write_index

__all__ = ["FolderReport", "index_folder"]


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


def index_folder(
    folder: str,
    *,
    footer: bool = False,
    dali_index: bool = True,
    show: Callable[[int, int], object] = lambda done, total: None,
) -> FolderReport:
    """Write the manifest of a folder anew from its shards `*.tar`. Index those that have no index, as `write_index` does.

    Entries for shards in subfolders stay if the shards exist.

    Args:
        footer, dali_index: As for `write_index`.
        show: Called with the number of shards that are read, and in all.

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
    for number, name in enumerate(names):
        show(number, len(names))
        path = os.path.join(folder, name)
        index = load_whole(path)
        if index.digest is None:
            index = write_index(path, footer=footer, dali_index=dali_index)
        if index.fingerprint is None:
            index = replace(index, fingerprint=before.fingerprint(name))
        if dali_index:  # an older `.idx` may be stale
            with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                write_dali_index(dali_index_path(path), index)
        indexes[name] = index
    known = {os.path.normpath(url): url for url in before.entries}
    removed = [url for name, url in known.items() if not os.path.exists(os.path.join(folder, name))]
    with catalog.changed() as listing:
        listing.remove(*removed)
        for name, index in indexes.items():
            listing.add(os.path.join(folder, name), index)
    counts = {name: len(index.keys) for name, index in indexes.items()}
    num_repeated = len(KeyTable((index.keys, None) for index in indexes.values()).shared())
    return FolderReport(counts, [name for name in names if name not in known], removed, num_repeated)
