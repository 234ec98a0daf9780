"""Differences between two caches: keys, tensors and small values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.skeleton.tensor_names import component, join_path
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, flatten, rebuild
from wds_tensorcache.inspecting.tree import short_dtype
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.reading.description import shown_value

__all__ = ["CacheDiff", "Change", "diff_caches"]


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor or small value of a sample that differs.

    Attributes:
        key: Key of the sample.
        name: Name of the tensor, or path of the value.
        what: The difference, for people.
        num_different: Number of elements with different bits; None unless both are tensors of one dtype and shape.
        max_difference: Largest absolute difference of two numbers; None unless there are such numbers. NaN and infinities do
            not count, unless only one of the two is one: then it is infinite.
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


def diff_caches(first: Cache, second: Cache, progress: Callable[[int, int], object] | None = None) -> CacheDiff:
    """Compare two caches sample by sample: each tensor bit for bit, and all small values.

    Other members, fingerprints and the order of the samples are not compared.

    Args:
        first, second: Caches, or views of them.
        progress: Function of the samples that were compared, and all samples.

    Raises:
        FormatError: A shard is damaged.

    Memory: the tensors of one sample of each cache.
    """
    result, there = CacheDiff(), second.keys()
    for number, key in enumerate(first.keys()):
        if key not in there:
            result.only_first.append(key)
        elif changes := list(_compare(key, first[key], second[key])):
            result.num_changed += 1
            result.changes += changes
        else:
            result.num_equal += 1
        if progress is not None:
            progress(number + 1, len(first))
    known = first.keys()
    result.only_second += [key for key in there if key not in known]
    return result


def _compare(key: str, first: Any, second: Any) -> Iterator[Change]:
    mine, other = flatten(first), flatten(second)
    for name in dict.fromkeys([*mine, *other]):
        if name not in mine or name not in other:
            yield Change(key, name, f"is a tensor only in the {'first' if name in mine else 'second'} cache")
            continue
        yield from _compare_tensors(key, name, mine[name], other[name])
    for name, what in _compare_values(_without_tensors(first), _without_tensors(second), ""):
        yield Change(key, name, what)


def _compare_tensors(key: str, name: str, first: Lazy, second: Lazy) -> Iterator[Change]:
    forms = [f"{short_dtype(each.dtype)}{list(each.shape)} ({type(each).__name__})" for each in (first, second)]
    if forms[0] != forms[1]:
        shown = [form.rpartition(" ")[0] if type(first) is type(second) else form for form in forms]
        yield Change(key, name, f"is {shown[0]}, and {shown[1]} in the second cache")
        return
    one, two = (_as_tensor(each.load()) for each in (first, second))
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):  # texts, for example
        if one.tobytes() != two.tobytes():
            yield Change(key, name, "has other elements")
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
    wide = torch.complex128 if first.is_complex() else torch.float64
    try:
        one, two = first.to(wide), second.to(wide)
    except (RuntimeError, TypeError):  # dtypes without arithmetic, such as packed float4
        return None
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0, (one - two).abs()).nan_to_num(float("inf"))
    return float(difference.max()) if difference.numel() else None


def _without_tensors(sample: Any) -> Any:
    return rebuild(sample, lambda leaf: f"tensor:{leaf.name}" if isinstance(leaf, Lazy) else leaf)


def _compare_values(first: Any, second: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the difference of each value."""
    if type(first) is not type(second):
        yield path, f"is a {type(first).__name__}, and a {type(second).__name__} in the second cache"
    elif type(first) in DICTS:
        for position, key in enumerate(dict.fromkeys([*first, *second])):
            name = join_path(path, component(key, position))
            if key in first and key in second:
                yield from _compare_values(first[key], second[key], name)
            elif not _is_tensor((first if key in first else second)[key]):
                yield name, f"is only in the {'first' if key in first else 'second'} cache"
    elif type(first) in SEQUENCES and len(first) == len(second):
        for position, (one, two) in enumerate(zip(first, second, strict=True)):
            yield from _compare_values(one, two, join_path(path, str(position)))
    elif first != second and repr(first) != repr(second):  # NaN differs from itself
        yield path, f"is {shown_value(first)}, and {shown_value(second)} in the second cache"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("tensor:")
