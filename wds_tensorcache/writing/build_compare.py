"""The comparison of items with their finished samples. It finds items that have changed, moved or been removed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import StaleCacheError, format_count
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.writing.build_failures import Failure
from wds_tensorcache.writing.build_items import NUM_COMPARED, Item, Items, number_in, number_text
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards

DIGEST = "digest.txt"  # the member that contains the digest of a sample's item


class Comparison:
    """The comparison of a rank's items with finished samples; messages name `folder`.

    Samples contain the digests that the caller's `digest` returned. Without it, if keys are positions, the indexes of shards
    contain digests of the items.
    """

    def __init__(self, items: Items, finished: FinishedShards, folder: str) -> None:
        self._items, self._finished, self._folder = items, finished, folder
        self.changed: list[int] = []  # numbers of the items that differ from those of the stored samples
        self._first_changed: Item | None = None
        # whether the source returns other values each time it is read; None until the first changed item is read again
        self._is_random: bool | None = None
        self._unknown: list[int] = []  # numbers of items of this rank that cannot be compared
        self._failures: list[Failure] = []  # of items with a sample that cannot be read
        self._num_compared = 0
        self._has_looked_ahead = self._has_warned = False

    def find_right(self, item: Item, places: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        """Return the place of the sample that was made from an item. The result is one of `places`, or None.

        For an item with a `digest`, only a sample with an equal `digest.txt` is right. Other digests are compared if both are
        known. If nothing can be compared, the first place is returned. Items that have changed or cannot be read are recorded.
        """
        items = self._items
        if item.failure is not None and places and (items.has_digests or items.compares):
            self._failures.append(replace(item.failure, key=item.key))
        if item.digest is not None:
            text = item.digest.encode()
            right = next((place for place in places if self._finished.read_member(*place, DIGEST) == text), None)
        elif items.compares and items.are_numbered and (item.origin or item.value is not None):
            right = self._find_equal(item, places)
        else:  # only the keys can be compared, or the item was not read
            return places[0] if places else None
        if places and right is None:
            self._first_changed = self._first_changed or item
            self.changed.append(item.number)
        return right

    def _find_equal(self, item: Item, places: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        self._num_compared += bool(places)
        for path, row in places:
            digest = self._finished.indexes[path].origin(row)[0]
            is_unknown = not digest or not item.origin or self._is_random
            if is_unknown and self._items.is_own(item.number):
                self._unknown.append(item.number)
            if is_unknown or digest == item.origin:
                return path, row
        return None

    def has_changed(self) -> bool:
        """Return whether an item has changed; False if the source is random."""
        first, items = self._first_changed, self._items
        if first is not None and self._is_random is None and items.compares and items.is_map:
            again = items[first.number]
            self._is_random = again.failure is None and again.origin != first.origin
            if self._is_random:
                self._unknown += filter(items.is_own, self.changed)
                self.changed.clear()
        return bool(self.changed)

    def check(self, after: int | None = None) -> None:
        """Look ahead, then report all differences between items and samples.

        `after` is the number of the last item that was compared, None at the end of the source. Raises StaleCacheError if
        items whose keys are their positions have changed or were removed. Warns of items that cannot be compared or read.
        """
        items = self._items
        # items of other ranks in an iterable are complete at its end
        if not self._has_looked_ahead and (items.is_map or after in (None, items.num_all)):
            self._has_looked_ahead = True
            self._look_ahead(items.num_all if after is None else after)
        faults = []
        if items.compares and self.has_changed():
            faults.append(f"item {self.changed[0]} is not the one from which its sample in {self._folder!r} was made")
            faults.append(f"of {self._num_compared} items compared, {len(self.changed)} differ")
            if items.world_size > 1:
                (path, _), *_ = self._finished.find(number_text(self.changed[0]))
                faults.append(f"the sample is in {path}: all ranks must have the same items in the same order")
        if items.are_numbered and (items.is_map or after is None):
            num_removed = sum(number >= items.num_all for number in self._numbers())
            if num_removed:
                fault = f"the source has {items.num_all} items, but {self._folder!r} has samples of {num_removed} more"
                faults.append(fault)
        if faults:
            raise StaleCacheError(
                f"{'; '.join(faults)}. The keys of the samples are the positions of the items, so items can only be "
                f"appended. Build a new version in another folder, with reuse={self._folder!r}, which computes what differs; "
                "or a new cache with keys= or digest=, whose items may move. If the source returns other values each time it "
                "is read, pass keys='position'"
            )
        self.warn()
        if after is None and self._failures:
            first = self._failures[0]
            fault = f"{format_count(len(self._failures), 'item')} with a sample in {self._folder!r} cannot be read, so nothing"
            message = f"tc.build: {fault} shows whether they have changed; the first is {first.place}: {first}"
            warnings.warn(message, stacklevel=user_level())

    def _numbers(self) -> Iterator[int]:
        keys = chain.from_iterable(index.keys for index in self._finished.indexes.values())
        return (number for number in map(number_in, keys) if number is not None)

    def _look_ahead(self, after: int) -> None:
        """Compare up to 64 items of other ranks, or after item `after`."""
        # Some of these items differ if an earlier item was inserted or removed, or if ranks have another order.
        items = self._items
        if not (items.compares and items.are_numbered) or self.changed:
            return
        ahead: Iterable[Item] = items.of_other_ranks
        if items.is_map:
            numbers = sorted(n for n in self._numbers() if n < items.num_all and (n > after or not items.is_own(n)))
            compared = {*(numbers[i] for i in spread(len(numbers), NUM_COMPARED - 1)), *numbers[-1:]}
            ahead = items.read(sorted(compared))
        for item in ahead:
            self.find_right(item, self._finished.find(item.key))

    def warn(self) -> None:
        """Warn once if items could not be compared with their finished samples."""
        if self._has_warned or not self._unknown:
            return
        self._has_warned = True
        numbers = ", ".join(map(str, self._unknown[:3])) + ", …" * (len(self._unknown) > 3)
        warnings.warn(
            f"tc.build: nothing shows whether items {numbers} ({len(self._unknown)} of {self._num_compared} compared) are "
            f"still those of the samples in {self._folder!r}, whose keys are their positions: these items are not plain "
            "values, are paths of missing files, or the samples were written without digests. Pass keys= or digest= for a "
            "new cache; or keys='position', if the order and number of the items never change",
            stacklevel=user_level(),
        )


def refuse_shared(shards: Mapping[str, ShardIndex], pattern: ShardPattern, keys: Set[str], remedy: str) -> None:
    """Raise ValueError if other ranks have samples with this rank's `keys`. This rank writes `pattern`."""
    for path, index in shards.items():
        if not pattern.covers(os.path.basename(path)) and (shared := [key for key in index.keys if key in keys]):
            raise ValueError(
                f"{path} contains {len(shared)} samples of items of this rank, for example {shared[0]!r}: either two "
                "items have the same key, or the ranks have another batch_size, or their items are not in the same order; "
                f"mend that, and {remedy}"
            )
