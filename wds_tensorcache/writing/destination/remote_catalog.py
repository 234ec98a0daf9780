"""The manifest of a folder in an object store, changed by compare and swap."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping

from wds_tensorcache.errors import RemoteError
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import MANIFEST, Listing, ShardEntry, parse_listing
from wds_tensorcache.storage.remote.object_writer import ObjectWriter, Version
from wds_tensorcache.storage.remote.retry import Target
from wds_tensorcache.storage.urls import join_url, shown

__all__ = ["RemoteCatalog"]

_LONGEST_S = 600.0  # a thousand writers that finish at once have changed the manifest by then
# Google refuses more than about one change of an object each second with status 429
_BUSY = frozenset({409, 429})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


class RemoteCatalog:
    """The manifest of a folder. Any number of writers may change it at once: none loses the entries of another one.

    A change replaces exactly the version of the manifest to which it was made. If another writer was faster, the change is made
    again to the new version.

    Threads: one at a time.
    """

    def __init__(self, objects: ObjectWriter, folder: str) -> None:
        self._objects, self._folder, self._url = objects, folder, join_url(folder, MANIFEST)
        self._known: tuple[bytes, Version] | None = None  # the last version that was read or written

    def read(self) -> Listing:
        """Return the content of the manifest, or an empty one if there is no manifest.

        Raises:
            FormatError: The manifest is damaged.
            RemoteError: A request failed, or the manifest has no strong ETag.
        """
        self._known = self._objects.read(self._url)
        if self._known is not None:
            self._objects.check_tag(self._url, self._known[1])
        return self._parse()

    def _parse(self) -> Listing:
        if self._known is None:
            return Listing(folder=self._folder)
        return parse_listing(self._known[0], shown(self._url), self._folder)

    def change(self, removed: Collection[str], added: Mapping[str, tuple[ShardIndex, ShardEntry]]) -> None:
        """Remove the entries with these urls, and add shards by url, or replace their entries.

        Raises:
            FormatError: The manifest is damaged.
            RemoteError: A request failed, or other writers were faster for ten minutes.
        """

        def change(listing: Listing) -> None:
            listing.remove(*removed)
            for url, (index, entry) in added.items():
                listing.add(url, index, entry)

        if removed or added:
            self._swap(change, reads=False)

    def apply(self, change: Callable[[Listing], None]) -> None:
        """Read the manifest, let a function change its content, and write it; if another writer was faster, begin again.

        Raises:
            FormatError, RemoteError: As for `change`.
            Exception: `change` raised it; nothing is written.
        """
        self._swap(change, reads=True)

    def _swap(self, change: Callable[[Listing], None], reads: bool) -> None:
        begun, num_lost = time.monotonic(), 0
        while True:
            listing = self.read() if reads or num_lost else self._parse()
            before, version = (b"", None) if self._known is None else self._known
            change(listing)
            content = listing.build(sorted(listing.entries))
            if content == before:  # also after a swap of this call whose response was lost
                return
            try:
                made = self._objects.swap(self._url, content, version)
            except RemoteError as exc:
                if exc.status not in _BUSY:
                    raise
                made = None
            if made is not None:
                self._known = content, made
                return
            if time.monotonic() - begun > _LONGEST_S:
                what = f"other writers have changed the manifest {num_lost:,} times in {_LONGEST_S:.0f} s; resume later"
                raise Target(self._url).error(what)
            self._objects.pause(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(num_lost, 10))))
            num_lost += 1
