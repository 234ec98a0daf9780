"""Differences between two caches: keys, tensors, small values and other members."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.sample import encode_sample
from wds_tensorcache.codec.tensor_names import component, join_path
from wds_tensorcache.codec.tree import ATOMS, DICTS, SEQUENCES, flatten
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.inspecting.tree import short_dtype
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.description import shown_value

_PART_NBYTES = 1 << 22
_NUM_AT_ONCE = 1 << 20  # elements in the widest dtype at a time
_WHOLE = "the sample"  # in place of an empty path


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor or small value of a sample that differs.

    Attributes:
        key: Key of the sample.
        name: Name of the tensor, path of the value, or suffix of the other member with its dot.
        what: The difference, for people.
        num_different: Number of elements with different bits; None unless both are tensors of one dtype and shape.
        max_difference: Largest absolute difference of two elements, as float64; None unless both are tensors of numbers with
            one shape. Two NaN or two equal infinities have the difference 0. It is infinite if only one element is NaN or
            infinite.
    """

    key: str
    name: str
    what: str
    num_different: int | None = None
    max_difference: float | None = None


@dataclass(slots=True)
class CacheDiff:
    """The result of `diff_caches`.

    Attributes:
        only_first, only_second: Keys of samples that only one of the caches has, in its order.
        num_equal: Number of samples that are equal in both.
        num_changed: Number of samples that differ.
        changes: Differences of these samples.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    num_equal: int = 0
    num_changed: int = 0
    changes: list[Change] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if both caches have the same samples, bit for bit; their order does not count."""
        return not (self.only_first or self.only_second or self.num_changed)


def diff_caches(
    first: TensorCache, second: TensorCache, progress: Callable[[int, int], object] | None = None
) -> CacheDiff:
    """Compare two caches sample by sample: each tensor bit for bit, all small values, and other members.

    Two samples are equal if the digests of their tensors and the bytes of their skeletons are equal. Then no tensor is read,
    so damaged tensors are not noticed; `tc.verify` finds them. Fingerprints and the order of the samples are not compared. If a
    key occurs several times, the samples with this key are compared in order.

    Args:
        first, second: Caches, or views of them.
        progress: Called with the number of samples that were compared, and of all samples in `first`.

    Raises:
        FormatError: A shard is damaged.

    Memory: the tensors of one sample of each cache.
    """
    result = CacheDiff()
    for number, key in enumerate(first.keys()):
        other = _counterpart(first, second, key, number)
        if other is None:
            result.only_first.append(key)
        elif changes := list(_compare(key, _Stored(first, number), _Stored(second, other))):
            result.num_changed += 1
            result.changes += changes
        else:
            result.num_equal += 1
        if progress is not None:
            progress(number + 1, len(first))
    result.only_second += [
        key for number, key in enumerate(second.keys()) if _counterpart(second, first, key, number) is None
    ]
    return result


def _counterpart(mine: TensorCache, other: TensorCache, key: str, number: int) -> int | None:
    """Return the index in the other cache of the sample that corresponds to sample `number`, which has this key."""
    found = other._find_all(key)
    if not found:
        return None
    same = mine._find_all(key)
    place = same.index(number) if len(same) > 1 else 0
    return found[place] if place < len(found) else None


class _Stored:
    """One sample of a cache: its shard, and its row in the shard."""

    def __init__(self, cache: TensorCache, number: int) -> None:
        self.cache, self.number = cache, number
        self.shard, self.row = cache._store.locate(cache._at(number))

    def load(self) -> Any:
        """Return the sample with lazy tensors."""
        return self.cache[self.number]

    def member(self, suffix: str) -> tuple[int, int] | None:
        """Return begin and end of another member in the shard, in bytes; None if there is none."""
        at = self.shard.find_members(np.array([self.row]), suffix).item()
        if at < 0:
            return None
        members = self.shard.index.members[suffix]
        begin = members.begin.item(at)
        return begin, begin + members.nbytes.item(at)

    def has_file_of(self, other: _Stored) -> bool:
        """Return whether the shards are one file, as in versions of a cache, which share shards by hard links.

        At urls, they are one object if url and tag are equal; without a tag, nothing shows that it has not changed.
        """
        one, two = self.shard, other.shard
        if one.file.identity != two.file.identity:
            return False
        if one.is_remote:
            return one.path == two.path and one.file.identity[1] is not None
        return os.path.samefile(one.path, two.path)


def _compare(key: str, one: _Stored, two: _Stored) -> Iterator[Change]:
    if one.row == two.row and one.has_file_of(two):
        return
    if not _have_equal_digests(one, two):
        yield from _compare_samples(key, one.load(), two.load())
    for suffix in dict.fromkeys([*one.shard.index.members, *two.shard.index.members]):
        what = _compare_members(one, two, suffix)
        if what is not None:
            yield Change(key, f".{suffix}", what)


def _have_equal_digests(one: _Stored, two: _Stored) -> bool:
    """Return whether digests, lengths and skeletons are equal. Cost: two reads of a few hundred bytes."""
    each = one, two
    digests = [it.shard.columns.digest.item(it.row) for it in each]
    if digests[0] != digests[1] or not digests[0]:  # 0: another tool wrote the tensors
        return False
    if one.shard.layout(one.row).nbytes != two.shard.layout(two.row).nbytes:
        return False
    bodies = [skeleton[begin:] for skeleton, begin in (it.shard.skeleton(it.row) for it in each)]
    return bodies[0] == bodies[1]


def _compare_members(one: _Stored, two: _Stored, suffix: str) -> str | None:
    places = one.member(suffix), two.member(suffix)
    if places[0] is None or places[1] is None:
        return None if places[0] is places[1] else f"is only in the {'first' if places[1] is None else 'second'} cache"
    begin, end = places[0]
    other, other_end = places[1]
    if end - begin != other_end - other:
        return f"has {end - begin:,} bytes, and {other_end - other:,} bytes in the second cache"
    for at in range(0, end - begin, _PART_NBYTES):
        nbytes = min(_PART_NBYTES, end - begin - at)
        parts = [it.shard.file.read(first + at, first + at + nbytes) for it, first in ((one, begin), (two, other))]
        if parts[0] != parts[1]:
            return "has other bytes"
    return None


def _compare_samples(key: str, first: Any, second: Any) -> Iterator[Change]:
    mine, other = flatten(first), flatten(second)
    for name in dict.fromkeys([*mine, *other]):
        if name not in mine or name not in other:
            yield Change(key, name, f"is a tensor only in the {'first' if name in mine else 'second'} cache")
            continue
        yield from _compare_tensors(key, name, mine[name], other[name])
    for name, what in _compare_values(first, second):
        yield Change(key, name, what)


def _compare_tensors(key: str, name: str, first: Lazy, second: Lazy) -> Iterator[Change]:
    forms = [f"{short_dtype(each.dtype)}{list(each.shape)} ({type(each).__name__})" for each in (first, second)]
    if forms[0] != forms[1]:
        shown = [form.rpartition(" ")[0] if type(first) is type(second) else form for form in forms]
        what = f"is {shown[0]}, and {shown[1]} in the second cache"
        difference = None
        if first.shape == second.shape:
            values = [_as_tensor(each.load()) for each in (first, second)]
            if all(isinstance(value, torch.Tensor) for value in values):
                difference = _max_difference(*values)
        if difference is not None:
            what += f"; the numbers differ by up to {difference:.4g}" if difference else "; the numbers are equal"
        yield Change(key, name, what, None, difference)
        return
    one, two = (_as_tensor(each.load()) for each in (first, second))
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):  # texts, for example
        if one.tobytes() != two.tobytes():
            yield Change(key, name, "has other elements")
        return
    if not one.numel():
        return
    bits = [each.contiguous().reshape(-1).view(torch.uint8).reshape(each.numel(), each.itemsize) for each in (one, two)]
    if torch.equal(*bits):
        return
    num_different = int((bits[0] != bits[1]).any(1).sum())
    difference = _max_difference(one, two)
    what = f"{num_different:,} of {one.numel():,} elements differ"
    if difference is not None:
        what += f", by up to {difference:.4g}"
    yield Change(key, name, what, num_different, difference)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except TypeError:
            return value
    return value


def _max_difference(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Return the largest difference of two tensors of one shape; NaN equals NaN. None if there is none, or no arithmetic."""
    most = []
    for begin in range(0, first.numel(), _NUM_AT_ONCE):
        one, two = (each.flatten()[begin : begin + _NUM_AT_ONCE] for each in (first, second))
        try:
            wide = [_widen(each) for each in (one, two)]
        except (RuntimeError, TypeError):  # dtypes without arithmetic, such as packed float4
            return None
        same = (wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))
        with np.errstate(all="ignore"):
            difference = np.where(same, 0, np.abs(wide[0] - wide[1]))
        most.append(float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0)))
    return max(most) if first.numel() else None


def _widen(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor in numpy's widest dtype, which has all integers of 64 bits on most machines."""
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy().astype(np.clongdouble)
    number = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    return number.numpy().astype(np.longdouble)


def _compare_values(first: Any, second: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the difference of each value.

    Hazard: a hostile sample may nest deeply, contain itself, or contain one list many times over. So no function calls itself,
    and each pair of containers is compared once.
    """
    met: set[tuple[int, int]] = set()
    todo = [("", first, second)]
    while todo:
        path, one, two = todo.pop()
        if isinstance(one, Lazy) or isinstance(two, Lazy):
            if isinstance(one, Lazy) and isinstance(two, Lazy) and one.name != two.name:
                yield path or _WHOLE, f"is the tensor {one.name!r:.100}, and {two.name!r:.100} in the second cache"
            continue  # otherwise `flatten` finds them
        if (id(one), id(two)) in met:
            continue
        inner: list[tuple[str, Any, Any]] = []
        if type(one) is not type(two):
            yield path or _WHOLE, f"is a {type(one).__name__}, and a {type(two).__name__} in the second cache"
        elif type(one) in DICTS:
            met.add((id(one), id(two)))
            for position, key in enumerate(dict.fromkeys([*one, *two])):
                name = join_path(path, component(key, position))
                if key in one and key in two:
                    inner.append((name, one[key], two[key]))
                elif not isinstance((one if key in one else two)[key], Lazy):
                    yield name, f"is only in the {'first' if key in one else 'second'} cache"
        elif isinstance(one, SEQUENCES):
            met.add((id(one), id(two)))
            if len(one) != len(two):
                yield path or _WHOLE, f"has {len(one):,} items, and {len(two):,} in the second cache"
            else:
                inner += ((join_path(path, str(at)), *pair) for at, pair in enumerate(zip(one, two, strict=True)))
        elif not _is_same(one, two):
            yield path or _WHOLE, f"is {shown_value(one)}, and {shown_value(two)} in the second cache"
        todo += reversed(inner)


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two values of one type, neither dicts nor sequences, are equal bit for bit."""
    if type(one) in ATOMS:
        return repr(one) == repr(two)  # which tells NaN, 0.0 and -0.0 apart
    try:
        return encode_sample(one) == encode_sample(two)
    except EncodeError:
        return False
