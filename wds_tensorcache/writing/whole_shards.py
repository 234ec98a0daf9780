"""Write a cache by many workers: each writes whole shards, and at the end one process lists all of them in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path, sidecar_path
from wds_tensorcache.shards.manifest import Manifest, ShardEntry
from wds_tensorcache.storage.folder import Folder
from wds_tensorcache.writing.resume import load_finished
from wds_tensorcache.writing.writer import ShardWriter

Shards = dict[str, tuple[ShardEntry, ShardIndex]]  # by name


def write_shards(
    pattern: str,
    samples: Iterable[tuple[str, Any, Mapping[str, Any]]],
    *,
    keeps_finished: bool = False,
    **options: Any,
) -> list[str]:
    """Write samples into shards that no manifest lists, and return the shards' names.

    Args:
        pattern: Pattern of names that no other worker has, nor another attempt of this one.
        samples: Key, sample, and members outside the cache, of each sample.
        keeps_finished: After an error, keep the finished shards; otherwise they are deleted.
        options: Options of `ShardWriter`.
    """
    sink = ShardWriter(pattern, manifest=False, **options)
    try:
        with sink:
            for key, sample, members in samples:
                sink.write(key, sample, **members)
    except BaseException:
        if not keeps_finished:
            delete_shards(sink._folder, _names(sink))
        raise
    return _names(sink)


def _names(sink: ShardWriter) -> list[str]:
    return [sink._pattern.shard_name(number) for number in range(sink._number)]


def delete_shards(folder: Folder, names: Iterable[str]) -> None:
    """Delete shards and their indexes; ignore those that do not exist."""
    folder.delete(file for name in names for file in (name, dali_index_path(name), sidecar_path(name)))


def load_shards(folder: Folder, names: Iterable[str]) -> Shards:
    """Return the manifest entry and the index of each finished shard, in the given order.

    Raises:
        FormatError: A shard is damaged.
        FileNotFoundError: A shard does not exist.
    """
    paths = {folder.locate(name): name for name in names}
    finished = load_finished(dict.fromkeys(paths, (None, None)))
    return {paths[path]: (finished.entry(path), index) for path, index in finished.indexes.items()}


def list_shards(manifest: Manifest, shards: Shards) -> None:
    """Add shards to the content of a manifest."""
    for entry, index in shards.values():
        manifest.add(entry, index)
