"""Walks through nested containers, to list, copy and filter samples.

`rebuild` copies containers of all types of the format. `_Copier` copies only dicts, lists, tuples and deques: tensors in these
have names. `_find_places` lists the places of these tensors, `walk` lists all objects. Each walk visits a container once, so
shared or cyclic containers cannot make it slow or endless.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy, LazyArray, LazyTensor, PendingLoads, check_device
from wds_tensorcache.codec.reference import RESERVED, component

Path = tuple[Any, ...]
Wanted: TypeAlias = Callable[[str], bool]  # returns whether the tensor with this name is selected
ATOMS = frozenset({str, int, bool, float, bytes, type(None), complex})
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
DICTS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, tuple, deque)
_LEAVES = (LazyTensor, LazyArray, torch.Tensor, np.ndarray, bytearray)
_MAX_NAMES = 1000  # further names of a sample's tensors
_MAX_NAME = 1000  # characters of a further name
_MAX_NBYTES_REPEATED = 1 << 24  # of objects that occur several times in a value
_TWICE = 0  # in place of an id, the mark of a tensor that `_project` has met twice
_DROPPED: Any = object()  # takes the place of a tensor that `project` or `map_leaves` removes
_Place: TypeAlias = tuple[int, Path]  # id of a container, and the path in it: one key or index, none for the root
# key or index, position of the key in its dict, and the link of the container
_Link: TypeAlias = "tuple[Any, int, _Link] | None"


def realize(obj: Any, device: torch.device | str | None = None) -> Any:
    """Return `obj` with every lazy tensor loaded; `obj` itself is not changed.

    Containers are rebuilt with the same types. Shared objects stay shared, and cyclic containers stay cyclic. Tensors that
    are already loaded stay where they are, unless `device` is given; numpy arrays stay in host memory. Objects of other
    classes are returned unchanged, so lazy tensors in them are not loaded. One read loads adjacent tensors of a sample.

    Args:
        obj: A decoded sample, a lazy tensor, or any nesting of containers, namedtuples and dataclasses that contains lazy
            tensors.
        device: Device of all tensors; by default, lazy tensors are loaded on the CPU.

    Raises:
        RuntimeError: `device` is not available.
        FormatError, RemoteError: The bytes of a tensor are invalid or changed, or cannot be read.
        ValueError: The cache of a lazy tensor was closed.

    Memory: each lazy tensor is loaded into private memory, which belongs to the caller. All other values that are not
        containers are shared with `obj`, unless `device` moves them.
    """
    check_device(device)
    loads = PendingLoads()
    result = rebuild(obj, loads.add, Lazy)
    loads.run()
    if device is not None:
        return rebuild(result, lambda tensor: tensor.to(device), torch.Tensor)
    return result


def rebuild(obj: Any, replace: Callable[[Any], Any], leaves: Any = _LEAVES) -> Any:
    """Copy containers as `realize` does, and replace the leaves in them.

    Args:
        obj: Any nesting of containers.
        replace: Function that takes a leaf and returns its replacement; called once for each leaf.
        leaves: Type or types of the leaves; by default, tensors, arrays (lazy or not) and bytearrays.
    """
    return _rebuild(obj, replace, leaves, {})


def _rebuild(value: Any, replace: Callable[[Any], Any], leaves: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    # Hot path: runs for each value of a realized sample. `done` keeps the objects, so that their ids are not reused.
    cls = type(value)
    if cls in ATOMS:
        return value
    copied = done.get(id(value))
    if copied is not None:
        return copied[1]
    result: Any = value
    if isinstance(value, leaves):
        result = replace(value)
    elif cls in DICTS:
        result = empty_like(value)
        done[id(value)] = value, result
        for key, item in value.items():
            if type(item) not in ATOMS:
                item = _rebuild(item, replace, leaves, done)
            result[key if type(key) in ATOMS else _rebuild(key, replace, leaves, done)] = item
    elif cls in (list, deque, set):
        result = empty_like(value)
        done[id(value)] = value, result
        items = [_rebuild(item, replace, leaves, done) for item in value]
        result.update(items) if cls is set else result.extend(items)
    elif isinstance(value, (tuple, frozenset)):
        items = [_rebuild(item, replace, leaves, done) for item in value]
        if not all(map(is_, items, value)):
            result = cls._make(items) if hasattr(cls, "_make") else cls(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        done[id(value)] = value, result
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                item = _rebuild(getattr(value, field.name), replace, leaves, done)
                object.__setattr__(result, field.name, item)
    # a tuple that contains itself was already copied while its items were visited
    return done.setdefault(id(value), (value, result))[1]


class Holding:
    """A predicate for lazy tensors and their containers: dicts, lists, tuples, deques."""

    def __init__(self) -> None:
        self._results: dict[int, bool] = {}  # by id, so that each container is visited once

    def __call__(self, value: Any) -> bool:
        if isinstance(value, Lazy):
            return True
        cls = type(value)
        if cls not in DICTS and cls not in SEQUENCES:
            return False
        result = self._results.get(id(value))
        if result is None:
            self._results[id(value)] = False  # for a container in itself, until its items are examined
            result = self._results[id(value)] = any(map(self, value.values() if cls in DICTS else value))
        return result


class _Copier:
    """A copier of a sample's containers that replaces the lazy tensors."""

    # A class, because recursive inner functions form a reference cycle: a batch would stay alive until garbage collection.
    #
    # `tensor` gets a lazy tensor and its place; dicts lose a tensor for which it returns `_DROPPED`. `leaf` gets a path and
    # replaces any other leaf, a dropped tensor in a sequence, or a sequence without lazy tensors. Without `leaf`, leaves stay.
    def __init__(self, tensor: Callable[[Lazy, _Place], Any], leaf: Callable[[Path], Any] | None = None) -> None:
        self._tensor, self._leaf = tensor, leaf
        self._holds = Holding()
        self._done: dict[int, Any] = {}

    def copy(self, value: Any, path: Path = (), container: Any = None) -> Any:
        cls, leaf = type(value), self._leaf
        if isinstance(value, Lazy):
            return self._tensor(value, (id(container), path[-1:]))
        if id(value) in self._done:
            return self._done[id(value)]
        if cls in DICTS:
            self._done[id(value)] = result = empty_like(value)
            for key, item in value.items():
                copied = self.copy(item, (*path, key), value)
                if copied is not _DROPPED:
                    result[key] = copied
            return result
        if cls not in SEQUENCES or (leaf is not None and not self._holds(value)):
            return value if leaf is None else leaf(path)
        if cls is not tuple:
            self._done[id(value)] = result = empty_like(value)
        items = [self.copy(item, (*path, at), value) for at, item in enumerate(value)]
        if leaf is not None:
            items = [leaf((*path, at)) if item is _DROPPED else item for at, item in enumerate(items)]
        if cls is tuple:  # a tuple that contains itself was already copied while its items were visited
            return self._done.setdefault(id(value), tuple(items))
        result.extend(items)
        return result


def map_leaves(
    sample: Any, tensor: Callable[[Lazy], Any], leaf: Callable[[Path], Any], wanted: Wanted | None = None
) -> Any:
    """Copy a sample's containers; replace its lazy tensors and other leaves.

    Dicts are copied as containers; lists, tuples and deques only if they contain a lazy tensor. A lazy tensor becomes
    `tensor(lazy)`. Any other value, for example a tuple of ints, is a leaf and becomes `leaf(path)`. A container or tensor
    that occurs several times in the sample is also one object in the result.

    Dicts lose the tensors whose names `wanted` refuses; outside dicts, these tensors are leaves. A list that contains only
    refused tensors is still a container.
    """
    done: dict[int, Any] = {}

    def replace(lazy: Lazy, place: _Place) -> Any:
        if id(lazy) not in done:
            done[id(lazy)] = tensor(lazy) if wanted is None or wanted(lazy.name) else _DROPPED
        return done[id(lazy)]

    result = _Copier(replace, leaf).copy(sample)
    return leaf(()) if result is _DROPPED else result


def project(sample: Any, wanted: Callable[[str], bool], *, prunes: bool = False) -> Any:
    """Return `sample` without the lazy tensors whose names `wanted` refuses.

    Dicts lose these tensors; sequences have None in their place. Tensors in sets and objects stay. With `prunes`, a container
    that loses all its items is removed in the same way. None if `sample` itself is removed.
    """
    done: dict[int, Any] = {}
    projected = _project(sample, wanted, done, prunes)
    if _TWICE in done:  # a tensor occurs twice, so each of its places has a name
        apart, names = separate(sample)
        targets, kept = dict(names), dict[Any, Lazy]()
        projected = _project(apart, wanted, {}, prunes)

        def keep(lazy: Lazy) -> Lazy:
            return kept.setdefault((id(lazy._source), targets.get(lazy.name, lazy.name)), lazy)

        # the first place that is kept gives the tensor its name; places in sets and objects have none
        for lazy in flatten(projected).values():
            keep(lazy)
        projected = rebuild(projected, keep, Lazy)
    return None if projected is _DROPPED else projected


def _project(value: Any, wanted: Callable[[str], bool], done: dict[int, Any], prunes: bool) -> Any:
    # Hot path: runs for each sample of a cache from `select`.
    cls = type(value)
    if cls in ATOMS:
        return value
    if isinstance(value, Lazy):
        done[_TWICE if id(value) in done else id(value)] = value
        return value if wanted(value.name) else _DROPPED
    if id(value) in done or (cls not in DICTS and cls not in SEQUENCES):
        return done.get(id(value), value)
    if cls is not tuple:
        done[id(value)] = result = empty_like(value)
        if cls in DICTS:
            for key, item in value.items():
                kept = _project(item, wanted, done, prunes)
                if kept is not _DROPPED:
                    result[key] = kept
            if prunes and value and not result:
                done[id(value)] = result = _DROPPED
            return result
    items = [_project(item, wanted, done, prunes) for item in value]
    if prunes and items and all(item is _DROPPED for item in items):
        done[id(value)] = _DROPPED
        return _DROPPED
    items = [None if item is _DROPPED else item for item in items]
    if cls is tuple:
        return done.setdefault(id(value), tuple(items))
    result.extend(items)
    return result


def empty_like(value: Any) -> Any:
    cls = type(value)
    if cls is defaultdict:
        return defaultdict(value.default_factory)
    return deque(maxlen=value.maxlen) if cls is deque else cls()


def flatten(sample: Any) -> dict[str, Any]:
    """Return a sample's lazy tensors and arrays by name, in order.

    Tensors in dicts, lists, tuples and deques have names, such as `latent.samples`. A tensor in several places also has its
    further names (FORMAT.md 2.3). Tensors elsewhere, for example in sets, and loaded tensors are left out.
    """
    places, names = _find_places(sample)
    return {names[place][0] if place in names else lazy.name: lazy for place, lazy, _ in places}


def names_of(sample: Any) -> list[str]:
    """Return the names of a sample's lazy tensors, in order. The sample must come from `separate`."""
    return list(dict.fromkeys(lazy.name for _, lazy, _ in _find_places(sample)[0]))


def further_names(sample: Any, name_of: Callable[[Any], str | None] | None = None) -> tuple[tuple[str, str], ...]:
    """Return pairs (further name, name) of a sample's tensors (FORMAT.md 2.3).

    `name_of` returns the name of a tensor, and None for any other value. By default, only lazy tensors have names.
    """
    return tuple(_find_places(sample, name_of or _name_of_lazy)[1].values())


def separate(sample: Any) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """Return a sample with a lazy tensor per further name, and `further_names`."""
    _, names = _find_places(sample)
    if not names:
        return sample, ()
    copier = _Copier(lambda lazy, place: lazy._renamed(names[place][0]) if place in names else lazy)
    return copier.copy(sample), tuple(names.values())


def _name_of_lazy(value: Any) -> str | None:
    return value.name if isinstance(value, Lazy) else None


def _find_places(
    sample: Any, name_of: Callable[[Any], str | None] = _name_of_lazy
) -> tuple[list[tuple[_Place, Any, _Link]], dict[_Place, tuple[str, str]]]:
    """Return the places of tensors, and (further name, name) by place."""
    places: list[tuple[_Place, Any, _Link]] = []
    containers = {id(sample)}

    def visit(container: Any, link: _Link) -> None:
        is_dict = type(container) in DICTS
        for at, (step, item) in enumerate(container.items() if is_dict else enumerate(container)):
            cls = type(item)
            if cls in ATOMS:
                continue
            if cls in DICTS or cls in SEQUENCES:
                if id(item) not in containers:
                    containers.add(id(item))
                    visit(item, (step, at, link))
            elif name_of(item) is not None:
                places.append(((id(container), (step,)), item, (step, at, link)))

    if name_of(sample) is not None:
        places.append(((id(None), ()), sample, None))
    elif type(sample) in DICTS or type(sample) in SEQUENCES:
        visit(sample, None)
    names: dict[_Place, tuple[str, str]] = {}
    first = {name_of(tensor) for _, tensor, _ in places}
    if len(first) == len(places):
        return places, names
    taken = {name_of(value) for value, _ in walk(sample)} | {RESERVED}
    for place, tensor, link in places:
        name = name_of(tensor)
        if name in first:
            first.remove(name)
        elif len(names) < _MAX_NAMES and (path := _path_of(link)) is not None and path not in taken:
            taken.add(path)
            names[place] = path, str(name)
    return places, names


def _path_of(link: _Link) -> str | None:
    # Memory: many places below one long key would need the key once each.
    parts, room = list[str](), _MAX_NAME
    while link is not None:
        key, at, link = link
        if type(key) is str and len(key) > room:
            return None
        parts.append(component(key, at))
        room -= len(parts[-1])
        if room < 0:
            return None
        room -= 1  # the dot
    return ".".join(reversed(parts))


def is_shared(sample: Any, wanted: Wanted | None = None) -> bool:
    """Return whether wanted lazy tensors or containers of lazy tensors occur twice."""
    holds, visited, todo = Holding(), {id(sample)}, [sample]
    for value in todo:
        items = value.values() if type(value) in DICTS else value if type(value) in SEQUENCES else ()
        for item in filter(holds, items):
            if wanted is not None and isinstance(item, Lazy) and not wanted(item.name):
                continue
            if id(item) in visited:
                return True
            visited.add(id(item))
            todo.append(item)
    return False


def children(value: Any) -> Iterable[Any]:
    """Return a container's items (of a dict, also keys), or `__dict__`'s values."""
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, CONTAINERS):
        return value
    # The class says whether there is a `__dict__`, so that no `__getattr__` of the value runs.
    return value.__dict__.values() if type(value).__dictoffset__ else ()


def shown(value: Any) -> str:
    """Return a plain value's repr, at most 80 characters, or its type."""
    # The repr of a hostile container may never end.
    return f"{value!r:.80}" if value.__class__ in ATOMS else f"a {type(value).__name__}"


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield (object, depth) once for `value` and each object in it. Plain values are skipped. The order is document order."""
    seen: set[int] = set()
    todo = [(value, 1)]
    while todo:
        value, depth = todo.pop()
        if value.__class__ in ATOMS or id(value) in seen:
            continue
        if value.__class__ is not tuple or value:  # CPython has one empty tuple, which counts wherever it occurs
            seen.add(id(value))
        yield value, depth
        inner = [child for child in children(value) if child.__class__ not in ATOMS]
        todo.extend((child, depth + 1) for child in reversed(inner))


def repeats_much(value: Any) -> bool:
    """Return whether a value's JSON would be endless or far larger."""
    # Hazard: a hostile value may contain one list many times, or itself.
    seen, nbytes_repeated, todo = set[int](), 0, [value]
    while todo and nbytes_repeated <= _MAX_NBYTES_REPEATED:
        item = todo.pop()
        if isinstance(item, (str, bytes, bytearray, *CONTAINERS)):
            is_as_short = isinstance(item, (str, bytes, bytearray)) or not item  # as in JSON
            nbytes_repeated += (len(item) + 2 if is_as_short else sys.getsizeof(item)) * (id(item) in seen)
            seen.add(id(item))
        if isinstance(item, CONTAINERS):
            todo += item.values() if isinstance(item, dict) else item
    return nbytes_repeated > _MAX_NBYTES_REPEATED
