"""Samples of rows: nested again by the column `__tensorcache__`, or at the dots of the columns' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.sample import decode_sample
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, Path, flatten, project, rebuild
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.ray.rows.bits import from_column
from wds_tensorcache.ray.rows.structure import (
    KEY,
    MEMBER,
    STRUCTURE,
    Structure,
    value_columns,
)
from wds_tensorcache.ray.rows.values import as_value, is_nothing, is_same

_NOTHING: Any = object()


def members_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members outside caches by suffix, from the columns that begin with a dot; null stands for no member."""
    return {name[1:]: value for name, value in row.items() if name.startswith(MEMBER) and value is not None}


def restore_sample(structure: Structure, row: Mapping[str, Any], *, allow: Iterable[type] = ()) -> Any:
    """Return the nested sample of a row that has the column `__tensorcache__`.

    Args:
        structure: Content of the column.
        row: Values of the other columns by name: arrays for tensors, None for nulls. Tensors whose column is
            gone or null are left out. A tensor or value that has changed replaces the old one, a new column becomes a new item.
        allow: Classes that the sample may contain.

    Raises:
        FormatError: The skeleton or the tensors in the column are damaged.
        EncodeError: A new column has no place, because the sample is not a dict, or has another value there.
        UnsafeSkeletonError: The sample contains a class that is not in `allow`.
    """
    has_values, dtypes = structure.has_values, structure.dtypes
    sample = decode_sample(structure.skeleton, structure.tensors, allow=allow)
    lazies = flatten(sample)
    old = value_columns(sample) if has_values else {}
    made = {name: from_column(row[name], dtypes[name]) for name in dtypes if row.get(name) is not None}
    if not lazies.keys() <= made.keys():
        sample = project(sample, lambda name: name in made or name not in lazies)
    new: dict[Path, Any] = {}
    for name, (path, value) in old.items():
        changed = row.get(name, _NOTHING)
        if changed is _NOTHING or not is_same(value, changed):
            new[path] = changed
    sample = _Restorer(made, lazies, new).restore(sample)
    for name, value in row.items():
        if name in dtypes or name in old or name in (KEY, STRUCTURE) or name.startswith(MEMBER) or value is None:
            continue
        if name not in structure.absent or not is_nothing(value):
            if not has_values and name in value_columns(sample):
                raise EncodeError(f"column {name!r} has the name of a value of the sample; read with values=True")
            sample = _insert(sample, name, as_value(value))
    return sample


class _Restorer:
    def __init__(self, made: Mapping[str, Any], lazies: Mapping[str, Any], new: Mapping[Path, Any]) -> None:
        self._made, self._lazies, self._new = made, lazies, new

    def restore(self, sample: Any) -> Any:
        sample = rebuild(sample, self._tensor, Lazy)
        for path, value in self._new.items():
            sample = _with(sample, path, value)
        return sample

    def _tensor(self, lazy: Any) -> Any:
        if lazy.name not in self._lazies:
            return lazy.load()
        value = self._made[lazy.name]
        if isinstance(lazy.dtype, torch.dtype) and isinstance(value, np.ndarray):
            return as_value(value)  # of another dtype than it had
        return value


def _with(container: Any, path: Path, value: Any) -> Any:
    """Return a container with another value at `path`; without the value if it is `_NOTHING`, or None in a sequence."""
    if not path:
        return container if value is _NOTHING else as_value(value)
    step, rest = path[0], path[1:]
    if type(container) in DICTS:
        if value is _NOTHING and not rest:
            container.pop(step, None)
        elif rest or value is not _NOTHING:
            container[step] = _with(container.get(step), rest, value)
        return container
    if type(container) not in SEQUENCES:
        return container
    items = list(container)
    items[step] = (None if value is _NOTHING else as_value(value)) if not rest else _with(items[step], rest, value)
    if type(container) is tuple:
        return tuple(items)
    container[step] = items[step]
    return container


def plain_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample of a row without the column `__tensorcache__`: dicts nested at the dots of the columns' names."""
    sample: dict[str, Any] = {}
    for name, value in row.items():
        if name not in (KEY, STRUCTURE) and not name.startswith(MEMBER):
            sample = _insert(sample, name, as_value(value))
    return sample


def _insert(sample: Any, name: str, value: Any) -> Any:
    """Put a value at a path such as `cond.pooled`, whose dicts are made if they do not exist, and return the sample.

    Raises:
        EncodeError: There is another value at this place or on the way to it.
    """
    *path, last = (unquote(part) for part in name.split("."))
    target = sample
    for part in path:
        target = target.setdefault(part, {}) if type(target) in DICTS else None
    if type(target) not in DICTS or last in target:
        raise EncodeError(
            f"column {name!r} has no place in the sample, which has another value there; rename the column"
        )
    target[last] = value
    return sample
