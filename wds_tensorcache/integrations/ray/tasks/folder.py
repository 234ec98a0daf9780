"""The folder of a write, local or in an object store: its files, its manifest, and the markers of writes in progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from wds_tensorcache.integrations.ray.tasks.jobs import writing_id, writing_name
from wds_tensorcache.shards.after_end import load_whole
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path, sidecar_path
from wds_tensorcache.shards.manifest import Catalog, Listing, ShardEntry
from wds_tensorcache.storage.locks import Flock, is_held
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.urls import is_url, join_url, shown
from wds_tensorcache.writing.destination.remote_catalog import RemoteCatalog
from wds_tensorcache.writing.destination.remote_shards import load_indexes

__all__ = ["Folder", "LocalFolder", "RemoteFolder", "folder_at", "index_names"]


class Folder(Protocol):
    """A folder of shards. Markers of writes are files in it.

    Threads/fork/pickle: one thread at a time; not pickled: the driver and each task make their own.
    """

    path: str

    def names(self) -> list[str]:
        """Return the sorted names of all files."""
        ...

    def read(self) -> Listing:
        """Return the content of the manifest; it is empty if there is no manifest."""
        ...

    def change(self, change: Callable[[Listing], None]) -> None:
        """Let a function change the content of the manifest, all at once.

        In an object store, the function is called again if another writer was faster.
        """
        ...

    def load(self, names: Iterable[str]) -> dict[str, ShardIndex]:
        """Return the indexes of shards by name, in the given order.

        Raises:
            FormatError: A shard is damaged.
            FileNotFoundError: There is no such shard.
        """
        ...

    def add(self, listing: Listing, name: str, index: ShardIndex) -> None:
        """Add a shard to the content of the manifest."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; ignore those that do not exist."""
        ...

    def begin(self, write: str) -> None:
        """Make the marker of a write."""
        ...

    def finish(self, write: str) -> None:
        """Delete the marker, so that late tasks find that the write has ended."""
        ...

    def is_writing(self, write: str) -> bool:
        """Return whether the marker of a write exists."""
        ...

    def writes(self) -> dict[str, bool]:
        """Return, by id of each write with a marker, whether it may be running."""
        ...


def folder_at(path: str) -> Folder:
    """Return the folder at a path or url."""
    return RemoteFolder(path) if is_url(path) else LocalFolder(path)


def index_names(names: Iterable[str]) -> list[str]:
    """Return the names of shards and of all their indexes."""
    return [each for name in names for each in (name, dali_index_path(name), sidecar_path(name))]


class LocalFolder:
    """A local folder, or one on a file system that all nodes share; implements `Folder`.

    `begin` locks the marker until its process ends.

    Threads/fork/pickle: as for `Folder`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._marker: Flock | None = None
        os.makedirs(path, exist_ok=True)

    def _locate(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def read(self) -> Listing:
        return Catalog(self.path).read()

    def change(self, change: Callable[[Listing], None]) -> None:
        with Catalog(self.path).changed() as listing:
            change(listing)

    def load(self, names: Iterable[str]) -> dict[str, ShardIndex]:
        return {name: load_whole(self._locate(name)) for name in names}

    def add(self, listing: Listing, name: str, index: ShardIndex) -> None:
        listing.add(self._locate(name), index)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                os.remove(self._locate(name))
            except FileNotFoundError:
                continue  # another process has deleted it

    def begin(self, write: str) -> None:
        self._marker = Flock(self._locate(writing_name(write)), os.O_RDWR | os.O_CREAT | os.O_EXCL, wait_s=60)

    def finish(self, write: str) -> None:
        self.remove([writing_name(write)])
        if self._marker is not None:
            self._marker.close()

    def is_writing(self, write: str) -> bool:
        return os.path.exists(self._locate(writing_name(write)))

    def writes(self) -> dict[str, bool]:
        # without locks, as on some network file systems, a write counts as running until its marker is deleted
        ids = {name: write for name in self.names() if (write := writing_id(name)) is not None}
        return {write: is_held(self._locate(name)) for name, write in ids.items()}


class RemoteFolder:
    """A folder in an object store; implements `Folder`.

    A store has no locks, so a write counts as running until its marker is deleted.

    Threads/fork/pickle: as for `Folder`.
    """

    def __init__(self, url: str) -> None:
        self.path = join_url(url, "").rstrip("/")
        self._objects = ObjectWriter(join_url(url, ""))
        self._nbytes: Mapping[str, int] = {}

    def _locate(self, name: str) -> str:
        return join_url(self.path, name)

    def names(self) -> list[str]:
        self._nbytes = self._objects.list_names(self.path)
        return sorted(self._nbytes)

    def read(self) -> Listing:
        return RemoteCatalog(self._objects, self.path).read()

    def change(self, change: Callable[[Listing], None]) -> None:
        RemoteCatalog(self._objects, self.path).apply(change)

    def load(self, names: Iterable[str]) -> dict[str, ShardIndex]:
        names = list(names)
        if not all(name in self._nbytes for name in names):
            self.names()
        for name in names:
            if name not in self._nbytes:
                raise FileNotFoundError(f"{shown(self._locate(name))} does not exist")
        urls = {self._locate(name): name for name in names}
        found = load_indexes(self._objects, {url: self._nbytes[name] for url, name in urls.items()}, {})
        return {urls[url]: index for url, index in found.items()}

    def add(self, listing: Listing, name: str, index: ShardIndex) -> None:
        listing.add(self._locate(name), index, ShardEntry(name, len(index.keys), self._nbytes[name], index.digest))

    def remove(self, names: Iterable[str]) -> None:
        urls = [self._locate(name) for name in names]
        if urls:
            self._objects.delete(urls)

    def begin(self, write: str) -> None:
        self._objects.create(self._locate(writing_name(write)), b"")

    def finish(self, write: str) -> None:
        self.remove([writing_name(write)])

    def is_writing(self, write: str) -> bool:
        return self._objects.read(self._locate(writing_name(write))) is not None

    def writes(self) -> dict[str, bool]:
        return {write: True for write in map(writing_id, self.names()) if write is not None}
