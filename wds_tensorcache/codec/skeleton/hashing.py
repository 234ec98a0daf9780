"""The cost of hashing, placing and comparing the keys of dicts and the elements of sets (FORMAT.md 2.6).

Hazard: keys come from files, and the author of a file can compute Python's hashes of everything but text. A dict whose keys
share hashes, or slots of its table, takes time quadratic in its length to build. So the work is counted from the hashes, in
the steps of CPython's own tables, before anything is inserted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from wds_tensorcache.codec.skeleton.key_costs import ONLY_COMPARED, comparison_cost, hash_cost
from wds_tensorcache.errors import FormatError

__all__ = ["KeyTables", "comparison_budget", "work_of_keys"]

MAX_WORK = 128  # for each key of one dict; of comparisons, for each byte of the skeleton
MAX_SET_WORK = 48  # for each element of one set
_ONE_BY_ONE = 8  # up to so many keys are looked at in pairs, and have no table
_MIN_SLOTS = 1024
_BY_ARRAYS = 48  # keys at a time from which on numpy's calls pay off
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_RUN = 10  # a set looks at so many neighbouring slots before it goes elsewhere


class _Table:
    """CPython's table of one dict or set, without its keys: their hashes, and which of them is in which slot."""

    def __init__(self, container: Any, is_set: bool) -> None:
        self.container = container  # so that its id stays its own
        self.is_set = is_set
        self.work = 0
        self.compared = 0  # what the comparisons cost, with both keys of each
        self._keys: list[Any] = []
        self._hashes = array("q")
        self._slots = array("i")  # the key in each slot, -1 if it is free
        self._mask = self._limit = 0
        # the first key with each hash, by the hash as bytes, whose own hashes cannot be chosen
        self._known: dict[bytes, int] | None = None
        self._repeated: dict[bytes, tuple[int, int]] = {}  # by hash: how many keys have it, and what one of each costs

    def add(self, keys: Sequence[Any], hashes: Sequence[int]) -> None:
        """Add keys, and what they cost to `work` and `compared`.

        Raises:
            FormatError: It is more than `MAX_WORK` for each key, or `MAX_SET_WORK` for each element.
        """
        first = begin = len(self._hashes)
        self._hashes.extend(hashes)
        self._keys.extend(keys)
        for earlier, number in self._repeats(begin):
            name = _as_bytes(self._hashes[number])
            count, total = self._repeated.get(name) or (1, comparison_cost(self._keys[earlier]))
            cost = comparison_cost(self._keys[number])
            self._repeated[name] = count + 1, total + cost
            self.compared += count * cost + total
            self._charge(count * cost)
        while first < len(self._hashes):
            if first >= self._limit:
                self._grow(first)
                self._place(0, first)
            last = min(self._limit, len(self._hashes))
            self._place(first, last)
            first = last

    def _repeats(self, begin: int) -> Iterable[tuple[int, int]]:
        """Return the keys from `begin` on that are not the first with their hash, behind the first or the one before."""
        if not begin:
            hashes = np.frombuffer(self._hashes, np.int64)
            home = hashes & ((1 << len(hashes).bit_length()) - 1)
            shared = np.flatnonzero(np.bincount(home)[home] > 1)  # far fewer to sort
            shared = shared[np.argsort(hashes[shared], kind="stable")]
            again = np.flatnonzero(hashes[shared][1:] == hashes[shared][:-1])
            return zip(shared[again].tolist(), shared[again + 1].tolist(), strict=True)
        if self._known is None:
            self._known = {}
            for number in range(begin):
                self._known.setdefault(_as_bytes(self._hashes[number]), number)
        repeats = []
        for number in range(begin, len(self._hashes)):
            earlier = self._known.setdefault(_as_bytes(self._hashes[number]), number)
            if earlier != number:
                repeats.append((earlier, number))
        return repeats

    def _grow(self, used: int) -> None:
        size = _MIN_SLOTS
        if self.is_set:
            while size <= used * (2 if used > 50_000 else 4):
                size *= 2
            self._limit = -(-3 * (size - 1) // 5)
        else:
            while size < 3 * used:
                size *= 2
            self._limit = 2 * size // 3
        self._mask = size - 1
        self._slots = array("i", b"\xff" * (4 * size))

    def _charge(self, work: int) -> None:
        self.work += work
        if self.work > (MAX_SET_WORK if self.is_set else MAX_WORK) * len(self._hashes):
            what = "elements of a set" if self.is_set else "keys of a dict"
            raise FormatError(f"{len(self._hashes)} {what} share too many hashes, or slots of their table")

    def _place(self, first: int, last: int) -> None:
        """Put the keys `[first, last)` into slots, after those that are there."""
        self._charge(last - first)
        if not self.is_set and last - first >= _BY_ARRAYS:
            self._place_many(first, last)
            return
        slots, mask = self._slots, self._mask
        for number in range(first, last):
            perturb = self._hashes[number] & _ALL_BITS
            home = slot = perturb & mask
            while slots[slot] >= 0:
                slot += 1
                if not self.is_set or home + _RUN > mask + 1 or slot == home + _RUN:  # nor are there neighbours left
                    self._charge(1)
                    perturb >>= 5
                    home = slot = (5 * home + perturb + 1) & mask
            slots[slot] = number

    def _place_many(self, first: int, last: int) -> None:
        """Place as `_place` does, all keys at a time: a slot goes to the earliest key that comes to it, and later keys move on.

        In the end each key has looked at the same slots as if the keys were placed one by one.
        """
        mask = np.int64(self._mask)
        slots = np.frombuffer(self._slots, np.int32)
        moving = np.arange(first, last, dtype=np.int32)  # ascending
        perturb = np.frombuffer(self._hashes, np.int64)[first:last].astype(np.uint64)
        home = perturb.astype(np.int64) & mask
        # of the keys that have a slot: an earlier key may still drive them out
        homes, perturbs = home.copy(), perturb.copy()
        while len(moving):
            owners = slots[home]
            is_open = (owners < 0) | (owners > moving)
            new, at = moving[is_open], home[is_open]
            slots[at[::-1]] = new[::-1]  # the last that is written stays: the earliest
            won = is_open & (slots[home] == moving)
            homes[moving[won] - first], perturbs[moving[won] - first] = home[won], perturb[won]
            driven = owners[won & (owners >= 0)]
            moving, home, perturb = moving[~won], home[~won], perturb[~won] >> np.uint64(5)
            self._charge(len(moving))
            home = (5 * home + (perturb & np.uint64(mask)).astype(np.int64) + 1) & mask
            if len(driven):  # they look at their slot once more, and move on
                moving = np.concatenate((moving, driven))
                order = np.argsort(moving)
                moving = moving[order]
                home = np.concatenate((home, homes[driven - first]))[order]
                perturb = np.concatenate((perturb, perturbs[driven - first]))[order]


def _as_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def comparison_budget(nbytes: int) -> int:
    """Return what the comparisons of all keys of a skeleton of this length may cost."""
    return 1000 + MAX_WORK * nbytes


def work_of_keys(keys: Sequence[Any], is_set: bool) -> int:
    """Return what comparing these keys costs if they are put into an empty dict or set one by one.

    Raises:
        FormatError: They take too much work to place.
    """
    if len(keys) <= _ONE_BY_ONE:
        return _compared_in_pairs([], keys)
    table = _check_new(keys, list(map(hash, keys)), is_set)
    return 0 if table is None else table.compared


def _compared_in_pairs(known: list[Any], keys: Sequence[Any]) -> int:
    """Return what comparing `keys` with those before them costs; one object with itself, nothing."""
    both = [*known, *keys]
    hashes = list(map(hash, both))
    if len(set(hashes)) == len(hashes):
        return 0
    return sum(
        comparison_cost(both[earlier]) + comparison_cost(both[number])
        for number in range(len(known), len(both))
        for earlier in range(number)
        if hashes[earlier] == hashes[number] and both[earlier] is not both[number]
    )


def _check_new(keys: Sequence[Any], hashes: list[int], is_set: bool, container: Any = None) -> _Table | None:
    if len(keys) <= ONLY_COMPARED and len(set(hashes)) == len(hashes):
        return None
    table = _Table(container, is_set)
    table.add(keys, hashes)
    return table


class KeyTables:
    """Counts what the keys of one skeleton cost, before they are inserted."""

    def __init__(self, nbytes: int) -> None:
        self._budget = 1000 + 10 * nbytes
        self._comparisons = comparison_budget(nbytes)
        self._tables: dict[int, _Table] = {}  # by the id of the container, which they keep alive

    def add(self, container: Any, keys: Sequence[Any]) -> None:
        """Raise FormatError if these keys take too much work to add to a dict, a set, or None, a new frozenset."""
        self._count_hashing(keys)
        if not container and len(keys) <= ONLY_COMPARED and len(set(map(hash, keys))) == len(keys):
            return
        if not isinstance(container, (dict, set, type(None))):
            return  # of a class in allow=, which is trusted
        self._comparisons -= self._add(container, keys)
        if self._comparisons < 0:
            raise FormatError("dict keys or set elements that take too long to compare")

    def _add(self, container: Any, keys: Sequence[Any]) -> int:
        """Return what comparing the keys with each other and with those of `container` costs."""
        table = self._tables.get(id(container))
        if table is None and len(container or ()) + len(keys) <= _ONE_BY_ONE:
            known = list(container or ())
            self._count_hashing(known)  # once more
            return _compared_in_pairs(known, keys)
        hashes = list(map(hash, keys))
        is_set = not isinstance(container, dict)
        if table is None and container:
            table = self._tables[id(container)] = _Table(container, is_set)
            table.add(known := list(container), list(map(hash, known)))
        if table is not None:
            before = table.compared
            table.add(keys, hashes)
            return table.compared - before
        table = _check_new(keys, hashes, is_set, container)
        if table is None:
            return 0
        if container is not None:
            self._tables[id(container)] = table
        return table.compared

    def _count_hashing(self, keys: Sequence[Any]) -> None:
        self._budget -= hash_cost(keys, self._budget)
        if self._budget < 0:
            raise FormatError("dict keys or set elements that take too long to hash")
