"""A batch has the structure of a sample: what stands in the places of its tensors, and of everything else."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.template import assemble, taker

__all__ = ["Path", "Recipe", "check_collate", "fill", "places_of", "project", "recipe_of"]

_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
Path = tuple[Any, ...]


def check_collate(collate: Any) -> None:
    """Raise ValueError unless `read_batch` knows this way to make a batch of samples."""
    if not callable(collate) and collate not in ("stack", "list", "pad"):
        raise ValueError(f"collate={collate!r}, expected 'stack', 'list', 'pad' or a function of a list of samples")


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


def places_of(sample: Any) -> dict[Path, Any]:
    """Return what is at each path of a batch's structure: a tensor's name, a container's type and length, or None."""
    return _Places().of(sample)


class _Places:
    def __init__(self) -> None:
        self._found: dict[Path, Any] = {}
        self._fill = _Fill(lambda lazy: None, lambda path: None)
        self._seen: set[int] = set()

    def of(self, value: Any, path: Path = ()) -> dict[Path, Any]:
        cls = type(value)
        is_dict = cls in _DICTS
        if isinstance(value, Lazy):
            self._found[path] = value.name
        elif not is_dict and (cls not in _SEQUENCES or not self._fill.holds(value)):
            self._found[path] = None
        elif id(value) not in self._seen:  # what holds itself is looked at once
            self._seen.add(id(value))
            self._found[path] = cls.__name__, len(value)
            for key, item in value.items() if is_dict else enumerate(value):
                self.of(item, (*path, key))
            self._seen.discard(id(value))
        return self._found


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
