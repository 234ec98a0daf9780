"""Conversions between rows or batches of Ray, and samples or torch tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.ray.columns import carry, is_in_arrow
from wds_tensorcache.ray.rows import KEY, MARK, Mark, as_tensor, exact_columns, sample_of, split_batch
from wds_tensorcache.shards.names import NamedKey


def ray_sample(row: Mapping[str, Any], *, allow: Iterable[type] = ()) -> Any:
    """Return the nested sample of one row, for example of `ds.take(1)[0]`.

    A row of `read_ray(…, exact=True)` or `ray_table` becomes the sample that was written; additional columns become new items.
    Any other row becomes a dict, nested at the dots of its column names. Tensors of `read_ray` have their own dtypes again, for
    example bfloat16. The column `__key__` and columns of members, such as `.jpg`, are left out. Nulls are left out of rows of
    `read_ray` and `ray_table`, and become None in any other row.

    Args:
        row: Values by column, as `ds.take` and `ds.iter_rows` return them, and as functions of `ds.map` get them.
        allow: Classes that samples may contain besides the types of the format.

    Raises:
        FormatError: `read_ray` did not make the text in the column `__tensorcache__`, or an exact sample is damaged.
        EncodeError: Two columns have the same place in the sample. Or the columns lack a part of the sample, for example its
            lists; read it with `read_ray(…, exact=True)`. Or an int of 2**53 or more has become a float.
        UnsafeSkeletonError: The sample contains a class that is not in `allow`.

    Memory: tensors are newly allocated, on the CPU.
    """
    columns, marks = split_batch({name: [value] for name, value in row.items()})
    values = {name: column[0] for name, column in columns.items()}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Lazy):
            return leaf.load()
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()

    return rebuild(sample_of(values, marks[0] if marks else None, allow), copy)


def ray_collate(*, dtypes: Mapping[str, torch.dtype] | None = None) -> Any:
    """Return a collate function for `ds.iter_torch_batches`. The function calls `ray_to_torch` with these `dtypes`.

    Ray moves a batch to a device only if all its columns are tensors: select such columns first, or move the tensors yourself.
    """
    return _Collate(dtypes)


class _Collate(ArrowBatchCollateFn):  # type: ignore[misc]
    """The function that `ray_collate` returns. Threads/fork/pickle: immutable, safe everywhere."""

    def __init__(self, dtypes: Mapping[str, torch.dtype] | None) -> None:
        super().__init__()
        self._dtypes = dict(dtypes or {})

    def __call__(self, batch: Any) -> dict[str, Any]:
        return ray_to_torch(batch, dtypes=self._dtypes)


def ray_to_torch(batch: Any, *, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Any]:
    """Return the columns of a batch as torch tensors.

    Functions of `ds.map_batches` and `ds.iter_torch_batches` get such batches.

    Args:
        batch: Batch in any of Ray's formats: numpy, pandas or pyarrow.
        dtypes: Dtypes of tensors by column, for batches without the column `__tensorcache__`, which records them. They take
            precedence over this column. A dtype has no effect on arrays of another dtype than its column in `read_ray`.

    Returns:
        By column: a tensor `[B, …]` of the stored dtype, for example bfloat16, if shapes and dtypes agree. Otherwise a list of
        B tensors, with None where a sample lacks the tensor. Numbers without nulls become a tensor `[B]`; other values, and
        nullable columns of pandas, become a list. numpy arrays of texts and dates stay numpy arrays. In an empty batch, each
        column becomes an empty list. The column `__tensorcache__` is left out.

    Raises:
        FormatError: `read_ray` did not make the text in the column `__tensorcache__`.
        EncodeError: An int has lost bits because other rows lack the value, or a time is more precise than microseconds. Or two
            columns have the same name.
        TypeError: `batch` has another format.

    Memory: tensors are newly allocated, on the CPU.
    """
    columns, marks = split_batch(batch)
    tensors = {}
    for name, values in columns.items():
        dtype = (dtypes or {}).get(name)
        types = [dtype or (None if mark is None else mark.columns.get(name)) for mark in marks]
        tensors[name] = _torch_column(values, types)
    return tensors


def _torch_column(values: Sequence[Any], types: Sequence[Any]) -> Any:
    if isinstance(values, np.ndarray) and len(set(types)) == 1:
        return as_tensor(np.array(values), types[0])
    items: list[Any] = [
        as_tensor(np.array(value) if isinstance(value, np.ndarray) else value, dtype)
        for value, dtype in zip(values, types, strict=True)
    ]
    kinds = {(item.shape, item.dtype) if isinstance(item, torch.Tensor) else None for item in items}
    return torch.stack(items) if len(kinds) == 1 and None not in kinds else items


def ray_from_torch(tensors: Mapping[str, Any], batch: Any = None) -> dict[str, Any]:
    """Return tensors as columns of a batch, the inverse of `ray_to_torch`.

    Functions of `ds.map_batches` return such columns.

    Args:
        tensors: By column: a tensor `[B, …]` of any dtype, or a list of B tensors, None where a sample lacks the tensor. Other
            values stay as they are.
        batch: Batch that the function got, with the same B rows. It is required for dtypes that Arrow lacks: bfloat16, 8-bit
            floats and complex numbers.

    Returns:
        By column: a numpy array `[B, …]`, or a list of B arrays. Dtypes are as in the columns of `read_ray`: bfloat16 is uint16
            with the same bits, and `numpy.void` in tensors `[B]` or if the rows differ in dtype. With `batch`, also the
            column `__tensorcache__`, which records the dtypes. Other columns of `batch` are not returned.

    Raises:
        ValueError: The format cannot store a dtype, or Arrow lacks a dtype and `batch` is None.
        FormatError, EncodeError, TypeError: As for `ray_to_torch`, if `batch` is given.

    Memory: aliases tensors on the CPU. Tensors on a GPU are copied, and so are conjugate views, and rows of `numpy.void` that
        are not contiguous.
    """
    columns = {name: _as_column(value) for name, value in tensors.items()}
    dtypes = {name: rows for name, value in tensors.items() if any(rows := _dtypes_of(value))}
    if batch is not None:
        texts = []
        for at, mark in enumerate(split_batch(batch)[1]):
            unchanged = {name: kind for name, kind in (mark or Mark()).columns.items() if name not in tensors}
            own = {name: rows[at % len(rows)] for name, rows in dtypes.items()}
            texts.append(replace(mark or Mark(), columns=unchanged | own).encode())
        return {**columns, MARK: texts}
    for name, dtype in ((name, dtype) for name, rows in dtypes.items() for dtype in rows if dtype is not None):
        if not is_in_arrow(dtype):
            problem = f"column {name!r} is {dtype}, which Arrow lacks"
            raise ValueError(f"{problem}; pass the batch, ray_from_torch(tensors, batch), which records the dtype")
    return columns


def _dtypes_of(value: Any) -> list[torch.dtype | None]:
    """Return the dtypes of a list's rows, or a tensor's dtype. Other values have the dtype None."""
    rows = value if isinstance(value, list) else [value]
    return [row.dtype if isinstance(row, torch.Tensor) else None for row in rows]


def _as_column(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 1 and not is_in_arrow(value.dtype):
        value = list(value)  # Hazard: Ray makes bytes of an array of void.
    rows = [row for row in value if isinstance(row, torch.Tensor)] if isinstance(value, list) else []
    return _carry(value, len({row.dtype for row in rows}) > 1 or not all(row.ndim for row in rows))


def _carry(value: Any, is_object: bool) -> Any:
    if isinstance(value, list):
        return [_carry(row, is_object) for row in value]
    if not isinstance(value, torch.Tensor):
        return value
    return carry(value.detach().cpu().resolve_conj().resolve_neg(), is_object)


def ray_table(keys: Sequence[str], samples: Sequence[Any], *, allow: Iterable[type] = ()) -> Any:
    """Return a `pyarrow.Table` with one exact row for each nested sample.

    Return the table from a function of `ds.map_batches` to hand samples to `write_ray`. Its rows have the form of the rows of
    `read_ray(…, exact=True)`.

    Args:
        keys: Key of each sample, a text. `write_ray` checks that keys are valid and unique.
        samples: Nested samples, of torch tensors, numpy arrays and other values.
        allow: Classes that samples may contain besides the types of the format.

    Raises:
        EncodeError: A value cannot be stored.
        ValueError: The numbers of keys and samples differ.
        TypeError: A key is not a text.

    Memory: tensors are copied.
    """
    if len(keys) != len(samples):
        raise ValueError(f"{len(keys)} keys for {len(samples)} samples, expected one key for each sample")
    marks = [Mark(original=key.original if isinstance(key, NamedKey) else None) for key in keys]
    return pa.table({KEY: pa.array(list(keys), pa.string()), **exact_columns(keys, samples, marks, allow)})
