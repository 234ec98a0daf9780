"""The items of a dataset with their keys, read by worker processes if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.shards.names import check_key

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
        KeyRuleError: A key in a list of them is none.
        TypeError: It is no dataset.
        ValueError: There are not as many keys as items, or one twice; workers cannot read an iterable.
    """

    def __init__(
        self, items: Any, keys: Any, digest: Callable[[Any], str] | None, batch_size: int, workers: int
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise ValueError(f"batch_size={batch_size}, workers={workers}: out of range")
        if isinstance(items, (Mapping, DataLoader, str, bytes)):
            hint = "its dataset: build makes the batches" if isinstance(items, DataLoader) else "a list of its items"
            raise TypeError(f"a {type(items).__name__} is no dataset of items; pass {hint}")
        self.count = _length(items)
        self._is_map = (
            self.count is not None and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
        )
        if not self._is_map and not isinstance(items, Iterable):
            raise TypeError(f"a {type(items).__name__} has neither a length and [i] nor an iterator: it is no dataset")
        if not self._is_map and workers:
            raise ValueError(f"{type(items).__name__} has no length and [i], by which workers={workers} could read it")
        if keys is None and isinstance(items, (TensorCache, JoinedCache)):
            keys = items.keys()
        if keys is not None and not callable(keys):
            keys = list(keys)
            if not self._is_map:
                raise ValueError(
                    "a list of keys is for a map-style dataset; of an iterable, keys= is a function of an item"
                )
            if len(keys) != self.count:
                raise ValueError(f"{len(keys)} keys for {self.count} items")
            _check_keys(keys)
        self._items, self._keys, self._digest = items, keys, digest
        self._batch_size, self._workers = batch_size, workers

    def batches(self, is_done: Callable[[str], bool]) -> Iterator[list[Item]]:
        """Yield the items in batches, always the same ones; without values where the keys tell that all are done."""
        batch: list[Item] = []
        has_key: bool | None = None
        for item in self._read_some(is_done) if self._is_map else self._read_all():
            if self._keys is None and item.value is not None:
                if has_key not in (None, _has_key(item.value)):
                    raise ValueError(f"some items have a '__key__', others have none, such as {item.key!r}: pass keys=")
                has_key = _has_key(item.value)
            batch.append(item)
            if len(batch) == self._batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _read_all(self) -> Iterator[Item]:
        for number, value in enumerate(self._items):
            yield _item(value, number, self._keys, self._digest)

    def _read_some(self, is_done: Callable[[str], bool]) -> Iterator[Item]:
        assert self.count is not None
        keys = self._known_keys(is_done)
        numbers: list[int] = []
        for begin in range(0, self.count, self._batch_size):
            batch = range(begin, min(begin + self._batch_size, self.count))
            if keys is None or not all(is_done(keys[number]) for number in batch):
                numbers += batch
        read, wanted = self._load(numbers, self._workers), set(numbers)
        for number in range(self.count):
            if number in wanted:
                yield next(read)
            elif keys is not None:
                yield Item(keys[number])

    def _known_keys(self, is_done: Callable[[str], bool]) -> Sequence[str] | None:
        """Return the keys, if they are known without reading the items."""
        if callable(self._keys):
            return None
        if self._keys is not None:
            return self._keys  # type: ignore[no-any-return]
        keys = [_number(number) for number in range(self.count or 0)]
        if any(map(is_done, keys)):
            # keys of the items' own may look like numbers
            (first,) = self._load([0], min(1, self._workers))
            return None if _has_key(first.value) else keys
        return keys

    def _load(self, numbers: list[int], workers: int) -> Iterator[Item]:
        reader = _Reader(self._items, self._keys, self._digest)
        batches = DataLoader(reader, batch_size=self._batch_size, sampler=numbers, num_workers=workers, collate_fn=list)
        for batch in batches:
            yield from batch


class _Reader(Dataset[Item]):
    """Items by number, for worker processes."""

    def __init__(self, items: Any, keys: Any, digest: Callable[[Any], str] | None) -> None:
        self._items, self._keys, self._digest = items, keys, digest

    def __getitem__(self, number: int) -> Item:
        return _item(self._items[number], number, self._keys, self._digest)


def _item(value: Any, number: int, keys: Any, digest: Callable[[Any], str] | None) -> Item:
    if callable(keys):
        key = keys(value)
    elif keys is not None:
        key = keys[number]
    else:
        key = value["__key__"] if _has_key(value) else _number(number)
    check_key(key)
    text = None if digest is None else digest(value)
    if digest is not None and not isinstance(text, str):
        raise TypeError(f"digest returned a {type(text).__name__} of item {key!r:.100}, expected a str")
    return Item(key, value, text)


def _has_key(value: Any) -> bool:
    return isinstance(value, Mapping) and "__key__" in value


def _number(number: int) -> str:
    return f"{number:09d}"


def _check_keys(keys: list[Any]) -> None:
    seen: set[str] = set()
    for key in keys:
        check_key(key)
        if key in seen:
            raise ValueError(f"two items have the key {key!r}")
        seen.add(key)


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
