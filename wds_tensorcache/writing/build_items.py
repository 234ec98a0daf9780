"""The items of a dataset with their keys and digests, or one rank's part of them, optionally read by worker processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from xxhash import xxh3_64, xxh3_64_intdigest

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import InvalidKeyError, add_note
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.shards.names import check_key

__all__ = ["NO_ITEMS", "Item", "Items", "digest_item", "each_once", "number_in", "number_text"]

NO_ITEMS = "the source has no items"
_NUM_COMPARED = 64
_COUNT, _FLOAT = Struct("<cQ").pack, Struct("<cd").pack
_CONSTANTS = {None: b"N", True: b"T", False: b"F"}
_ARRAYS, _TENSORS = (np.ndarray, np.memmap), (torch.Tensor, torch.nn.Parameter)
_KINDS = "biufcSUmM"  # of numpy dtypes whose bytes are their values


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a dataset; `value` and `digest` are None if the item was not read, because its sample is finished.

    `origin` is the item's `digest_item`; 0 if there is none, or if the key of the item does not depend on its position.
    """

    number: int
    key: str
    value: Any = None
    digest: str | None = None
    origin: int = 0


class Items(Dataset[Item]):
    """The items of a map-style dataset or an iterable, or one rank's part of them: whole batches.

    The rank of a batch depends only on the number of the batch and the world size. So ranks need not communicate, and a batch
    has the same items for any world size. Of each `world_size` consecutive batches, every rank gets one, in pseudorandom
    order. So if the shards of one rank are lost, any other number of ranks shares its batches evenly.

    Attributes:
        num_items: Number of items of this rank; None if unknown.
        num_all: Number of items of all ranks; for an iterable, of those found so far.
        batch_size: Number of items in each batch but the last.
        is_map: True for a map-style dataset, False for an iterable.
        has_digests: True if the caller gives items a digest.
        are_numbered: True if the keys of items are their numbers. If the items of the source have a `__key__`, it becomes
            False when the first of them is read.
        rank, world_size: Rank of this process, and number of ranks.

    Raises:
        InvalidKeyError: Some reader of shards would misread a key.
        TypeError: `items` is not a dataset.
        ValueError: The number of keys differs from the number of items; a key occurs twice; or `items` is an iterable, and
            workers or a list of keys are given.
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
    ) -> None:
        batch_size, num_workers = as_int("batch_size", batch_size), as_int("num_workers", num_workers)
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size={batch_size}, num_workers={num_workers}: expected at least 1, and at least 0")
        what = type(items).__name__
        if isinstance(items, (Mapping, DataLoader, str, bytes)):
            hint = "its dataset, since build makes batches" if isinstance(items, DataLoader) else "a list of its items"
            raise TypeError(f"a {what} cannot be a dataset of items; pass {hint}")
        count = _length(items)
        is_map = count is not None and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
        if not is_map and not isinstance(items, Iterable):
            raise TypeError(f"a {what} has neither a length and [i] nor an iterator: it cannot be a dataset")
        if not is_map and num_workers:
            raise ValueError(f"{what} has no length and [i], which num_workers={num_workers} needs; use num_workers=0")
        if keys is None and isinstance(items, Cache):
            keys = items.keys()
        self._is_fixed = isinstance(keys, str) and keys == "position"
        keys = None if self._is_fixed else keys
        self.are_numbered = keys is None
        if keys is not None and not callable(keys):
            keys = list(keys)
            if not is_map:
                raise ValueError(
                    "a list of keys needs a map-style dataset; for an iterable, pass a function of an item as keys="
                )
            if len(keys) != count:
                raise ValueError(f"{len(keys)} keys for {count} items, expected one key for each item")
            for number, key in enumerate(keys):
                _check_key(key, number)
            for key, num_uses in Counter(keys).most_common(1):
                if num_uses > 1:
                    raise ValueError(f"two items have the key {key!r}; expected a different key for each item")
        self._items, self._keys, self._digest, self.is_map = items, keys, digest, is_map
        self.batch_size = min(batch_size, sys.maxsize)  # which itertools can count
        self._num_workers, self.has_digests = num_workers, digest is not None
        self.rank, self.world_size = rank, world_size
        self._count, self.num_all = count or 0, (count or 0) if is_map else 0
        self.num_items = None if count is None else sum(map(len, self._own_batches()))

    @property
    def compares(self) -> bool:
        """True if items are compared by `digest_item`, since nothing else shows whether an item has changed its place."""
        return self._keys is None and not self._is_fixed and not self.has_digests

    @property
    def is_empty(self) -> bool:
        """True until an item of any rank was found."""
        return not self.num_all

    def _owns(self, batch_number: int) -> bool:
        """Return whether a batch is one of this rank's."""
        group, place = divmod(batch_number, self.world_size)
        shift = xxh3_64_intdigest(b"%d %d" % (self.world_size, group)) if self.world_size > 1 else 0
        return (place + shift) % self.world_size == self.rank

    def _own_batches(self) -> Iterator[range]:
        """Yield the numbers of the items in each batch of this rank, for a source of known length."""
        for batch_number, begin in enumerate(range(0, self._count, self.batch_size)):
            if self._owns(batch_number):
                yield range(begin, min(begin + self.batch_size, self._count))

    def batches(self, is_done: Callable[[str], bool]) -> Iterator[list[Item]]:
        """Yield this rank's items in the same batches, whatever `is_done` returns.

        For a map-style dataset whose keys are known without reading, a batch is not read if all its keys are done.
        """
        items = self._read_some(is_done) if self.is_map else self._iterate()
        has_key: bool | None = None
        while batch := list(itertools.islice(items, self.batch_size)):
            for item in batch if self._keys is None else ():
                if item.value is not None:
                    if has_key not in (None, _has_key(item.value)):
                        what = f"item {item.key!r} {'lacks' if has_key else 'has'} a '__key__'"
                        raise ValueError(f"{what}, unlike the items before it: pass keys=")
                    has_key = _has_key(item.value)
                    self.are_numbered = not has_key
            yield batch

    def find_changed(self, stored: Mapping[int, int]) -> tuple[list[int], int, list[int]]:
        """Compare items whose keys are their numbers with the digests of their finished samples.

        All items of a list or tuple are compared. Of another map-style dataset, 64 items are read, at equal distances, and the
        last one: if an item before it was inserted or removed, it differs. An iterable is read as a whole later. Up to 64 items
        of other ranks are compared, too: if ranks have other items, or another order, some of these differ. If the first item
        that differs has another value when it is read once more, items cannot be compared.

        Args:
            stored: Digest of the item of each finished sample, by the number in its key; 0 if unknown.

        Returns:
            Numbers of the items that differ, number of items compared, and numbers of those for which a digest is unknown.
        """
        if not self.compares or not self.is_map:
            return [], 0, []
        numbers = [number for batch in self._own_batches() for number in batch if number in stored]
        own = set(numbers)
        others = sorted(
            number for number, digest in stored.items() if digest and number < self._count and number not in own
        )
        others = [others[at] for at in spread(len(others), _NUM_COMPARED)]
        if isinstance(self._items, (list, tuple)):
            numbers = sorted([*numbers, *others])
            read: Iterable[Item] = map(self.__getitem__, numbers)
        else:
            some = {*(numbers[at] for at in spread(len(numbers), _NUM_COMPARED)), *numbers[-1:]}
            numbers = sorted({*some, *others})
            read = self._load(numbers, min(len(numbers), self._num_workers))
        changed, unknown = list[int](), list[int]()
        first_changed: Item | None = None
        for item in read:
            if _has_key(item.value):
                self.are_numbered = False
                return [], 0, []
            digest = stored[item.number]
            if not digest or not item.origin:
                unknown += [item.number] if item.number in own else []
            elif digest != item.origin:
                first_changed = first_changed or item
                changed.append(item.number)
        if first_changed is not None and self[first_changed.number].origin != first_changed.origin:
            # the source returns other values each time it is read, for example random crops
            changed, unknown = [], sorted([*unknown, *own.intersection(changed)])
        return changed, len(numbers), unknown

    def _read_some(self, is_done: Callable[[str], bool]) -> Iterator[Item]:
        """Yield the items. If all keys of a batch are done, and were known without reading it, its items have no values."""
        keys = self._known_keys(is_done)
        wanted: list[int] = []
        for batch in self._own_batches():
            if keys is None or not all(is_done(keys[number]) for number in batch):
                wanted += batch
        read, is_wanted = self._load(wanted, self._num_workers), set(wanted)
        for number in itertools.chain.from_iterable(self._own_batches()):
            if number in is_wanted:
                yield next(read)
            elif keys is not None:
                yield Item(number, keys[number])

    def _iterate(self) -> Iterator[Item]:
        """Yield the items of an iterable; items of other ranks are skipped."""
        values = iter(self._items)
        for number in itertools.count():
            with _noting_item(number):
                try:
                    value = next(values)
                except StopIteration:
                    return
            self.num_all = number + 1
            if self._owns(number // self.batch_size):
                yield self._item(number, value)

    def _known_keys(self, is_done: Callable[[str], bool]) -> Sequence[str] | None:
        """Return the keys if they are known without reading the items."""
        if self._keys is not None:
            return None if callable(self._keys) else self._keys
        keys = [number_text(number) for number in range(self._count)]
        if any(map(is_done, keys)):
            if self._is_fixed:
                return keys
            # Hazard: items may have a `__key__` that looks like a number, so the first item is read
            (first,) = self._load([0], min(1, self._num_workers))
            self.are_numbered = not _has_key(first.value)
            return None if _has_key(first.value) else keys
        return keys

    def _load(self, numbers: list[int], num_workers: int) -> Iterator[Item]:
        batches = DataLoader(
            self, batch_size=self.batch_size, sampler=numbers, num_workers=num_workers, collate_fn=list
        )
        for batch in batches:
            yield from batch

    def __getitem__(self, number: int) -> Item:  # for worker processes
        with _noting_item(number):
            value = self._items[number]
        return self._item(number, value)

    def _item(self, number: int, value: Any) -> Item:
        with _noting_item(number):
            if callable(self._keys):
                key = self._keys(value)
            elif self._keys is not None:
                key = self._keys[number]
            else:
                key = value["__key__"] if _has_key(value) and not self._is_fixed else number_text(number)
            _check_key(key, number)
            digest = None if self._digest is None else self._digest(value)
            origin = digest_item(value) if self.compares and not _has_key(value) else 0
        if self._digest is not None and not isinstance(digest, str):
            what = f"digest returned a {type(digest).__name__}, expected a str"
            raise TypeError(f"item {number}, key {key!r:.100}: {what}")
        return Item(number, key, value, digest, origin)


def each_once(batch: Iterable[Item], seen: set[str], stored_key: Callable[[str], str]) -> Iterator[Item]:
    """Yield items, each with its `stored_key`, and add the keys to `seen`; raise ValueError if it already contains a key."""
    for item in batch:
        if (key := stored_key(item.key)) != item.key:
            item = replace(item, key=key)
        if item.key in seen:
            raise ValueError(f"two items have the key {item.key!r}; expected a different key for each item")
        seen.add(item.key)
        yield item


@contextlib.contextmanager
def _noting_item(number: int) -> Iterator[None]:
    try:
        yield
    except InvalidKeyError:
        raise  # its message names the item
    except Exception as exc:
        add_note(exc, f"tc.build: this is item {number} of the source")
        raise


def _check_key(key: object, number: int) -> None:
    try:
        check_key(key)
    except InvalidKeyError as exc:
        raise exc.at(f"item {number}") from None


def _has_key(value: Any) -> bool:
    return isinstance(value, Mapping) and "__key__" in value


def number_text(number: int) -> str:
    """Return the key of an item without another key."""
    return f"{number:09d}"


def number_in(key: str) -> int | None:
    """Return the number of the item whose key this is; None if the key is not a number."""
    return int(key) if key.isascii() and key.isdecimal() and key == number_text(int(key)) else None


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def digest_item(value: Any) -> int:
    """Return the digest of an item that consists of plain values; 0 if it contains anything else.

    The digest is the XXH3-64 of the following bytes, or 1 if that is 0. Each value begins with a letter and, where its length
    can vary, a count of 8 bytes, so that different values have different bytes. All numbers are little-endian.

    - None, True and False: `N`, `T`, `F`.
    - int: `i`, count, two's complement. float: `f`, 8 bytes. str: `s`, count, UTF-8. bytes: `b`, count, the bytes.
    - Paths: `p`, length of the file, then the path as a str. The file is not read. The length is 2^64 - 1 for a folder, and for
      a path that is not one of this system (`PurePath`); a file that does not exist has no digest.
    - list, tuple and dict: `l`, `t` or `d`, count, then the values, or keys and values, in their order.
    - Arrays and numbers of numpy, and tensors: `a` or `x`, number of dimensions, the dtype as a str, the dimensions, then the
      bytes in C order.

    Subclasses, such as those of dict, and all other types have no digest: their content may not be all that matters.

    Memory: nothing is copied, except arrays and tensors that are not contiguous, or not in the memory of the CPU.
    """
    state = xxh3_64()
    try:
        _feed(state.update, value)
    except (_NoDigest, RuntimeError, TypeError, ValueError):  # also of tensors and arrays of exotic types
        return 0
    return state.intdigest() or 1


class _NoDigest(Exception):
    """An item has a part of a type without a digest."""


def _feed(update: Any, value: Any) -> None:
    kind = type(value)
    if kind is str:
        _feed_bytes(update, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is int:
        _feed_bytes(update, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif value is None or kind is bool:
        update(_CONSTANTS[value])
    elif kind is float:
        update(_FLOAT(b"f", value))
    elif kind is bytes:
        _feed_bytes(update, b"b", value)
    elif kind is dict:
        update(_COUNT(b"d", len(value)))
        for key, part in value.items():
            _feed(update, key)
            _feed(update, part)
    elif kind is list or kind is tuple:
        update(_COUNT(b"l" if kind is list else b"t", len(value)))
        for part in value:
            _feed(update, part)
    elif kind in _ARRAYS or isinstance(value, np.generic):
        _feed_array(update, b"a", value)
    elif kind in _TENSORS:
        _feed_tensor(update, value.detach())
    elif isinstance(value, PurePath):
        update(_COUNT(b"p", _file_nbytes(value)))
        _feed(update, os.fspath(value))
    else:
        raise _NoDigest


def _feed_bytes(update: Any, letter: bytes, raw: bytes) -> None:
    update(_COUNT(letter, len(raw)))
    update(raw)


def _feed_array(update: Any, letter: bytes, array: Any) -> None:
    if array.dtype.kind not in _KINDS:
        raise _NoDigest
    _feed_start(update, letter, array.dtype.str, array.shape)
    update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _feed_tensor(update: Any, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise _NoDigest
    _feed_start(update, b"x", str(tensor.dtype), tensor.shape)
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    update(plain.reshape(-1).view(torch.uint8).numpy())


def _feed_start(update: Any, letter: bytes, dtype: str, shape: Any) -> None:
    update(_COUNT(letter, len(shape)))
    _feed(update, dtype)
    for dim in shape:
        update(_COUNT(b"n", dim))


def _file_nbytes(path: PurePath) -> int:
    if isinstance(path, Path):
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            raise _NoDigest from None
        if stat.S_ISREG(found.st_mode):
            return found.st_size
    return (1 << 64) - 1
