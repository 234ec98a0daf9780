"""Indexes taken apart and put together again, with a right digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import LayoutTable, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.storage.files import ShardFile

Change = Callable[[ShardIndex], ShardIndex]


def index_of(path: Path) -> ShardIndex:
    """Return the index that the shard's own bytes give."""
    file = ShardFile(str(path))
    return scan_shard(file.read, file.nbytes)


def forge(path: Path, change: Change) -> None:
    """Give a shard a footer that says something else than its bytes; digest and lengths are right."""
    put_footer(path, change(index_of(path)))


def put_footer(path: Path, index: ShardIndex) -> None:
    """Replace the footer of a shard."""
    shard = path.read_bytes()
    path.write_bytes(shard[: index.end + 1024] + build_footer(index))


def columns(index: ShardIndex, **changes: Any) -> ShardIndex:
    """Return the index with other columns of its only cache."""
    ((name, cache),) = index.caches.items()
    return replace(index, caches={name: replace(cache, **changes)})


def swapped(array: np.ndarray[Any, Any], a: int = 1, b: int = 2) -> np.ndarray[Any, Any]:
    array = array.copy()
    array[[a, b]] = array[[b, a]]
    return array


def swap(*names: str) -> Change:
    """Return what swaps columns of samples 1 and 2."""

    def change(index: ShardIndex) -> ShardIndex:
        (cache,) = index.caches.values()
        return columns(index, **{name: swapped(getattr(cache, name)) for name in names})

    return change


def swap_keys(index: ShardIndex) -> ShardIndex:
    keys = list(index.keys)
    keys[1], keys[2] = keys[2], keys[1]
    return replace(index, keys=Keys(np.frombuffer("".join(keys).encode(), np.uint8), index.keys.ends))


def unchecked(table: LayoutTable, **changes: Any) -> LayoutTable:
    """Return a table that its own checks would refuse."""
    made = object.__new__(LayoutTable)
    for name in LayoutTable.__slots__:
        object.__setattr__(made, name, changes.get(name, getattr(table, name)))
    return made


def changed(name: str, at: int, value: int, dtype: Any = np.uint64) -> Change:
    """Return what puts `value` into a column."""

    def change(index: ShardIndex) -> ShardIndex:
        (cache,) = index.caches.values()
        array = getattr(cache, name).astype(dtype)
        array[at] = value
        return columns(index, **{name: array})

    return change
