"""A sequence of a cache's keys that keeps no list of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from wds_tensorcache.reading.lookup.positions import in_order
from wds_tensorcache.shards.names import safe_key

__all__ = ["KeysView", "respelled"]

_MAX_FOLDERS = 8  # folders of an unknown key, so that an error has few look-ups


@dataclass(frozen=True, slots=True, repr=False)
class KeysView(Sequence[str]):
    """A sequence of a cache's keys in the order of its samples; each key is decoded on access."""

    _cache: Any

    def __len__(self) -> int:
        return len(self._cache)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> KeysView: ...
    def __getitem__(self, index: int | slice) -> str | KeysView:
        if isinstance(index, slice):
            return KeysView(self._cache[index])
        key: str = self._cache._store.key(self._cache._at(range(len(self))[index]))
        return key

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __iter__(self) -> Iterator[str]:
        for shard, rows in in_order(self._cache._store, self._cache._where):
            keys, samples = shard.index.keys, shard.columns.rows
            if shard.index.has_names:
                yield from map(shard.key, rows.tolist())
            elif samples is None and len(rows) == len(keys) and bool((rows[1:] > rows[:-1]).all()):
                yield from keys
            else:
                yield from map(keys.__getitem__, (rows if samples is None else samples[rows]).tolist())

    def __repr__(self) -> str:
        return f"KeysView({len(self)} keys)"


def respelled(key: str, width: int) -> list[str]:
    """Return other spellings of an unknown key: without spaces, leading folders and suffixes, each also as a safe key.

    If the name without suffixes is a number, it also has `width` digits.
    """
    *folders, name = key.strip().split("/")
    stem = name.partition(".")[0]
    names = [name, name.rpartition(".")[0], stem]
    texts = [key.strip()]
    for first in range(max(0, len(folders) - _MAX_FOLDERS), len(folders) + 1):
        texts += ["/".join([*folders[first:], each]) for each in names]
    texts += [stem.lstrip("0").zfill(width)] if stem.isdecimal() else []
    return list(dict.fromkeys(spelling for text in texts for spelling in (text, safe_key(text))))
