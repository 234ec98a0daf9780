"""Differences between two caches: keys, tensors, small values and other members."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import component, join_path
from wds_tensorcache.codec.sample import encode_sample
from wds_tensorcache.codec.tree import ATOMS, DICTS, SEQUENCES, flatten
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.inspecting.text import tensor_text
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.description import value_text

_NUM_AT_ONCE = 1 << 20  # elements in the widest dtype at a time
_WHOLE = "the sample"  # in place of an empty path


@dataclass(frozen=True, slots=True)
class Change:
    """A difference in one sample's tensor, small value or other member.

    Attributes:
        key: Key of the sample.
        name: Name of the tensor, path of the value, or suffix of the other member with its dot.
        what: The difference in words.
        num_different: Number of elements with different bits; None unless both are tensors of the same dtype and shape.
        max_difference: Largest absolute difference of two elements, as float64; None unless both are tensors of numbers with
            the same shape. Two NaN or two equal infinities have the difference 0. A NaN or an infinity and any other number
            have an infinite difference.
    """

    key: str
    name: str
    what: str
    num_different: int | None = None
    max_difference: float | None = None


@dataclass(slots=True)
class CacheDiff:
    """The differences between two caches.

    Attributes:
        only_first, only_second: Keys of the samples that only the first or only the second cache contains.
        num_equal, num_changed: Numbers of equal and of different samples among the samples in both caches.
        changes: All differences, in the order of the first cache.
        num_without: Number of samples in the shards of both caches that lack the cache, and so are not compared. A view counts
            all its shards.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    num_equal: int = 0
    num_changed: int = 0
    changes: list[Change] = field(default_factory=list)
    num_without: int = 0

    @property
    def is_equal(self) -> bool:
        return not (self.only_first or self.only_second or self.num_changed)


def diff_caches(first: TensorCache, second: TensorCache, progress: Callable[[int, int], object]) -> CacheDiff:
    """Compare two caches sample by sample.

    Tensors are compared bit for bit. Small values and other members are compared, too. If the digests of two samples' tensors
    and the bytes of their skeletons are equal, the tensors are not read. Damage in them is then not noticed; `tc.verify` finds
    it. If a key occurs several times, the samples with this key are compared in order. Fingerprints, and the order of samples
    and of keys in dicts, are not compared. `progress` is called with the number of
    compared samples, and of all samples in `first`.

    Raises:
        OSError: A shard cannot be read.
        FormatError: A shard is damaged, or has changed.

    Memory: the tensors of one sample of each cache.
    """
    result = CacheDiff()
    for index, key in enumerate(first.keys()):
        other = _find_counterpart(first, second, key, index)
        if other is None:
            result.only_first.append(key)
        elif changes := list(_compare(key, _Stored(first, index), _Stored(second, other))):
            result.num_changed += 1
            result.changes += changes
        else:
            result.num_equal += 1
        progress(index + 1, len(first))
    for index, key in enumerate(second.keys()):
        if _find_counterpart(second, first, key, index) is None:
            result.only_second.append(key)
    shards = [*first._store.shards, *second._store.shards]
    result.num_without = sum(len(shard.index.keys) - len(shard) for shard in shards)
    return result


def _find_counterpart(cache: TensorCache, other: TensorCache, key: str, index: int) -> int | None:
    indices = other._find_all(key)
    place = cache._find_all(key).index(index)
    return indices[place] if place < len(indices) else None


class _Stored:
    def __init__(self, cache: TensorCache, index: int) -> None:
        self.cache, self.index = cache, index
        self.shard, self.row = cache._store.locate(cache._at(index))
        self.digest = self.shard.columns.digest.item(self.row)  # 0 if another tool wrote the tensors

    def skeleton(self) -> bytes:
        stored, begin = self.shard.skeleton(self.row)
        return stored[begin:]

    def member(self, suffix: str) -> bytes | None:
        position = self.shard.find_members(np.array([self.row]), suffix).item()
        return None if position < 0 else self.shard.file.read(*self.shard.member_extent(suffix, position))


def _compare(key: str, one: _Stored, two: _Stored) -> Iterator[Change]:
    has_same_digest = one.digest == two.digest != 0
    if not has_same_digest or one.skeleton() != two.skeleton():
        first, second = one.cache[one.index], two.cache[two.index]
        yield from _compare_samples(key, first, second)
    for suffix in dict.fromkeys([*one.shard.index.members, *two.shard.index.members]):
        difference_text = _compare_members(one, two, suffix)
        if difference_text is not None:
            yield Change(key, f".{suffix}", difference_text)


def _compare_members(one: _Stored, two: _Stored, suffix: str) -> str | None:
    first, second = one.member(suffix), two.member(suffix)
    if first == second:
        return None
    if first is None or second is None:
        return f"is only in the {'first' if second is None else 'second'} cache"
    if len(first) != len(second):
        return f"has {len(first):,} bytes, and {len(second):,} bytes in the second cache"
    return "has other bytes"


def _compare_samples(key: str, first: Any, second: Any) -> Iterator[Change]:
    tensors, other_tensors = flatten(first), flatten(second)
    for name in dict.fromkeys([*tensors, *other_tensors]):
        if name in tensors and name in other_tensors:
            yield from _compare_tensors(key, name, tensors[name], other_tensors[name])
        else:
            yield Change(key, name, f"is a tensor only in the {'first' if name in tensors else 'second'} cache")
    for name, difference_text in _compare_values(first, second, tensors.keys() & other_tensors.keys()):
        yield Change(key, name, difference_text)


def _compare_tensors(key: str, name: str, first: Lazy, second: Lazy) -> Iterator[Change]:
    one, two = _as_tensor(first.load()), _as_tensor(second.load())
    has_numbers = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape
    difference = None
    if type(first) is not type(second) or first.dtype != second.dtype or first.shape != second.shape:
        texts = [tensor_text(lazy) for lazy in (first, second)]
        if type(first) is not type(second):
            texts = [f"{text} ({type(lazy).__name__})" for text, lazy in zip(texts, (first, second), strict=True)]
        difference_text = f"is {texts[0]}, and {texts[1]} in the second cache"
        if has_numbers and (difference := _max_difference(one, two)) is not None:
            difference_text += (
                f"; the numbers differ by up to {difference:.4g}" if difference else "; the numbers are equal"
            )
        yield Change(key, name, difference_text, None, difference)
    elif not has_numbers:  # texts, for example
        if one.tobytes() != two.tobytes():
            yield Change(key, name, "has other elements")
    elif one.numel():
        bits = [part.contiguous().reshape(-1).view(torch.uint8).reshape(one.numel(), -1) for part in (one, two)]
        if torch.equal(*bits):
            return
        num_different = int((bits[0] != bits[1]).any(1).sum())
        difference = _max_difference(one, two)
        difference_text = f"{num_different:,} of {one.numel():,} elements differ"
        difference_text += f", by up to {difference:.4g}" if difference is not None else ""
        yield Change(key, name, difference_text, num_different, difference)


def _as_tensor(value: Any) -> Any:
    try:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    except TypeError:
        return value


def _max_difference(first: torch.Tensor, second: torch.Tensor) -> float | None:
    largest = []
    for begin in range(0, first.numel(), _NUM_AT_ONCE):
        try:
            one, two = (_widen(tensor.flatten()[begin : begin + _NUM_AT_ONCE]) for tensor in (first, second))
        except (RuntimeError, TypeError):  # dtypes without arithmetic, such as packed float4
            return None
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        with np.errstate(all="ignore"):
            difference = np.where(same, 0, np.abs(one - two))
        largest.append(float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0)))
    return max(largest, default=None)


def _widen(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # on most machines, numpy's widest dtype has all integers of 64 bits
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy().astype(np.clongdouble)
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).numpy().astype(np.longdouble)


def _compare_values(first: Any, second: Any, in_both: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the path of each value that differs, and a description."""
    # Hazard: a hostile sample may nest deeply, contain itself, or contain one list many times. So no function calls itself,
    # and each pair of containers is compared once.
    met: set[tuple[int, int]] = set()
    todo = [("", first, second)]
    while todo:
        path, one, two = todo.pop()
        place, inner = path or _WHOLE, list[tuple[str, Any, Any]]()
        if isinstance(one, Lazy) or isinstance(two, Lazy):
            if isinstance(one, Lazy) and isinstance(two, Lazy) and one.name != two.name:
                yield place, f"is the tensor {one.name!r:.100}, and {two.name!r:.100} in the second cache"
        elif (id(one), id(two)) in met:
            continue
        elif type(one) is not type(two):
            yield place, f"is a {type(one).__name__}, and a {type(two).__name__} in the second cache"
        elif (option := _option(one)) != _option(two):
            yield place, f"has {option}, and {_option(two)} in the second cache"
        elif type(one) in DICTS:
            met.add((id(one), id(two)))
            # 1 equals True, and the tensors of the keys 1 and "1" have the same name
            ones, twos = ({(type(key), key): item for key, item in value.items()} for value in (one, two))
            for at, typed in enumerate(dict.fromkeys([*ones, *twos])):
                name = join_path(path, component(typed[1], at))
                if typed in ones and typed in twos:
                    inner.append((name, ones[typed], twos[typed]))
                    continue
                item = (ones if typed in ones else twos)[typed]
                # `_compare_samples` reports a tensor whose name only one sample has
                if not isinstance(item, Lazy) or name in in_both:
                    kind = "" if typed[0] is str else f", with a key of type {typed[0].__name__}"
                    yield name, f"is only in the {'first' if typed in ones else 'second'} cache{kind}"
        elif isinstance(one, SEQUENCES):
            met.add((id(one), id(two)))
            if len(one) != len(two):
                yield place, f"has {len(one):,} items, and {len(two):,} in the second cache"
            else:
                inner += ((join_path(path, str(at)), *pair) for at, pair in enumerate(zip(one, two, strict=True)))
        elif not _is_same(one, two):
            yield place, f"is {value_text(one, 60)}, and {value_text(two, 60)} in the second cache"
        todo += reversed(inner)


def _option(container: Any) -> str:
    if isinstance(container, defaultdict):
        return f"default_factory={container.default_factory!r}"
    return f"maxlen={container.maxlen}" if isinstance(container, deque) else ""


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two values are equal: NaN equals NaN, 0.0 not -0.0."""
    if type(one) in ATOMS:
        return repr(one) == repr(two)  # which distinguishes NaN, 0.0 and -0.0
    try:
        return encode_sample(one) == encode_sample(two)
    except EncodeError:
        return False
