"""Nested samples: their tensors by name, and batches with the structure of a sample."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.skeleton.template import assemble, taker
from wds_tensorcache.errors import BatchError

__all__ = [
    "Path",
    "Recipe",
    "difference",
    "fill",
    "fill_samples",
    "is_shared",
    "item_at",
    "named_tensors",
    "project",
    "recipe_of",
]

_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
Path = tuple[Any, ...]


def fill(sample: Any, tensor: Callable[[Lazy], Any], leaf: Callable[[Path], Any]) -> Any:
    """Return the structure of `sample` with other things in it.

    Dicts keep their keys; lists, tuples and deques are kept where a tensor is in them. Everything else, a tuple of ints
    say, is one leaf: what `leaf` returns for the path to it. What is one object in the sample is one in the result.
    """
    return _Fill(tensor, leaf).visit(sample, ())


class _Fill:
    # an object, not nested functions: those refer to themselves, and would hold a batch until the garbage collector runs
    def __init__(self, tensor: Callable[[Lazy], Any], leaf: Callable[[Path], Any]) -> None:
        self._tensor = tensor
        self._leaf = leaf
        self._holding: dict[int, bool] = {}  # which containers have a tensor in them
        self._made: dict[int, Any] = {}
        self.has_shared = False  # whether a tensor, or a container with one in it, was met again

    def holds(self, value: Any) -> bool:
        """Return whether a tensor is in `value`."""
        if isinstance(value, Lazy):
            return True
        cls = type(value)
        if cls not in _DICTS and cls not in _SEQUENCES:
            return False
        known = self._holding.get(id(value))
        if known is None:
            self._holding[id(value)] = False  # while its own items are looked at
            known = self._holding[id(value)] = any(map(self.holds, value.values() if cls in _DICTS else value))
        return known

    def visit(self, value: Any, path: Path) -> Any:
        made = self._made
        if id(value) in made:
            self.has_shared = self.has_shared or self.holds(value)
            return made[id(value)]
        cls = type(value)
        if isinstance(value, Lazy):
            result = made[id(value)] = self._tensor(value)
            return result
        if cls in _DICTS:
            result = made[id(value)] = _empty_like(value)
            for key, item in value.items():
                result[key] = self.visit(item, (*path, key))
            return result
        if cls not in _SEQUENCES or not self.holds(value):
            return self._leaf(path)
        if cls is tuple:
            items = tuple(self.visit(item, (*path, at)) for at, item in enumerate(value))
            return made.setdefault(id(value), items)
        result = made[id(value)] = _empty_like(value)
        for at, item in enumerate(value):
            result.append(self.visit(item, (*path, at)))
        return result


def _empty_like(value: Any) -> Any:
    cls = type(value)
    if cls is defaultdict:
        return defaultdict(value.default_factory)
    return deque(maxlen=value.maxlen) if cls is deque else cls()


def is_shared(sample: Any) -> bool:
    """Return whether a tensor of `sample`, or a container with one in it, is in two places."""
    walk = _Fill(lambda lazy: None, lambda path: None)
    walk.visit(sample, ())
    return walk.has_shared


def difference(first: Any, other: Any) -> tuple[str, str, str] | None:
    """Return the place where two samples differ, and what each has there; None if what `fill` makes of the first fits both.

    What is one container in the first must be one in the other: `fill` makes one of it, with the values of one place. Each
    container of the first is visited once, so that shared ones cost no more than others.
    """
    found = _Difference().between(first, other, ())
    return None if found is None else (_at(found[0]), found[1], found[2])


class _Difference:
    def __init__(self) -> None:
        self._holds = _Fill(lambda lazy: None, lambda path: None).holds
        self._met: dict[int, tuple[Any, Path]] = {}  # by id of a container of the first: the other's, and where

    def _kind(self, value: Any) -> Any:
        """Return a tensor's name, a container's type, or None for every other value."""
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
            own = f"a {kind.__name__} of its own"
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
            return f"a {kind.__name__} of {len(value)}"
        return "a value" if kind is None else f"tensor {kind!r}"


_NOTHING: Any = object()


def _at(path: Path) -> str:
    return f"at {'.'.join(map(str, path))!r}" if path else "at its root"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`fill` for samples of one template: what it would visit is known.

    Attributes:
        names: Of the tensors.
        paths: To the leaves.
        containers: As a template has them, of the tensors and then the leaves.
    """

    names: list[str]
    paths: list[Path]
    containers: list[tuple[type, Any, Any]]

    def fill(self, tensors: Mapping[str, Any], leaf: Callable[[Path], Any]) -> Any:
        """Return the structure with `tensors` and leaves in it."""
        return assemble(self.containers, [*map(tensors.__getitem__, self.names), *map(leaf, self.paths)])


def recipe_of(sample: Any) -> Recipe:
    """Return the recipe of a sample that is of a template: of dicts, lists and tuples, none of them in it twice."""
    tensors: list[_Slot] = []
    leaves: list[_Slot] = []

    def slot(slots: list[_Slot], of: Any) -> _Slot:
        slots.append(_Slot(of))
        return slots[-1]

    filled = fill(sample, lambda lazy: slot(tensors, lazy.name), lambda path: slot(leaves, path))
    numbers = {id(one): number for number, one in enumerate([*tensors, *leaves])}
    containers: list[tuple[type, Any, Any]] = []

    def visit(value: Any) -> int:
        if isinstance(value, _Slot):
            return numbers[id(value)]
        items = [visit(item) for item in (value.values() if type(value) is dict else value)]
        containers.append((type(value), tuple(value) if type(value) is dict else (), taker(items)))
        return len(numbers) + len(containers) - 1

    visit(filled)
    return Recipe([one.of for one in tensors], [one.of for one in leaves], containers)


class _Slot:
    def __init__(self, of: Any) -> None:
        self.of = of


_DROPPED: Any = object()


def project(sample: Any, wanted: Callable[[str], bool]) -> Any:
    """Return `sample` with only those of its tensors whose names are wanted: others leave dicts, and are None in sequences."""
    return _or_none(_project(sample, wanted, {}))


def _project(value: Any, wanted: Callable[[str], bool], made: dict[int, Any]) -> Any:
    if isinstance(value, Lazy):
        return value if wanted(value.name) else _DROPPED
    cls = type(value)
    if id(value) in made or (cls not in _DICTS and cls not in _SEQUENCES):
        return made.get(id(value), value)
    if cls is tuple:
        items = tuple(_or_none(_project(item, wanted, made)) for item in value)
        return made.setdefault(id(value), items)
    result = made[id(value)] = _empty_like(value)
    if cls in _DICTS:
        for key, item in value.items():
            kept = _project(item, wanted, made)
            if kept is not _DROPPED:
                result[key] = kept
    else:
        result.extend(_or_none(_project(item, wanted, made)) for item in value)
    return result


def _or_none(value: Any) -> Any:
    return None if value is _DROPPED else value


def item_at(value: Any, path: Path) -> Any:
    """Return what a nested sample has at a path."""
    for step in path:
        value = value[step]
    return value


def named_tensors(sample: Any) -> dict[str, Any]:
    """Return the lazy tensors and arrays of a nested sample by name, for example `latent.samples`, in their order."""
    tensors: dict[str, Any] = {}
    fill(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None)
    return tensors


def fill_samples(samples: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Return lazy samples as one batch, with the values of `tensors` (by name) in its tensors' places.

    What `TensorCache.fill_batch` does for samples of a cache: the structure is the first sample's, tensors that are not given
    are left out, and everything else becomes a list of B values.

    Raises:
        BatchError: The structures of two samples differ.
        KeyError: The first sample has no tensor of such a name.
    """
    kept = [project(sample, tensors.__contains__) for sample in samples]
    for number, sample in enumerate(kept):
        if found := difference(kept[0], sample):
            where, first, other = found
            raise BatchError(
                f"the structures of samples 0 and {number} of the batch differ: {where} the first has {first}, "
                f"the other {other}"
            )
    known = named_tensors(kept[0])
    for name in tensors:
        if name not in known:
            raise KeyError(f"the samples have no tensor {name!r}")
    return fill(kept[0], lambda lazy: tensors[lazy.name], lambda path: [item_at(sample, path) for sample in kept])
