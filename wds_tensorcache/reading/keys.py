"""The keys of a cache as a sequence; no list of them is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.reading.positions import each, in_order

__all__ = ["KeysView"]


@dataclass(frozen=True, slots=True)
class KeysView(Sequence[str]):
    """The keys of a cache in its order."""

    cache: Any

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return KeysView(self.cache[index])
        return self.cache._store.key(self.cache._at(range(len(self))[index]))

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __iter__(self) -> Iterator[str]:
        where, store = self.cache._where, self.cache._store
        if not isinstance(where, range):
            yield from map(store.key, each(where))
            return
        for shard, rows in in_order(store, where):
            keys, samples = shard.index.keys, shard.columns.rows
            is_whole = samples is None and len(rows) == len(keys) and bool((rows[1:] > rows[:-1]).all())
            if is_whole:
                yield from keys
            else:
                yield from map(keys.__getitem__, (rows if samples is None else samples[rows]).tolist())

    def __repr__(self) -> str:
        return f"KeysView({len(self)} keys)"
