"""Columns of a batch as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.ray.rows.bits import from_column
from wds_tensorcache.ray.rows.columns import values_by_column
from wds_tensorcache.ray.rows.structure import STRUCTURE, parse_structure
from wds_tensorcache.ray.rows.values import as_value, is_nothing


def to_torch(batch: Any, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return the columns of a batch; see `ray_to_torch`."""
    columns = values_by_column(batch)
    raws = columns.pop(STRUCTURE, ())
    known, absent = [], []
    for raw in raws:
        structure = None if raw is None else parse_structure(raw)
        known.append({} if structure is None else structure.dtypes)
        absent.append(frozenset[str]() if structure is None else structure.absent)
    found = {}
    for name, values in columns.items():
        given = dtypes.get(name)
        each = [given] * len(values) if given is not None or not known else [row.get(name) for row in known]
        if any(name in row for row in absent):
            rows = zip(values, absent, strict=True)
            values = [None if name in row and is_nothing(value) else value for value, row in rows]
        found[name] = _torch_column(values, each)
    return found


def _torch_column(values: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    if isinstance(values, np.ndarray) and len(set(dtypes)) == 1:
        return _as_torch(np.array(values), dtypes[0])
    made: list[Any] = [
        None if value is None else _as_torch(value, dtype) for value, dtype in zip(values, dtypes, strict=True)
    ]
    kinds = {(each.shape, each.dtype) if isinstance(each, torch.Tensor) else None for each in made}
    return torch.stack(made) if len(kinds) == 1 and None not in kinds else made


def _as_torch(value: Any, dtype: Any) -> Any:
    """Return a value as a tensor if torch has its dtype. Memory: newly allocated for an array."""
    if isinstance(value, np.ndarray):
        value = np.array(value)
    return as_value(value if dtype is None else from_column(value, dtype))
