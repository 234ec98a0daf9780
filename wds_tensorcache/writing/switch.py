"""The moment at which new samples take the places of old ones: for whoever reads the manifest, all of them at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from wds_tensorcache.shards.catalog import Catalog, Listing, dali_index_path, dali_samples
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import build_idx
from wds_tensorcache.shards.sidecar import check_replaceable, sidecar_path
from wds_tensorcache.storage.atomic import fsync_folder
from wds_tensorcache.storage.output import Output
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.rewrite import stage_without

__all__ = ["Switch"]


class Switch:
    """Shards that are not listed before older samples have left others, and those samples.

    A shard with samples that replace others is *held*: the manifest says so before the shard has its name, so that a writer
    that goes on where another was killed does not list it. The older shards are written again under temporary names first.
    What follows are renames and one new manifest, and while it is not there, sizes do not fit, which readers refuse.
    """

    def __init__(self, pattern: ShardPattern, catalog: Catalog | None, *, footer: bool, idx: bool, fsync: bool) -> None:
        self._pattern, self._catalog = pattern, catalog
        self._footer, self._idx, self._fsync = footer, idx, fsync
        self._held: dict[str, ShardIndex] = {}
        self._leaving: dict[str, set[str]] = {}  # keys by shard

    @property
    def is_due(self) -> bool:
        """Whether anything is to be switched: what is finished from now on is held."""
        return bool(self._held or self._leaving)

    def leave(self, key: str, shards: Iterable[str]) -> None:
        """Let samples of a key leave some shards."""
        for shard in shards:
            self._leaving.setdefault(shard, set()).add(key)

    def announce(self, path: str, fingerprint: Mapping[str, Any] | None) -> None:
        """Say in the manifest, before a shard has its name, that it will be held."""
        if self._catalog is not None:
            with self._catalog.changed() as listing:
                listing.held[os.path.basename(path)] = fingerprint

    def hold(self, path: str, index: ShardIndex) -> None:
        """List a shard when all is switched."""
        self._held[path] = index

    def clear(self) -> None:
        """Delete the shards that a switch has left without samples, and forget those that were announced and never finished."""
        if self._catalog is None:
            return
        listing = self._catalog.read()
        gone = [url for url in listing.gone if self._pattern.covers(url) and url not in listing.entries]
        never = [
            url for url in listing.held if self._pattern.covers(url) and not os.path.exists(self._pattern.locate(url))
        ]
        self._pattern.remove([self._pattern.locate(url) for url in gone])
        if gone or never:
            self._catalog.remove(*gone, *never)

    def run(self, fingerprint: Mapping[str, Any] | None) -> None:
        """Do it."""
        if not self.is_due:
            return
        staged: list[Output] = []
        changed: dict[str, ShardIndex] = {}
        gone: list[str] = []
        try:
            for path, keys in sorted(self._leaving.items()):
                index = self._stage(path, keys, fingerprint, staged)
                if index is None:
                    gone.append(path)
                else:
                    changed[path] = index
            with self._changed() as listing:
                for output in staged:
                    if output.path in changed:
                        self._remove_beside(output.path)  # its `.idx` is of another state from here on, or missing
                    output.publish(fsync=False)
                if self._fsync:
                    fsync_folder(self._pattern.folder)
                for path, index in (self._held | changed).items():
                    listing.add(path, index)
                listing.remove(*map(os.path.basename, gone))
                listing.gone += map(os.path.basename, gone)
        finally:
            for output in staged:
                output.drop()  # what has its name stays
        if self._catalog is None:
            self._pattern.remove(gone)
        self.clear()
        self._held, self._leaving = {}, {}

    def _stage(
        self, path: str, keys: Collection[str], fingerprint: Mapping[str, Any] | None, staged: list[Output]
    ) -> ShardIndex | None:
        """Write a shard and its `.idx` without some keys, to be published; None if no other is left."""
        check_replaceable(dali_index_path(path), sidecar_path(path))
        found = stage_without(path, keys, fingerprint, self._footer, self._fsync)
        if found is None:
            return None
        staged.append(found[0])
        if self._idx:
            content = build_idx(dali_samples(found[1]))
            staged.append(Output(dali_index_path(path)))
            staged[-1].append([content], len(content))
            staged[-1].complete(self._fsync)
        return found[1]

    @contextlib.contextmanager
    def _changed(self) -> Iterator[Listing]:
        if self._catalog is None:
            yield Listing()
        else:
            with self._catalog.changed() as listing:
                yield listing

    def _remove_beside(self, path: str) -> None:
        for file in (dali_index_path(path), sidecar_path(path)):
            if os.path.exists(file):
                os.remove(file)
