"""The items of a dataset with their keys, read by worker processes if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from wds_tensorcache.loading.dataset import TensorCache
from wds_tensorcache.loading.join import JoinedCache

__all__ = ["Item", "Source"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item; `value` and `digest` are None if it need not be read."""

    key: str
    value: Any = None
    digest: str | None = None


class Source:
    """A map-style dataset or an iterable.

    Attributes:
        count: Number of its items; None if nobody knows.

    Raises:
        ValueError: As many keys as items are needed, or workers cannot read an iterable.
    """

    def __init__(
        self, items: Any, keys: Any, digest: Callable[[Any], str] | None, batch_size: int, workers: int
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise ValueError(f"batch_size={batch_size}, workers={workers}: out of range")
        self._is_map = hasattr(items, "__len__") and hasattr(items, "__getitem__") and not isinstance(items, Mapping)
        if not self._is_map and (workers or not isinstance(items, Iterable)):
            raise ValueError(f"{type(items).__name__} has no length and no [i], which workers={workers} read by")
        if keys is None and isinstance(items, (TensorCache, JoinedCache)):
            keys = items.keys()
        self.count = len(items) if hasattr(items, "__len__") else None
        if keys is not None and not callable(keys) and (not self._is_map or len(keys) != self.count):
            raise ValueError(f"{len(keys)} keys for {self.count} items")
        self._items, self._keys, self._digest = items, keys, digest
        self._batch_size, self._workers = batch_size, workers

    def items(self, is_done: Callable[[str], bool]) -> Iterator[Item]:
        """Yield the items; those that are done without their value, if they can be told by their keys alone."""
        if not self._is_map:
            for number, value in enumerate(self._items):
                yield _item(value, _key_of(value, number, self._keys), self._digest)
            return
        assert self.count is not None
        numbers = []
        for number in range(self.count):
            key = None if callable(self._keys) else _key(self._keys, number)
            if key is not None and is_done(key):
                yield Item(key)
            else:
                numbers.append(number)
        reader = _Reader(self._items, self._keys, self._digest)
        batches = DataLoader(
            reader, batch_size=self._batch_size, sampler=numbers, num_workers=self._workers, collate_fn=list
        )
        for batch in batches:
            yield from batch


class _Reader(Dataset[Item]):
    """Items by number, for worker processes."""

    def __init__(self, items: Any, keys: Any, digest: Callable[[Any], str] | None) -> None:
        self._items, self._keys, self._digest = items, keys, digest

    def __getitem__(self, number: int) -> Item:
        value = self._items[number]
        key = self._keys(value) if callable(self._keys) else _key(self._keys, number)
        return _item(value, key, self._digest)


def _item(value: Any, key: str, digest: Callable[[Any], str] | None) -> Item:
    return Item(key, value, None if digest is None else str(digest(value)))


def _key(keys: Sequence[str] | None, number: int) -> str:
    return f"{number:09d}" if keys is None else keys[number]


def _key_of(value: Any, number: int, keys: Any) -> str:
    if keys is not None:
        return str(keys(value))
    return str(value["__key__"]) if isinstance(value, Mapping) and "__key__" in value else f"{number:09d}"
