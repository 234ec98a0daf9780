"""The items of a dataset, or of one rank, for `build`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_start_method
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from xxhash import xxh3_64_intdigest

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import InvalidKeyError, add_note
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.find_shards import is_tar
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.shards.member_shard import MemberSample
from wds_tensorcache.shards.names import check_key
from wds_tensorcache.storage.system import end_with_parent
from wds_tensorcache.writing.build_failures import Failure, text_of
from wds_tensorcache.writing.item_digest import digest_item

NO_ITEMS = (
    "the source has no items. An iterator that was read before has none left: pass the dataset itself. If the source lists a "
    "folder, check the path and the filter"
)
NUM_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a dataset.

    `value` and `digest` are None if the item was not read, or could not be read. `digest` is also None without `digest=`.
    `origin` is the result of `digest_item`; 0 if there is none, or if the key of the item does not depend on its position.
    `failure` describes the error of an item that could not be read. The `key` is then `""` if it depends on the item's value.
    `members` are the other members of the sample, by extension.
    """

    number: int
    key: str
    value: Any = None
    digest: str | None = None
    origin: int = 0
    failure: Failure | None = None
    members: Mapping[str, bytes] = field(default_factory=dict)


class Items(Dataset[Item]):
    """The items of a map-style dataset or an iterable.

    On several ranks, these are the batches of one rank. Worker processes may read them. The rank of a batch depends only on
    the number of the batch and the world size. So ranks need not communicate, and a batch has the same items for any world
    size. Batches form groups of `world_size`, in which every rank gets one batch, in pseudorandom order. So if the
    shards of one rank are lost, any other number of ranks shares its batches evenly.

    Attributes:
        num_items: Number of items of this rank; None if unknown.
        num_all: Number of items of all ranks; for an iterable, number of the items so far.
        is_map: True for a map-style dataset, False for an iterable.
        are_numbered: True if the keys of items are known to be their numbers, or there are no items. For most map-style
            datasets, an item must have been read: it may have a `__key__`.
        compares: True if items without a `__key__` are compared by `digest_item`. Their keys are numbers, so a key does not
            show that an item has moved.
        of_other_ranks: Up to 64 items of other ranks in an iterable to compare, without their values.
    """

    def __init__(
        self,
        items: Any,
        keys: Any,
        digest: Callable[[Any], str] | None,
        batch_size: int,
        num_workers: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        records: bool = False,
    ) -> None:
        batch_size, num_workers = as_int("batch_size", batch_size), as_int("num_workers", num_workers)
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size={batch_size}, num_workers={num_workers}: expected at least 1, and at least 0")
        if isinstance(items, list) and items and all(map(is_tar, items)):
            items = _open_without_cache(items)
        kind, count = type(items).__name__, _length(items)
        is_map = count is not None and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
        # Hazard: [i] of pandas finds a label, so a Series that was shuffled would give its items other keys.
        is_pandas = hasattr(items, "iloc")
        if (
            is_pandas
            or isinstance(items, (Mapping, DataLoader, str, bytes))
            or not (is_map or isinstance(items, Iterable))
        ):
            remedy = "pass a dataset or list with a length and [i], or an iterable of items; build makes the batches"
            if is_pandas:
                remedy = "its [i] is not a row: pass series.tolist(), or frame.to_dict('records')"
            elif isinstance(items, str):
                remedy = (
                    "pass tc.open(…) of shards, a list of their paths, which end in .tar, or a dataset or list of items"
                )
            raise TypeError(f"a {kind} cannot be a dataset of items; {remedy}")
        if not is_map and num_workers:
            raise ValueError(f"{kind} has no length and [i], which num_workers={num_workers} needs; use num_workers=0")
        first = items
        while isinstance(first, JoinedCache):  # whose keys are those of its first cache
            first = first._caches[0]
        # Hazard: the keys of a SharedDataset are positions, and its items may move.
        if keys is None and isinstance(first, TensorCache):
            keys = items.keys()
        self._is_fixed = isinstance(keys, str) and keys == "position"
        keys = None if self._is_fixed else keys
        if isinstance(keys, str):
            raise ValueError(f"{keys=!r:.100}, expected a list of keys, a function of an item, or 'position'")
        if isinstance(keys, (set, frozenset)):
            raise TypeError(
                "keys= is a set, whose order is not that of the items; pass a list, or a function of an item"
            )
        if keys is not None and not callable(keys):
            keys = _check_keys(list(keys), count if is_map else None, items)
        self._items, self._keys, self._digest, self.is_map = items, keys, digest, is_map
        self.batch_size = min(batch_size, sys.maxsize)  # the limit of itertools
        self._num_workers, self.has_digests = num_workers, digest is not None
        self._has_key: bool | None = None  # whether items have a `__key__`; None until an item was read
        self.compares = keys is None and not self._is_fixed and digest is None
        self.of_other_ranks: list[Item] = []
        self._distance = 1  # of the numbers of `of_other_ranks`
        self.rank, self.world_size = rank, world_size
        self.records = records  # an item that cannot be read gets a `failure`, and no error is raised
        self._count, self.num_all = count or 0, (count or 0) if is_map else 0
        self.num_items = None if count is None else sum(map(len, self._own_batches()))

    @property
    def are_numbered(self) -> bool:
        # Hazard: a `__key__` may look like the number of another item. A rank without items does not know their keys.
        return self._keys is None and (self._is_fixed or self._has_key is False or not self.num_all)

    def is_own(self, number: int) -> bool:
        group, place = divmod(number // self.batch_size, self.world_size)
        shift = xxh3_64_intdigest(b"%d %d" % (self.world_size, group)) if self.world_size > 1 else 0
        return (place + shift) % self.world_size == self.rank

    def _own_batches(self) -> Iterator[range]:
        for begin in range(0, self._count, self.batch_size):
            if self.is_own(begin):
                yield range(begin, min(begin + self.batch_size, self._count))

    def batches(self, is_done: Callable[[str], bool]) -> Iterator[list[Item]]:
        """Yield the batches of this rank's items. A batch has the same items for any `is_done`.

        Items of a map-style dataset are not read if all keys of their batch are known without reading, and `is_done` returns
        True for them. Items to compare are always read: all items if the caller gives digests, or if the source is a list or
        tuple. Otherwise 64 items at equal distances are read, and the last item, which differs if an item before it was
        inserted or removed.
        """
        items = self._read_batches(is_done) if self.is_map else self._iterate()
        while batch := list(itertools.islice(items, self.batch_size)):
            if self._keys is None and not self._is_fixed:
                for item in batch:
                    if item.failure is None:
                        has_key = _has_key(item.value)
                        if self._has_key not in (None, has_key):
                            fault = f"item {item.key!r} {'has' if has_key else 'lacks'} a '__key__'"
                            raise ValueError(f"{fault}, unlike the items before it: pass keys=")
                        self._has_key = has_key
                if self.are_numbered:
                    batch = [replace(item, key=number_text(item.number)) if item.failure else item for item in batch]
            yield batch

    def read(self, numbers: list[int]) -> Iterator[Item]:
        num_workers = min(len(numbers), self._num_workers)
        # `get_start_method` fixes the start method for the process, as the start of a worker does
        parent = os.getpid() if num_workers and get_start_method() != "forkserver" else None
        try:
            for batch in DataLoader(
                self,
                batch_size=self.batch_size,
                sampler=numbers,
                num_workers=num_workers,
                collate_fn=list,
                worker_init_fn=partial(_begin_worker, parent),
            ):
                yield from map(self._receive, batch)
        except Exception as exc:
            if num_workers:
                # A frame of torch in the traceback refers to the error. Because of this cycle, torch would wait 5 s for each
                # worker when the error is freed. The worker's traceback is in the error's text.
                exc.__traceback__ = None
            raise exc

    def __getitems__(self, numbers: list[int]) -> list[Any]:  # for DataLoader, in any process
        items = copy.copy(self)
        if isinstance(self._items, Cache):  # a cache fetches samples at urls together
            with contextlib.suppress(Exception):  # raised again for its item
                items._items = dict(zip(numbers, self._items.__getitems__(numbers), strict=True))
        return [items._send(number) if get_worker_info() else items[number] for number in numbers]

    # Hazard: torch waits for ever for a batch that its queue cannot pickle. So workers pickle each item themselves.
    def _send(self, number: int) -> Item | tuple[int, str, bytes]:
        """Return an item as number, key and pickle, or with its failure."""
        item = self[number]
        try:
            return number, item.key, bytes(ForkingPickler.dumps(item))
        except Exception as exc:
            return self._failed(number, _not_sent(number, exc), item.key)

    def _receive(self, sent: Item | tuple[int, str, bytes]) -> Item:
        if isinstance(sent, Item):
            return sent
        number, key, content = sent
        try:
            item: Item = ForkingPickler.loads(content)
        except Exception as exc:
            return self._failed(number, _not_sent(number, exc), key)
        return item

    def _read_batches(self, is_done: Callable[[str], bool]) -> Iterator[Item]:
        """Yield this rank's items. An item that need not be read has no value."""
        skipped: set[int] = set()
        keys = None
        if not self.has_digests and not (self.compares and isinstance(self._items, (list, tuple))):
            keys = self._known_keys(is_done)
        if keys is not None:
            done = [i for batch in self._own_batches() if all(is_done(keys[i]) for i in batch) for i in batch]
            compared = [*(done[i] for i in spread(len(done), NUM_COMPARED)), *done[-1:]] if self.compares else []
            skipped = {*done}.difference(compared)
        own = list(itertools.chain.from_iterable(self._own_batches()))
        values = self.read([i for i in own if i not in skipped])
        for i in own:
            yield Item(i, keys[i]) if keys is not None and i in skipped else next(values)

    def _known_keys(self, is_done: Callable[[str], bool]) -> Sequence[str] | None:
        """Return the keys of all items; None if only reading shows them."""
        if self._keys is not None:
            return None if callable(self._keys) else self._keys
        keys = [number_text(number) for number in range(self._count)]
        if not self._is_fixed and any(map(is_done, keys)):
            # items may have a `__key__` that looks like a number, so the first item is read
            items = (item for number in range(self._count) for item in self.read([number]))
            first = next((item for item in items if item.failure is None), None)
            self._has_key = None if first is None else _has_key(first.value)
            return keys if self._has_key is False else None
        return keys

    def _iterate(self) -> Iterator[Item]:
        """Yield this rank's items of an iterable."""
        values = iter(self._items)
        for number in itertools.count():
            with _add_note_of_item(number):
                try:
                    value = next(values)
                except StopIteration:
                    return
            self.num_all = number + 1
            if self.is_own(number):
                yield self._item(number, {number: value})
            elif self.compares and number % self._distance == 0:
                self.of_other_ranks.append(Item(number, number_text(number), origin=digest_item(value)))
                if len(self.of_other_ranks) > NUM_COMPARED:
                    self._distance *= 2
                    self.of_other_ranks = [item for item in self.of_other_ranks if item.number % self._distance == 0]

    def __getitem__(self, number: int) -> Item:  # for worker processes
        return self._item(number, self._items)

    def read_again(self, item: Item, before: int) -> Item:
        """Return an item, read again from a map-style dataset.

        `before` is its digest before the call of `fn`, or 0. Raises ValueError if `fn` changed its only value in place.
        """
        value = self._items[item.number] if self.is_map else item.value
        if before and before != digest_item(value) == digest_item(item.value):
            fault = f"fn changed item {item.number} in place, so it cannot be tried again as it was"
            raise ValueError(f"{fault}; copy what fn changes, or let the dataset return a copy")
        return replace(item, value=value)

    def _failed(self, number: int, exc: Exception, key: str = "") -> Item:
        if not self.records:
            if get_worker_info():
                ForkingPickler.dumps(type(exc))  # torch sends the class; an error here has `exc` as context
            raise exc
        if self._keys is None:
            key = number_text(number) if self._is_fixed else key
        elif not callable(self._keys):
            key = self._keys[number]
        return Item(number, key, failure=Failure.of(number, key, exc))

    def _item(self, number: int, items: Any) -> Item:
        try:
            with _add_note_of_item(number):
                value = items[number]
                if callable(self._keys):
                    key = self._keys(value)
                elif self._keys is not None:
                    key = self._keys[number]
                else:
                    key = value["__key__"] if _has_key(value) and not self._is_fixed else number_text(number)
                _check_key(key, number)
                digest = None if self._digest is None else self._digest(value)
                origin = digest_item(value) if self.compares and not _has_key(value) else 0
                members = value.members if isinstance(value, MemberSample) else {}
            if self._digest is not None and not isinstance(digest, str):
                fault = f"digest returned a {type(digest).__name__}, expected a str"
                raise TypeError(f"item {number}, key {key!r:.100}: {fault}")
            return Item(number, key, value, digest, origin, members=members)
        except Exception as exc:
            return self._failed(number, exc)


def _begin_worker(parent: int | None, worker: int) -> None:
    end_with_parent(parent)  # Hazard: torch's worker would live on if its queue is full when its parent is killed.


def each_once(batch: Iterable[Item], seen: set[str], stored_key: Callable[[str], str]) -> Iterator[Item]:
    """Yield items with their stored keys, and add these to `seen`. Raise ValueError if `seen` already contains a key."""
    for item in batch:
        if (key := stored_key(item.key)) != item.key:
            item = replace(item, key=key)
        if key in seen:
            raise _repeated_key(key)
        if key:  # `""` if the item could not be read
            seen.add(key)
        yield item


def _repeated_key(key: str, items: Any = None) -> ValueError:
    problem = f"two items have the key {key!r}; expected a different key for each item"
    if isinstance(items, TensorCache) and key in items:
        problem += f", but it is in {items._places(key)}: pass keys=, a function that makes different keys"
    return ValueError(problem)


def _not_sent(number: int, exc: Exception) -> TypeError:
    fault = f"item {number}: a worker process cannot send it: {type(exc).__name__}: {text_of(exc)}"
    error = TypeError(f"{fault}; return a value that can be pickled, or pass num_workers=0")
    return error.with_traceback(exc.__traceback__)


@contextlib.contextmanager
def add_note_of(describe: Callable[[], str]) -> Iterator[None]:
    """Add a note to an exception of the `with` block."""
    try:
        yield
    except InvalidKeyError:  # its message already names the item
        raise
    except Exception as exc:
        add_note(exc, f"tc.build: {describe()}")
        raise


def _add_note_of_item(number: int) -> contextlib.AbstractContextManager[None]:
    return add_note_of(lambda: f"this is item {number} of the source")


def _check_keys(keys: list[Any], count: int | None, items: Any) -> list[str]:
    if count is None:
        raise ValueError(
            "a list of keys needs a map-style dataset; for an iterable, pass a function of an item as keys="
        )
    if len(keys) != count:
        raise ValueError(f"{len(keys)} keys for {count} items, expected one key for each item")
    for number, key in enumerate(keys):
        _check_key(key, number, items)
    for key, num_uses in Counter(keys).most_common(1):
        if num_uses > 1:
            raise _repeated_key(key, items)
    return keys


def _check_key(key: Any, number: int, items: Any = None) -> None:
    try:
        check_key(key)
    except InvalidKeyError as exc:
        where = f" in {items._places(key)}" if isinstance(items, TensorCache) and key in items else ""
        raise exc.at(f"item {number}{where}") from None


def _open_without_cache(paths: list[Any]) -> TensorCache:
    """Open the shards in a list; refuse shards with a cache."""
    cache: TensorCache = open(paths)
    if any(shard.has_cache for shard in cache._store.shards):
        path = max(cache._store.shards, key=len).path
        cache.close()
        raise ValueError(f"{path} has a cache already; pass tc.open(…) of the list to make a new cache of its samples")
    cache._check_complete()
    return cache


def _has_key(value: Any) -> bool:
    return isinstance(value, Mapping) and "__key__" in value


def number_text(number: int) -> str:
    """Return the key that stands for the number of an item."""
    return f"{number:09d}"


def number_in(key: str) -> int | None:
    """Return the item number in a key, None if there is none."""
    return int(key) if key.isascii() and key.isdecimal() and key == number_text(int(key)) else None


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
