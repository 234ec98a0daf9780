"""The items of a dataset with their keys, optionally read by worker processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.shards.names import check_key

__all__ = ["Item", "Items"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a dataset; `value` and `digest` are None if the item was not read, because its sample is finished."""

    key: str
    value: Any = None
    digest: str | None = None


class Items(Dataset[Item]):
    """The items of a map-style dataset or an iterable.

    Attributes:
        count: Number of items; None if unknown.
        batch_size: Number of items in each batch but the last.
        has_digests: True if items have a digest.

    Raises:
        InvalidKeyError: Some reader of shards would misread a key.
        TypeError: `items` is not a dataset.
        ValueError: The number of keys differs from the number of items; a key occurs twice; or `items` is an iterable, and
            workers or a list of keys are given.
    """

    def __init__(
        self, items: Any, keys: Any, digest: Callable[[Any], str] | None, batch_size: int, num_workers: int
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size={batch_size}, num_workers={num_workers}: expected at least 1, and at least 0")
        what = type(items).__name__
        if isinstance(items, (Mapping, DataLoader, str, bytes)):
            hint = "its dataset, since build makes batches" if isinstance(items, DataLoader) else "a list of its items"
            raise TypeError(f"a {what} cannot be a dataset of items; pass {hint}")
        self.count = _length(items)
        is_map = self.count is not None and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
        if not is_map and not isinstance(items, Iterable):
            raise TypeError(f"a {what} has neither a length and [i] nor an iterator: it cannot be a dataset")
        if not is_map and num_workers:
            raise ValueError(f"{what} has no length and [i], which num_workers={num_workers} needs; use num_workers=0")
        if keys is None and isinstance(items, Cache):
            keys = items.keys()
        if keys is not None and not callable(keys):
            keys = list(keys)
            if not is_map:
                raise ValueError(
                    "a list of keys needs a map-style dataset; for an iterable, pass a function of an item as keys="
                )
            if len(keys) != self.count:
                raise ValueError(f"{len(keys)} keys for {self.count} items, expected one key for each item")
            for key in keys:
                check_key(key)
            for key, count in Counter(keys).most_common(1):
                if count > 1:
                    raise ValueError(f"two items have the key {key!r}; expected a different key for each item")
        self._items, self._keys, self._digest, self._is_map = items, keys, digest, is_map
        self.batch_size, self._num_workers, self.has_digests = batch_size, num_workers, digest is not None

    def batches(self, is_done: Callable[[str], bool]) -> Iterator[list[Item]]:
        """Yield all items in the same batches, whatever `is_done` returns.

        For a map-style dataset whose keys are known without reading, a batch is not read if all its keys are done.
        """
        items = self._read_some(is_done) if self._is_map else map(self._item, itertools.count(), self._items)
        has_key: bool | None = None
        while batch := list(itertools.islice(items, self.batch_size)):
            for item in batch if self._keys is None else ():
                if item.value is not None:
                    if has_key not in (None, _has_key(item.value)):
                        what = f"item {item.key!r} {'lacks' if has_key else 'has'} a '__key__'"
                        raise ValueError(f"{what}, unlike the items before it: pass keys=")
                    has_key = _has_key(item.value)
            yield batch

    def _read_some(self, is_done: Callable[[str], bool]) -> Iterator[Item]:
        """Yield all items. If all keys of a batch are done, and were known without reading it, its items have no values."""
        count = self.count or 0
        keys = self._known_keys(count, is_done)
        wanted: list[int] = []
        for begin in range(0, count, self.batch_size):
            batch = range(begin, min(begin + self.batch_size, count))
            if keys is None or not all(is_done(keys[number]) for number in batch):
                wanted += batch
        read, is_wanted = self._load(wanted, self._num_workers), set(wanted)
        for number in range(count):
            if number in is_wanted:
                yield next(read)
            elif keys is not None:
                yield Item(keys[number])

    def _known_keys(self, count: int, is_done: Callable[[str], bool]) -> Sequence[str] | None:
        """Return the keys if they are known without reading the items."""
        if self._keys is not None:
            return None if callable(self._keys) else self._keys
        keys = [_number(number) for number in range(count)]
        if any(map(is_done, keys)):
            # Hazard: items may have a `__key__` that looks like a number, so the first item is read
            (first,) = self._load([0], min(1, self._num_workers))
            return None if _has_key(first.value) else keys
        return keys

    def _load(self, numbers: list[int], num_workers: int) -> Iterator[Item]:
        batches = DataLoader(
            self, batch_size=self.batch_size, sampler=numbers, num_workers=num_workers, collate_fn=list
        )
        for batch in batches:
            yield from batch

    def __getitem__(self, number: int) -> Item:  # for worker processes
        return self._item(number, self._items[number])

    def _item(self, number: int, value: Any) -> Item:
        if callable(self._keys):
            key = self._keys(value)
        elif self._keys is not None:
            key = self._keys[number]
        else:
            key = value["__key__"] if _has_key(value) else _number(number)
        check_key(key)
        digest = None if self._digest is None else self._digest(value)
        if self._digest is not None and not isinstance(digest, str):
            raise TypeError(f"digest returned a {type(digest).__name__} for item {key!r:.100}, expected a str")
        return Item(key, value, digest)


def _has_key(value: Any) -> bool:
    return isinstance(value, Mapping) and "__key__" in value


def _number(number: int) -> str:
    return f"{number:09d}"


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
