"""Alternatives that are not tensors, such as captions as strings: chosen when a batch's value is looked at, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.codec.tree import Path
from wds_tensorcache.errors import BatchError, list_names
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.choices.alternatives import Group, find_values
from wds_tensorcache.reading.choices.chooser import Choices, Chooser

__all__ = ["choices_of_values", "place_in_samples", "place_values"]

Array = np.ndarray[Any, Any]
_Source = tuple[str, Any, bool]  # name, value, and whether the value is a list of alternatives


def place_values(batch: Any, groups: Sequence[Group], chooser: Chooser, keys: Sequence[str]) -> Any:
    """Put the chosen values into a batch in place of the alternatives, and return the batch.

    Raises:
        BatchError: The batch has none of the alternatives, or another value at the place of the chosen one.
    """
    for group in groups:
        chosen = Leaves(_Chosen(_take(batch, group), group, chooser, keys), tuple(group.names[0].split(".")))
        if get_worker_info() is not None:
            chosen.tolist()  # an error during pickling of the batch would not reach the caller
        _put(batch, group.names[0], chosen)
    return batch


def place_in_samples(samples: list[Any], groups: Sequence[Group], chooser: Chooser, keys: Sequence[str]) -> list[Any]:
    """Put the chosen values into samples in place of the alternatives, and return the samples."""
    for group in groups:
        each = [_alternatives([_take(sample, group)], key)[0] for sample, key in zip(samples, keys, strict=True)]
        numbers = chooser(group, np.array(list(map(len, each)))).tolist()
        for sample, alternatives, number in zip(samples, each, numbers, strict=True):
            _put(sample, group.names[0], alternatives[number][1])
    return samples


def choices_of_values(batch: Any, groups: Sequence[Group], chooser: Chooser, keys: Sequence[str]) -> Choices:
    """Return the choices among the values of a batch that has all alternatives. This decodes them."""
    choices: dict[str, Array] = {}
    chosen: dict[str, list[str]] = {}
    for group in groups:
        found = _Chosen(_take(batch, group), group, chooser, keys)
        choices[group.names[0]], chosen[group.names[0]] = found.choices(), found.names()
    return Choices(choices, chosen)


class _Chosen:
    """The chosen values of a batch, as `Leaves` reads them: they are decoded and chosen on first use."""

    def __init__(self, sources: Sequence[_Source], group: Group, chooser: Chooser, keys: Sequence[str]) -> None:
        self._sources, self._group, self._chooser, self._keys = sources, group, chooser, keys
        self._found: tuple[Array, list[tuple[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def column(self, path: Path) -> list[Any]:
        """Return the chosen value of each sample."""
        return [value for _, value in self._choose()[1]]

    def names(self) -> list[str]:
        """Return the name of each sample's chosen value."""
        return [name for name, _ in self._choose()[1]]

    def choices(self) -> Array:
        """Return the choice of each sample, int64 `[B]`."""
        return self._choose()[0]

    def _choose(self) -> tuple[Array, list[tuple[str, Any]]]:
        if self._found is None:
            columns = [(name, list(value), is_list) for name, value, is_list in self._sources]
            each = [
                _alternatives([[(name, column[i], is_list) for name, column, is_list in columns]], key)[0]
                for i, key in enumerate(self._keys)
            ]
            numbers = self._chooser(self._group, np.array(list(map(len, each))))
            self._found = numbers, [alternatives[n] for alternatives, n in zip(each, numbers.tolist(), strict=True)]
        return self._found


def _alternatives(samples: Sequence[Sequence[_Source]], key: str) -> list[list[tuple[str, Any]]]:
    """Return names and values of the alternatives of each sample."""
    found = []
    for sources in samples:
        alternatives: list[tuple[str, Any]] = []
        for name, value, is_list in sources:
            if is_list and not isinstance(value, (list, tuple)):
                raise BatchError(
                    f"sample {key!r} has a {type(value).__name__} at {name!r}, expected a list of alternatives"
                )
            alternatives += [(f"{name}.{at}", each) for at, each in enumerate(value)] if is_list else [(name, value)]
        if not alternatives:
            raise BatchError(f"sample {key!r} has no alternatives: {sources[0][0]!r} is empty")
        found.append(alternatives)
    return found


def _take(batch: Any, group: Group) -> list[_Source]:
    """Remove the alternatives of a group from a batch or a sample, and return them."""
    found = list(find_values(batch, group))
    if not found:
        patterns = group.patterns[0]
        has = f"; they have {list_names(batch, patterns[0])}" if isinstance(batch, dict) else ""
        raise BatchError(
            f"the samples have none of the alternatives of {group.names[0]!r:.100}: {list_names(patterns)}{has}"
        )
    for target, key, _ in found:
        target.pop(key, None)
    return [source for _, _, sources in found for source in sources]


def _put(batch: Any, name: str, value: Any) -> None:
    *path, last = map(unquote, name.split("."))
    target = batch
    for part in path:
        target = target.setdefault(part, {}) if type(target) is dict else None
    if type(target) is not dict or last in target:
        raise BatchError(f"choose={{{name!r}: …}}: samples have another value at this place; choose a new name")
    target[last] = value
