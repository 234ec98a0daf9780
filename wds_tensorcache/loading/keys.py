"""The keys of a cache as a sequence; no list of them is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        number = range(len(self))[index]
        return self.cache._store.key(self.cache._at(number))

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __iter__(self) -> Iterator[str]:
        if self.cache._order is None:
            for shard in filter(len, self.cache._store.shards):
                rows = shard.columns.rows
                keys = shard.index.keys
                yield from keys if rows is None else (keys[row] for row in rows.tolist())
        else:
            yield from (self.cache._store.key(position) for position in self.cache._order.tolist())

    def __repr__(self) -> str:
        return f"KeysView({len(self)} keys)"
