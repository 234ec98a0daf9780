"""The findings of each rank of a build about a version: a file per rank, from which one rank puts the version together."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from xxhash import xxh3_128

from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.writing.versions.write_version import OldCache

__all__ = ["RankParts"]

_NAME = re.compile(r"r[0-9]+of([0-9]+)\.json").fullmatch


class RankParts:
    """The parts of all ranks: keys of their items, and which samples of the old cache they drop and replace.

    The caller must hold the lock of the version.

    Args:
        folder: Hidden folder of the version.
        old: Cache from which samples are reused; `collect` adds what other ranks drop and replace.
        fingerprint: Fingerprint of the version.
        rank, world_size: Rank of this process, and number of ranks.
    """

    def __init__(self, folder: str, old: OldCache, fingerprint: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._folder, self._old = folder, old
        self._rank, self._world_size = rank, world_size
        digest = xxh3_128(json.dumps(fingerprint, sort_keys=True).encode())
        for path, part in old.parts.items():
            index = old.shards.indexes[path]
            digest.update(f"{part.url}:{index.end}:".encode("utf-8", "surrogateescape"))
            for array in (index.keys.text, *(columns.digest for columns in index.caches.values())):
                digest.update(array.tobytes())
        self._identity = digest.hexdigest()

    def _name(self, rank: int) -> str:
        return f"r{rank}of{self._world_size}.json"

    def _path(self, rank: int) -> str:
        return os.path.join(self._folder, self._name(rank))

    def forget(self) -> None:
        """Delete the part of this rank, so that no rank writes the version before this rank has finished again.

        Delete the parts of other world sizes, too.
        """
        self._remove(lambda name, world_size: world_size != self._world_size or name == self._name(self._rank))

    def _remove(self, is_wrong: Callable[[str, int], bool]) -> None:
        for name in os.listdir(self._folder):
            match = _NAME(name)
            if match is not None and is_wrong(name, int(match[1])):
                os.remove(os.path.join(self._folder, name))

    def save(self, seen: set[str], num_items: int) -> None:
        """Write the part of this rank; `num_items` is the number of items of all ranks."""
        if self._world_size > 1:
            old = {
                part.url: [sorted(part.dropped_keys), sorted(part.changed_keys)] for part in self._old.parts.values()
            }
            found = {"version": self._identity, "num_items": num_items, "keys": sorted(seen), "old": old}
            write_atomically(self._path(self._rank), [json.dumps(found).encode()])

    def collect(self, seen: set[str], num_items: int) -> set[str] | None:
        """Return the keys of the items of all ranks; None if a rank has not finished.

        Raises:
            ValueError: The ranks do not have the same items in the same order, or two items have the same key. The parts of
                all ranks are then deleted.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        if not all(os.path.exists(self._path(rank)) for rank in others):
            return None
        parts, whole = {part.url: part for part in self._old.parts.values()}, set(seen)
        for rank in others:
            found = self._load(rank)
            if found is None or found["version"] != self._identity:
                return None  # damaged, or of an earlier call with another cache to reuse or another fingerprint
            if found["num_items"] != num_items:
                self._refuse(f"rank {rank} has {found['num_items']} items in all, and this rank has {num_items}")
            num_before = len(whole)
            whole.update(found["keys"])
            if len(whole) < num_before + len(found["keys"]):
                what = "either two items have one key, or the items of the ranks are not in the same order"
                self._refuse(f"rank {rank} has a key of an item of another rank: {what}")
            for url, (dropped, changed) in found["old"].items():
                parts[url].dropped_keys.update(dropped)
                parts[url].changed_keys.update(changed)
        if len(whole) != num_items:
            self._refuse(f"the ranks have {len(whole)} items, of {num_items}")
        return whole

    def _load(self, rank: int) -> dict[str, Any] | None:
        """Return the part of a rank; delete it and return None if it is damaged."""
        path, urls = self._path(rank), {part.url for part in self._old.parts.values()}
        with contextlib.suppress(ValueError, RecursionError):
            with open(path, encoding="ascii") as file:
                found: Any = json.load(file)
            if _is_part(found) and found["old"].keys() <= urls:
                return dict(found)
        os.remove(path)
        return None

    def _refuse(self, what: str) -> NoReturn:
        self._remove(lambda name, world_size: True)
        raise ValueError(f"{what}; mend that, and call build on all ranks again")


def _is_part(found: Any) -> bool:
    """Return whether this is what `RankParts.save` writes."""
    if not isinstance(found, dict) or found.keys() != {"version", "num_items", "keys", "old"}:
        return False
    has_types = isinstance(found["version"], str) and type(found["num_items"]) is int and isinstance(found["old"], dict)
    if not has_types or not all(isinstance(both, list) and len(both) == 2 for both in found["old"].values()):
        return False
    lists = [found["keys"], *(keys for both in found["old"].values() for keys in both)]
    return all(isinstance(keys, list) and all(isinstance(key, str) for key in keys) for keys in lists)
