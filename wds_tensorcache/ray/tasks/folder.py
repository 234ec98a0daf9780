"""The folder of a write, local or in an object store: its files, its manifest, and the markers of writes in progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from wds_tensorcache.ray.tasks.jobs import writing_id, writing_name
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path, sidecar_path
from wds_tensorcache.shards.manifest import Manifest, ShardEntry, change_manifest
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.locks import Flock, is_held
from wds_tensorcache.writing.resume import load_finished


def index_names(names: Iterable[str]) -> list[str]:
    """Return the names of shards and of all their indexes."""
    return [each for name in names for each in (name, dali_index_path(name), sidecar_path(name))]


class WriteFolder:
    """A folder of shards: local, on a file system that all nodes share, or in an object store.

    Markers of writes are files in it. `begin` locks the marker of a local folder until its process ends. Without locks, as in
    a store, a write counts as running until its marker is deleted.

    Args:
        path: Path or url; a missing folder is made.

    Threads/fork/pickle: one thread at a time; not pickled: the driver and each task make their own.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or path
        self._folder = folder_of(self.path)
        self._folder.make()
        self._entries: dict[str, ShardEntry] = {}  # of the shards that were loaded
        self._marker: Flock | None = None

    def names(self) -> list[str]:
        """Return the sorted names of all files."""
        return self._folder.names()

    def read(self) -> Manifest:
        """Return the content of the manifest; it is empty if there is no manifest."""
        return Manifest.of(self._folder)

    def change(self, change: Callable[[Manifest], None]) -> None:
        """Let a function change the manifest, all at once; see `change_manifest`."""
        change_manifest(self._folder, change)

    def load(self, names: Iterable[str]) -> dict[str, ShardIndex]:
        """Return the indexes of shards by name, in the given order.

        Raises:
            FormatError: A shard is damaged.
            FileNotFoundError: There is no such shard.
        """
        paths = {self._folder.locate(name): name for name in names}
        finished = load_finished(dict.fromkeys(paths, (None, None)))
        self._entries |= {name: finished.entry(path) for path, name in paths.items()}
        return {paths[path]: index for path, index in finished.indexes.items()}

    def add(self, manifest: Manifest, name: str, index: ShardIndex) -> None:
        """Add a shard that was loaded to the content of the manifest."""
        manifest.add(self._entries[name], index)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; ignore those that do not exist."""
        self._folder.delete(names)

    def begin(self, write: str) -> None:
        """Make the marker of a write."""
        name = writing_name(write)
        if self._folder.is_remote:
            self._folder.new_file(name).finish()
        else:
            self._marker = Flock(self._folder.locate(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, wait_s=60)

    def finish(self, write: str) -> None:
        """Delete the marker, so that late tasks find that the write has ended."""
        self.remove([writing_name(write)])
        if self._marker is not None:
            self._marker.close()

    def is_writing(self, write: str) -> bool:
        """Return whether the marker of a write exists."""
        return self._folder.read(writing_name(write)) is not None

    def writes(self) -> dict[str, bool]:
        """Return, by id of each write with a marker, whether it may be running."""
        ids = {name: write for name in self.names() if (write := writing_id(name)) is not None}
        return {write: self._folder.is_remote or is_held(self._folder.locate(name)) for name, write in ids.items()}
