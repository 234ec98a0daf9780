"""Values of columns: as values of a sample, and compared with those that the sample had."""

from __future__ import annotations

import datetime
from collections.abc import Set
from decimal import Decimal
from typing import Any

import numpy as np

from wds_tensorcache.ray.rows.bits import from_bits, parse_dtype


def as_value(value: Any) -> Any:
    """Return a value of a column for a sample: a torch.Tensor of an array if torch has the dtype, and Python's numbers."""
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return value.tolist()
        name = f"tensor:{value.dtype.name}"
        try:
            dtype = parse_dtype(name)
        except ValueError:
            return np.array(value)
        return from_bits(np.array(value, value.dtype.newbyteorder("<")), dtype)
    return value


def is_nothing(value: Any) -> bool:
    """Return whether a value stands for a null: an empty tensor in a batch of numpy, or NaN in place of a number."""
    return is_same(None, value) or (isinstance(value, np.ndarray) and value.ndim > 0 and not value.size)


def is_same(old: Any, new: Any) -> bool:
    """Return whether a column's value is the old one, perhaps in the form that a batch of numpy or pandas gave it."""
    old, new = _as_lists(old), _as_lists(new)
    if isinstance(old, (set, frozenset)) and isinstance(new, list):
        return _is_same_set(old, new)
    if isinstance(old, list) or isinstance(new, list):
        return type(old) is type(new) and len(old) == len(new) and all(map(is_same, old, new))
    if _is_null(old) or _is_null(new):
        return _is_null(old) and _is_null(new)
    return bool(old == new)


def _is_null(value: Any) -> bool:
    """Return whether a value is None or NaN, which pandas and Arrow do not tell apart."""
    if isinstance(value, Decimal):
        return value.is_nan()  # comparing a signaling NaN raises an error
    return value is None or (isinstance(value, float) and value != value)


def _is_same_set(old: Set[Any], new: list[Any]) -> bool:
    """Return whether a list has the items of a set. A batch of numpy makes lists of sets, in any order."""
    missing, others = set(old), []
    for item in new:
        # one look-up for each item: comparing each with each takes seconds for a set of 2,000
        try:
            missing.remove(item)
        except (KeyError, TypeError):  # changed by numpy, for example into a list, which has no hash
            others.append(item)
    return len(missing) == len(others) and all(any(is_same(item, other) for other in others) for item in missing)


def _as_lists(value: Any) -> Any:
    if isinstance(value, datetime.time):
        return value.replace(tzinfo=None, fold=0)  # Arrow's times have no zone
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else value
