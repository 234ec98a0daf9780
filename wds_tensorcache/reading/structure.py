"""Structures of samples: completed, compared, and nested into batches.

Samples may lack tensors. The place of an *optional* tensor contains the tensor in some samples of a batch. In other samples, it
contains None, or nothing if the place is in a dict. The same holds for a container of tensors. A batch has the structure of the
sample with the most tensors. Tensors that this sample lacks are placed by their names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any
from urllib.parse import unquote

import torch

from wds_tensorcache.codec.lazy import Lazy, LazyTensor
from wds_tensorcache.codec.reference import MemorySource, Reference, component
from wds_tensorcache.codec.tree import (
    DICTS,
    SEQUENCES,
    Holding,
    Path,
    Wanted,
    empty_like,
    flatten,
    map_leaves,
    names_of,
    project,
    separate,
    shown,
)
from wds_tensorcache.errors import BatchError

_NOTHING: Any = object()  # takes the place of a dict's item that only one of two samples has
_END: Any = object()  # takes the place of a sequence's item that only one of two samples has


def insert(sample: Any, name: str, donor: Any = None) -> Any:
    """Return a sample with a placeholder tensor at the path `name`.

    Args:
        donor: A sample with this tensor. A name does not show whether the key of a dict is `7` or `"7"`; the donor does.

    Raises:
        ValueError: A value that is neither None nor a tensor has this path, or the path leads through a value that is not a
            container. Or the path needs a new container whose type `name` does not determine.
    """
    lazy = LazyTensor(Reference(name, "tensor", torch.uint8, (), 0, 0, None), MemorySource(b""))
    return _insert(sample, name.split("."), lazy, donor)


def _insert(value: Any, parts: Sequence[str], lazy: Any, donor: Any) -> Any:
    if not parts:
        if value is not None and not isinstance(value, Lazy):
            raise ValueError(f"there is {shown(value)} at {lazy.name!r}")
        # a tensor of another name is there if its container occurs twice
        return lazy if value is None else value
    part = parts[0]
    if value is None:  # a container that the sample lacks
        if part.isdecimal() and type(donor) not in (*DICTS, *SEQUENCES):
            raise ValueError(f"the sample lacks a container of {lazy.name!r}")
        # with the small values of the donor, whose places other samples have, too
        value = project(donor, lambda name: False) if type(donor) in (*DICTS, *SEQUENCES) else {}
    cls = type(value)
    if cls in SEQUENCES and part.isdecimal() and int(part) < len(value):
        at = int(part)
        item = _insert(value[at], parts[1:], lazy, donor[at] if type(donor) in SEQUENCES and at < len(donor) else None)
        if item is value[at]:
            return value
        items = [item if number == at else other for number, other in enumerate(value)]
        return deque(items, value.maxlen) if cls is deque else cls(items)
    if cls not in DICTS:
        raise ValueError(f"there is {shown(value)} in place of a container of {lazy.name!r}")
    keys = (numbered for one in (value, donor) if type(one) in DICTS for numbered in enumerate(one))
    key = next((key for at, key in keys if component(key, at) == part), key_of(part))
    item = _insert(value.get(key), parts[1:], lazy, donor.get(key) if type(donor) in DICTS else None)
    if item is value.get(key):
        return value
    result = empty_like(value)
    result.update(value)
    result[key] = item
    return result


def steps_of(container: Any) -> dict[str, Any]:
    """Return a container's keys or indices by their components in names. Any other value has none."""
    if isinstance(container, dict):
        return {component(key, at): key for at, key in enumerate(container)}
    return {str(at): at for at in range(len(container))} if isinstance(container, SEQUENCES) else {}


def drop_none(sample: Any, whole: Any, name: str) -> None:
    """Remove, in place, the None of a dict at the path `name`.

    `whole` is the sample with all its tensors, because a name may contain the position of a key in its dict.
    """
    *path, last = name.split(".")
    for part in path:
        steps = steps_of(whole) if type(whole) in (*DICTS, *SEQUENCES) else {}
        if part not in steps or isinstance(whole[steps[part]], Lazy):
            return
        sample, whole = sample[steps[part]], whole[steps[part]]
    if type(whole) in DICTS:
        for key in [key for at, key in enumerate(whole) if whole[key] is None and component(key, at) == last]:
            sample.pop(key, None)  # a dict that occurs twice has lost it before


def put(sample: Any, name: str, value: Any, whole: Any) -> None:
    """Put a chosen tensor or value into nested dicts at `name`. Raise BatchError if another value is in the way.

    `whole` is a sample with all its tensors, which shows the types of keys. It may be None if `name` contains no number.
    """
    container = sample
    parts = name.split(".")
    for part, after in pairwise(parts):
        key = _find_key(part, container, whole)
        whole = whole.get(key) if type(whole) in DICTS else None
        # a number may be the index of a list that was removed
        if type(container) in DICTS and (type(whole) in DICTS or not after.isdecimal()):
            container.setdefault(key, {})
        container = container.get(key) if type(container) in DICTS else None
    key = _find_key(parts[-1], container, whole)
    if type(container) not in DICTS or key in container:
        raise BatchError(
            f"choose={{{name!r}: …}}: samples have another value at this place, or a container that is not a dict; choose a "
            "new name"
        )
    container[key] = value


def _find_key(part: str, container: Any, whole: Any) -> Any:
    """Return the dict key for a part of a name. Numbers are ints if the dict has ints."""
    steps = steps_of(container) | steps_of(whole)
    is_int = part.isdecimal() and component(int(part), 0) == part and any(type(key) is int for key in steps.values())
    return steps.get(part, int(part) if is_int else key_of(part))


def key_of(part: str) -> str:
    """Return the dict key for a component of a tensor's name."""
    return part if "%" not in part else "" if part == "%" else unquote(part)


def value_at(sample: Any, path: Path) -> Any:
    """Return the value at a path of keys and indices. Return None for a tensor, and for a path that the sample lacks."""
    for step in path:
        if type(sample) in DICTS:
            sample = sample.get(step)
        else:
            sample = sample[step] if type(sample) in SEQUENCES and step < len(sample) else None
    return None if isinstance(sample, Lazy) else sample


def nest(samples: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Combine B lazy samples into one batch with their structure.

    `tensors` contains the batched tensors by name, which replace the lazy tensors. As in `TensorCache.nest`, lazy tensors
    without an entry in `tensors` are left out: in lists, tuples and deques, B times None replaces them. Every other value, also
    a loaded tensor, becomes a list of B values.

    Raises:
        BatchError: The structures of two samples differ.
        KeyError: `tensors` has a name that is not a tensor of any sample.
        TypeError: `samples` is a dict, such as a single sample.
        ValueError: `samples` is empty.
    """
    if isinstance(samples, Mapping):
        raise TypeError("expected a list of samples, got a single dict; pass [sample]")
    if not samples:
        raise ValueError("no samples: a batch has at least one sample")
    samples = [separate(sample)[0] for sample in samples]
    names = [names_of(sample) for sample in samples]
    base = max(range(len(samples)), key=lambda at: (sum(name in tensors for name in names[at]), len(names[at])))
    whole = samples[base]
    for name in dict.fromkeys(name for own in names for name in own if name not in names[base]):
        try:
            whole = insert(whole, name, next(one for one, own in zip(samples, names, strict=True) if name in own))
        except ValueError as exc:
            if name in tensors:
                problem = f"sample {base} of the batch lacks tensor {name!r}, and has no place for it: {exc}"
                raise BatchError(f"the structures of samples differ: {problem}") from exc
    for number, sample in enumerate(samples):
        if mismatch := difference(whole, sample, tensors.__contains__):
            where, first, other = mismatch
            raise BatchError(
                f"the structures of samples {base} and {number} of the batch differ: {where}, the first has {first}, "
                f"but the other has {other}"
            )
    for name in tensors:
        if not any(name in own for own in names):
            raise KeyError(f"the samples have no tensor {name!r}")
    return map_leaves(
        whole,
        lambda lazy: tensors[lazy.name],
        lambda path: [value_at(sample, path) for sample in samples],
        tensors.__contains__,
    )


def difference(first: Any, other: Any, wanted: Wanted | None = None) -> tuple[str, str, str] | None:
    """Return the first difference between the structures of two samples, or None.

    The result is three texts: the place, and the contents of `first` and `other` there. `first` may have tensors that `other`
    lacks. Tensors whose names `wanted` rejects count as equal. If a container occurs several times in `first`, a single
    container must occur in the same places of `other`.
    """
    mismatch = _Difference(other, wanted).between(first, other, ())
    return None if mismatch is None else (_at(mismatch[0]), mismatch[1], mismatch[2])


class _Difference:
    def __init__(self, other: Any, wanted: Wanted | None) -> None:
        self._other, self._wanted = other, wanted
        self._holds = Holding()
        # id of a container in `first` -> the container in `other`, and its path
        self._met: dict[int, tuple[Any, Path]] = {}

    def _kind(self, value: Any) -> Any:
        """Return the property in which two values at one place must agree."""
        if isinstance(value, Lazy):
            return value.name if self._wanted is None or self._wanted(value.name) else ""
        cls = type(value)
        return cls if cls in DICTS or (cls in SEQUENCES and self._holds(value)) else None

    def _is_lacking(self, first: Any, other: Any) -> bool:
        """Return whether `other` may replace `first` where a sample lacks its tensors."""
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
        if (
            (kind == "" and other is _END)
            or (first is None and other is _NOTHING)
            or (first is _NOTHING and other is None)
        ):
            return None
        if first is _NOTHING or other is _NOTHING or first is _END or other is _END or kind != others:
            return path, self._describe(first), self._describe(other)
        if not isinstance(kind, type):
            return None
        if id(first) in self._met:  # `map_leaves` visits such a container only once
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

    def _describe(self, value: Any) -> str:
        if value is _NOTHING or value is _END:
            return "nothing"
        kind = self._kind(value)
        if isinstance(kind, type):
            return f"a {kind.__name__} of length {len(value)}"
        return "a value" if kind is None else f"tensor {value.name!r}"


def _at(path: Path) -> str:
    return f"at {'.'.join(map(str, path))!r}" if path else "at the root"
