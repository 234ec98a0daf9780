"""Walk nested containers: copy, filter and compare samples, and combine them into a batch.

Each walk visits every container once, so shared or cyclic containers cannot make it slow or endless.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy, LazyArray, LazyTensor, check_device
from wds_tensorcache.errors import BatchError

__all__ = [
    "ATOMS",
    "CONTAINERS",
    "Path",
    "difference",
    "flatten",
    "is_shared",
    "item_at",
    "map_leaves",
    "nest",
    "project",
    "realize",
    "rebuild",
    "shown",
    "walk",
]

Path = tuple[Any, ...]
ATOMS = frozenset({str, int, bool, float, bytes, type(None), complex})
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_LEAVES = (LazyTensor, LazyArray, torch.Tensor, np.ndarray, bytearray)
_INNER: Any = object()  # returned to a `_Copier`, which then copies the container
_DROPPED: Any = object()  # takes the place of a tensor that `project` removes
_NOTHING: Any = object()  # takes the place of an item that only one of two samples has


def realize(obj: Any, device: torch.device | str | None = None) -> Any:
    """Return `obj` with every lazy tensor loaded; `obj` itself is not changed.

    Containers are rebuilt with the same types. Shared objects stay shared, and cyclic containers stay cyclic. Tensors that
    are already loaded stay where they are, unless `device` is given; numpy arrays stay in host memory.

    Objects of other classes are returned unchanged, so lazy tensors in them are not loaded.

    Args:
        obj: A decoded sample, a lazy tensor, or any nesting of containers, namedtuples and dataclasses that contains lazy
            tensors.
        device: Device of all tensors; by default, lazy tensors are loaded on the CPU.

    Raises:
        RuntimeError: `device` is not available.

    Memory: each lazy tensor is loaded into private memory, which belongs to the caller. All other values that are not
        containers are shared with `obj`.
    """
    check_device(device)

    def load(leaf: Any) -> Any:
        if isinstance(leaf, LazyTensor):
            return leaf.load(device)
        if isinstance(leaf, LazyArray):
            return leaf.load()
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and device is not None else leaf

    return rebuild(obj, load)


def rebuild(obj: Any, replace: Callable[[Any], Any]) -> Any:
    """Copy containers as `realize` does; call `replace` once for each tensor, array (lazy or not) and bytearray in them."""
    return _Copier(lambda value, path: replace(value) if isinstance(value, _LEAVES) else _INNER, _LEAVES, True).visit(
        obj
    )


class _Copier:
    """A copier of nested containers that replaces values in them.

    Args:
        replace: Function of a value and its path; returns the replacement, or `_INNER` to copy the value as a container.
        once: Types whose objects are replaced only once, even if they occur several times. For containers, this always holds.
        with_keys: True also replaces the keys of dicts.
    """

    # A class, because recursive inner functions form a reference cycle: a batch would stay alive until garbage collection.
    def __init__(self, replace: Callable[[Any, Path], Any], once: Any, with_keys: bool = False) -> None:
        self._replace, self._once, self._with_keys = replace, once, with_keys
        # id -> (object, copy); the object is kept so that its id is not reused
        self._done: dict[int, tuple[Any, Any]] = {}

    def visit(self, value: Any, path: Path = ()) -> Any:
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        result = self._replace(value, path)
        if result is _INNER:
            result = self._copy(value, path)
        elif not isinstance(value, self._once):
            return result  # not shared: the interpreter may use one object for equal small values
        # a tuple that contains itself was already copied while its items were visited
        return self._done.setdefault(id(value), (value, result))[1]

    def _copy(self, value: Any, path: Path) -> Any:
        cls = type(value)
        result: Any
        if cls in _DICTS:
            result = _empty_like(value)
            self._done[id(value)] = (value, result)
            for key, item in value.items():
                made = self.visit(item, (*path, key))
                result[self.visit(key) if self._with_keys else key] = made
        elif cls in (list, deque, set):
            result = _empty_like(value)
            self._done[id(value)] = (value, result)
            items = [self.visit(item, (*path, at)) for at, item in enumerate(value)]
            result.update(items) if cls is set else result.extend(items)
        elif isinstance(value, (tuple, frozenset)):
            items = [self.visit(item, (*path, at)) for at, item in enumerate(value)]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return cls._make(items) if hasattr(cls, "_make") else cls(items)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            result = copy.copy(value)
            self._done[id(value)] = (value, result)
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):
                    object.__setattr__(result, field.name, self.visit(getattr(value, field.name), (*path, field.name)))
        else:
            return value
        return result


class _Holding:
    """A predicate: True for a lazy tensor, and for a dict, list, tuple or deque with one in it. Visits each container once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, value: Any) -> bool:
        if isinstance(value, Lazy):
            return True
        cls = type(value)
        if cls not in _DICTS and cls not in _SEQUENCES:
            return False
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = False  # for a container in itself, until its items are examined
            known = self._known[id(value)] = any(map(self, value.values() if cls in _DICTS else value))
        return known


def map_leaves(sample: Any, tensor: Callable[[Lazy], Any], leaf: Callable[[Path], Any]) -> Any:
    """Return a copy of the structure of `sample` in which functions replace the lazy tensors and the leaves.

    Dicts, and lists, tuples and deques that contain a lazy tensor, are copied as containers. A lazy tensor becomes
    `tensor(lazy)`. Any other value, for example a tuple of ints, is a leaf and becomes `leaf(path)`. A container or tensor
    that occurs several times in the sample is also one object in the result.
    """
    holds = _Holding()

    def replace(value: Any, path: Path) -> Any:
        if isinstance(value, Lazy):
            return tensor(value)
        cls = type(value)
        return _INNER if cls in _DICTS or (cls in _SEQUENCES and holds(value)) else leaf(path)

    return _Copier(replace, Lazy).visit(sample)


def project(sample: Any, wanted: Callable[[str], bool]) -> Any:
    """Return `sample` without the tensors whose names `wanted` refuses: dicts lose them, sequences have None in their place."""
    found = _project(sample, wanted, {})
    return None if found is _DROPPED else found


def _project(value: Any, wanted: Callable[[str], bool], done: dict[int, Any]) -> Any:
    # Hot path: runs for each sample of a cache from `select`; takes a third less time than a `_Copier`.
    cls = type(value)
    if cls in ATOMS:
        return value
    if isinstance(value, Lazy):
        return value if wanted(value.name) else _DROPPED
    if id(value) in done or (cls not in _DICTS and cls not in _SEQUENCES):
        return done.get(id(value), value)
    if cls is not tuple:
        done[id(value)] = result = _empty_like(value)
        if cls in _DICTS:
            for key, item in value.items():
                kept = _project(item, wanted, done)
                if kept is not _DROPPED:
                    result[key] = kept
            return result
    items = [_project(item, wanted, done) for item in value]
    items = [None if item is _DROPPED else item for item in items]
    if cls is tuple:
        return done.setdefault(id(value), tuple(items))
    result.extend(items)
    return result


def _empty_like(value: Any) -> Any:
    cls = type(value)
    if cls is defaultdict:
        return defaultdict(value.default_factory)
    return deque(maxlen=value.maxlen) if cls is deque else cls()


def flatten(sample: Any) -> dict[str, Any]:
    """Return a dict of the lazy tensors and arrays of a nested sample by name, for example `latent.samples`, in order."""
    tensors: dict[str, Any] = {}
    map_leaves(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None)
    return tensors


def item_at(value: Any, path: Path) -> Any:
    """Return the value at `path`, the keys and indices that lead to it from the root of a nested sample."""
    for step in path:
        value = value[step]
    return value


def is_shared(sample: Any) -> bool:
    """Return whether a lazy tensor of `sample`, or a container with a lazy tensor in it, occurs more than once."""
    holds, met, todo = _Holding(), {id(sample)}, [sample]
    for value in todo:
        items = value.values() if type(value) in _DICTS else value if type(value) in _SEQUENCES else ()
        for item in filter(holds, items):
            if id(item) in met:
                return True
            met.add(id(item))
            todo.append(item)
    return False


def nest(samples: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Combine B lazy samples into one batch with the structure of the first, but with `tensors` in place of the lazy tensors.

    `tensors` contains the batched tensors by name. As in `TensorCache.nest`, lazy tensors without an entry in `tensors` are
    left out, and every other value becomes a list of B values.

    Raises:
        BatchError: The structures of two samples differ.
        KeyError: `tensors` has a name that is not a tensor of the first sample.
    """
    kept = [project(sample, tensors.__contains__) for sample in samples]
    for number, sample in enumerate(kept):
        if found := difference(kept[0], sample):
            where, first, other = found
            raise BatchError(
                f"the structures of samples 0 and {number} of the batch differ: {where}, the first has {first}, "
                f"but the other has {other}"
            )
    known = flatten(kept[0])
    for name in tensors:
        if name not in known:
            raise KeyError(f"the samples have no tensor {name!r}")
    return map_leaves(kept[0], lambda lazy: tensors[lazy.name], lambda path: [item_at(sample, path) for sample in kept])


def difference(first: Any, other: Any) -> tuple[str, str, str] | None:
    """Return where the structures of two samples differ, what the first has there, and what the other has; None if nowhere.

    If one container occurs several times in the first sample, the other sample must have one container in the same places,
    because `map_leaves` visits it only once.
    """
    found = _Difference().between(first, other, ())
    return None if found is None else (_at(found[0]), found[1], found[2])


class _Difference:
    def __init__(self) -> None:
        self._holds = _Holding()
        self._met: dict[int, tuple[Any, Path]] = {}  # id of a container in the first -> the other's, and its path

    def _kind(self, value: Any) -> Any:
        """Return the name of a tensor, the type of a container that `map_leaves` copies, or None for a leaf."""
        if isinstance(value, Lazy):
            return value.name
        cls = type(value)
        return cls if cls in _DICTS or (cls in _SEQUENCES and self._holds(value)) else None

    def between(self, first: Any, other: Any, path: Path) -> tuple[Path, str, str] | None:
        if first is _NOTHING or other is _NOTHING:
            return path, self._described(first), self._described(other)
        kind = self._kind(first)
        if kind != self._kind(other):
            return path, self._described(first), self._described(other)
        if not isinstance(kind, type):
            return None
        if id(first) in self._met:
            met, place = self._met[id(first)]
            own = f"its own {kind.__name__}"
            return None if met is other else (path, f"the {kind.__name__} {_at(place)}", own)
        self._met[id(first)] = other, path
        if kind in _DICTS:
            keys = dict.fromkeys([*first, *other])
            pairs = ((key, first.get(key, _NOTHING), other.get(key, _NOTHING)) for key in keys)
        else:
            pairs = ((at, *both) for at, both in enumerate(zip_longest(first, other, fillvalue=_NOTHING)))
        return next(filter(None, (self.between(one, two, (*path, step)) for step, one, two in pairs)), None)

    def _described(self, value: Any) -> str:
        if value is _NOTHING:
            return "nothing"
        kind = self._kind(value)
        if isinstance(kind, type):
            return f"a {kind.__name__} of length {len(value)}"
        return "a value" if kind is None else f"tensor {kind!r}"


def _at(path: Path) -> str:
    return f"at {'.'.join(map(str, path))!r}" if path else "at the root"


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, CONTAINERS):
        return value
    # The class says whether there is a `__dict__`, so that no `__getattr__` of the value runs.
    return value.__dict__.values() if type(value).__dictoffset__ else ()


def shown(value: Any) -> str:
    """Return the repr of a plain value, or the type of any other. Hazard: the repr of a hostile container may never end."""
    return f"{value!r:.80}" if value.__class__ in ATOMS else f"a {type(value).__name__}"


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield (object, depth) for each object in nested containers, once and in document order. Plain values are skipped."""
    seen: set[int] = set()
    todo = [(value, 1)]
    while todo:
        value, depth = todo.pop()
        if value.__class__ in ATOMS or id(value) in seen:
            continue
        if value.__class__ is not tuple or value:  # CPython has one empty tuple, which counts wherever it occurs
            seen.add(id(value))
        yield value, depth
        children = [child for child in _children(value) if child.__class__ not in ATOMS]
        todo.extend((child, depth + 1) for child in reversed(children))
