"""Blocks of Ray, as Arrow tables, from samples: a column for the keys, each tensor, each small value, and the structure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from wds_tensorcache.errors import EncodeError
from wds_tensorcache.ray.rows.columns import Kind, tensor_column, value_column
from wds_tensorcache.ray.rows.structure import KEY, STRUCTURE, encode_structure, value_columns


def make_table(
    keys: Sequence[str],
    samples: Sequence[Any],
    tensors: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    value_kinds: Mapping[str, str],
    *,
    has_values: bool,
    is_described: bool = False,
    members: Mapping[str, Sequence[bytes | None]] | None = None,
    originals: Sequence[str | None] | None = None,
    allow: Iterable[type] = (),
    columns: Iterable[str] | None = None,
    absent: Mapping[str, Any] | None = None,
) -> Any:
    """Return the table of B samples.

    Args:
        keys: Keys.
        samples: Samples with lazy tensors, which show the structure.
        tensors: Bits of the tensors by name: an array `[B, …]`, or B arrays, None where a sample lacks the tensor.
        kinds: Kinds of tensor columns by name; those of other columns are chosen here.
        value_kinds: Kinds of columns of small values by name, as for `value_column`.
        has_values: True if small values get columns.
        is_described: True if the samples come from a cache with a fingerprint.
        members: Members outside caches by the names of their columns; None where a sample lacks the member.
        originals: Original names of samples whose keys have hashes of them; None for other samples.
        allow: Classes that samples may contain.
        columns: Names of the columns to make; None for all.
        absent: Empty arrays of the dtypes and numbers of dimensions of optional tensors, by name.

    Raises:
        EncodeError: A tensor is called like the column of the keys or of the structure.
    """
    wanted = None if columns is None else set(columns)
    table: dict[str, Any] = {}
    if wanted is None or KEY in wanted:
        table[KEY] = pa.array(keys, pa.string())
    for name, arrays in tensors.items():
        if name in (KEY, STRUCTURE):
            raise EncodeError(f"a tensor is called {name!r}, which is the name of another column; rename it")
        table[name] = tensor_column(arrays, kinds.get(name) or tensor_kind(arrays), (absent or {}).get(name))
    found = [value_columns(sample) for sample in samples] if has_values else []
    names = [name for name in dict.fromkeys((*value_kinds, *chain.from_iterable(found))) if name not in table]
    for name in names if has_values else ():
        if wanted is None or name in wanted:
            values = [each[name][1] if name in each else None for each in found]
            table[name] = value_column(values, value_kinds.get(name, ""))
    for name, contents in (members or {}).items():
        table[name] = pa.array(contents, pa.large_binary())
    if wanted is None or STRUCTURE in wanted:
        lacking = [[name for name in names if name not in each] if found else [] for each in found or samples]
        for at, lacks in enumerate(lacking):
            lacks += [name for name, arrays in tensors.items() if arrays[at] is None]
        raws = [
            encode_structure(
                sample, lacks, has_values=has_values, is_described=is_described, original=original, allow=allow
            )
            for sample, lacks, original in zip(samples, lacking, originals or [None] * len(keys), strict=True)
        ]
        table[STRUCTURE] = pa.array(raws, pa.binary())
    return pa.table(table)


def tensor_kind(arrays: Any) -> Kind:
    """Return the narrowest kind of a column for these tensors."""
    if isinstance(arrays, np.ndarray):
        return "fixed"
    if not len(arrays) or any(array is None for array in arrays) or len({array.dtype for array in arrays}) > 1:
        return "object"
    if len({array.shape for array in arrays}) == 1:
        return "fixed"
    return "ragged" if len({array.ndim for array in arrays}) == 1 else "object"


def values_of(samples: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the columns of the samples' small values by name; None where a sample lacks the value."""
    found = [value_columns(sample) for sample in samples]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: [each[name][1] if name in each else None for each in found] for name in names}
