"""The structure of a batch: combine the structures of its samples, compare them, and nest samples into a batch.

Samples may lack tensors. The place of an *optional* tensor contains the tensor in some samples of a batch. In other samples, it
contains None, or nothing if the place is in a dict. The same holds for a container of tensors. The structure of a batch has all
tensors that any sample of the batch has, and those that other samples of the same shards have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import (
    DICTS,
    SEQUENCES,
    Holding,
    Path,
    Wanted,
    empty_like,
    flatten,
    map_leaves,
)
from wds_tensorcache.errors import BatchError

__all__ = ["difference", "merge", "nest", "value_at"]

_NOTHING: Any = object()  # takes the place of a dict's item that only one of two samples has
_END: Any = object()  # takes the place of a sequence's item that only one of two samples has


def merge(first: Any, other: Any) -> tuple[Any, list[Path]]:
    """Complete the structure of a sample by that of another one.

    Returns:
        `first` with the tensors, and the containers of tensors, that it lacks and `other` has; and the paths at which
        `first` has None in place of a tensor or a container. Values that are not tensors
        are those of `first`, also where the two samples differ.
    """
    merger = _Merger()
    return merger.visit(first, other, ()), merger.nones


class _Merger:
    """A walk over two samples at once; each container of the first is visited once."""

    def __init__(self) -> None:
        self.nones: list[Path] = []
        self._holds = Holding()
        # id -> (container of the first, the same completed); the container is kept so that its id is not reused
        self._done: dict[int, tuple[Any, Any]] = {}

    def visit(self, first: Any, other: Any, path: Path) -> Any:
        if first is None and self._holds(other):
            self.nones.append(path)
            return other
        if not self._holds(other):
            return first
        cls = type(first)
        is_sequence = cls in SEQUENCES and type(other) is cls and len(first) == len(other)
        if not is_sequence and (cls not in DICTS or type(other) is not cls):
            return first
        if id(first) in self._done:
            return self._done[id(first)][1]
        if cls is tuple:
            items = (self.visit(one, two, (*path, at)) for at, (one, two) in enumerate(zip(first, other, strict=True)))
            return self._done.setdefault(id(first), (first, tuple(items)))[1]
        result = empty_like(first)
        self._done[id(first)] = first, result
        if is_sequence:
            for at, (one, two) in enumerate(zip(first, other, strict=True)):
                result.append(self.visit(one, two, (*path, at)))
            return result
        # the order of keys is the same, whichever of two samples comes first, if one of them has all keys of the other
        for key in other if first.keys() <= other.keys() else dict.fromkeys([*first, *other]):
            if key not in first:
                if self._holds(other[key]):
                    result[key] = other[key]
            else:
                result[key] = self.visit(first[key], other[key], (*path, key)) if key in other else first[key]
        return result


def value_at(sample: Any, path: Path) -> Any:
    """Return the value at `path`, the keys and indices that lead to it from the root of a nested sample.

    Returns None in place of a tensor, and if the sample lacks the container of the value, or has a shorter one.
    """
    for step in path:
        if type(sample) in DICTS:
            sample = sample.get(step)
        else:
            sample = sample[step] if type(sample) in SEQUENCES and step < len(sample) else None
    return None if isinstance(sample, Lazy) else sample


def nest(samples: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Combine B lazy samples into one batch with their structure, but with `tensors` in place of the lazy tensors.

    `tensors` contains the batched tensors by name. As in `TensorCache.nest`, lazy tensors without an entry in `tensors` are
    left out, and every other value becomes a list of B values.

    Raises:
        BatchError: The structures of two samples differ.
        KeyError: `tensors` has a name that is not a tensor of any sample.
    """
    known, whole = [flatten(sample) for sample in samples], samples[0]
    for number, names in enumerate(known):
        if names.keys() != known[0].keys():
            whole, _ = merge(whole, samples[number])
    for number, sample in enumerate(samples):
        if found := difference(whole, sample, tensors.__contains__):
            where, first, other = found
            raise BatchError(
                f"the structures of samples 0 and {number} of the batch differ: {where}, the first has {first}, "
                f"but the other has {other}"
            )
    for name in tensors:
        if not any(name in names for names in known):
            raise KeyError(f"the samples have no tensor {name!r}")
    return map_leaves(
        whole,
        lambda lazy: tensors[lazy.name],
        lambda path: [value_at(sample, path) for sample in samples],
        tensors.__contains__,
    )


def difference(first: Any, other: Any, wanted: Wanted | None = None) -> tuple[str, str, str] | None:
    """Return where the structures of two samples differ, what the first has there, and what the other has; None if nowhere.

    `first` may have tensors that `other` lacks. Tensors whose names `wanted` refuses are all equal.

    If one container occurs several times in the first sample, the other sample must have one container in the same places,
    because `map_leaves` visits it only once.
    """
    found = _Difference(other, wanted).between(first, other, ())
    return None if found is None else (_at(found[0]), found[1], found[2])


class _Difference:
    def __init__(self, other: Any, wanted: Wanted | None) -> None:
        self._other, self._wanted = other, wanted
        self._holds = Holding()
        self._met: dict[int, tuple[Any, Path]] = {}  # id of a container in the first -> the other's, and its path

    def _kind(self, value: Any) -> Any:
        """Return the name of a tensor, "" if it is not wanted; the type of a container that `map_leaves` copies; else None."""
        if isinstance(value, Lazy):
            return value.name if self._wanted is None or self._wanted(value.name) else ""
        cls = type(value)
        return cls if cls in DICTS or (cls in SEQUENCES and self._holds(value)) else None

    def _is_lacking(self, first: Any, other: Any) -> bool:
        """Return whether `other` is what a sample that lacks the tensors in `first` has in their place."""
        if (other is not None and other is not _NOTHING) or not self._holds(first):
            return False
        names = flatten(first).keys() & flatten(self._other).keys()
        return not any(self._wanted is None or self._wanted(name) for name in names)

    def between(self, first: Any, other: Any, path: Path) -> tuple[Path, str, str] | None:
        kind, others = self._kind(first), self._kind(other)
        if kind in SEQUENCES and type(other) is kind:
            others = kind  # even if the other sample lacks all tensors in it
        if self._is_lacking(first, other) or (others == "" and (first is None or first is _NOTHING or first is _END)):
            return None
        if kind == "" and other is _END:
            return None
        if first is _NOTHING or other is _NOTHING or first is _END or other is _END or kind != others:
            return path, self._described(first), self._described(other)
        if not isinstance(kind, type):
            return None
        if id(first) in self._met:
            met, place = self._met[id(first)]
            own = f"its own {kind.__name__}"
            return None if met is other else (path, f"the {kind.__name__} {_at(place)}", own)
        self._met[id(first)] = other, path
        if kind in DICTS:
            keys = dict.fromkeys([*first, *other])
            pairs = ((key, first.get(key, _NOTHING), other.get(key, _NOTHING)) for key in keys)
        else:
            pairs = ((at, *both) for at, both in enumerate(zip_longest(first, other, fillvalue=_END)))
        return next(filter(None, (self.between(one, two, (*path, step)) for step, one, two in pairs)), None)

    def _described(self, value: Any) -> str:
        if value is _NOTHING or value is _END:
            return "nothing"
        kind = self._kind(value)
        if isinstance(kind, type):
            return f"a {kind.__name__} of length {len(value)}"
        return "a value" if kind is None else f"tensor {value.name!r}"


def _at(path: Path) -> str:
    return f"at {'.'.join(map(str, path))!r}" if path else "at the root"
