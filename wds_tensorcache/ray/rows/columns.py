"""Columns of Ray's blocks and batches: Arrow arrays from values, and values from columns of any format."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from ray.data.extensions import (
    ArrowPythonObjectType,
    ArrowTensorArray,
    ArrowVariableShapedTensorArray,
)

Array = np.ndarray[Any, Any]
Kind = Literal["fixed", "ragged", "optional", "object"]
_INT64 = range(-(1 << 63), 1 << 63)
_PLAIN = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), bytes: pa.binary()}


def tensor_column(arrays: Any, kind: Kind, absent: Array | None = None) -> Any:
    """Return the Arrow array of a column of tensors.

    Args:
        arrays: An array `[B, …]`, or a sequence of B arrays; with kind `"object"`, None where a sample lacks the tensor.
        kind: `"fixed"` for tensors of one shape, `"ragged"` for tensors of one number of dimensions, `"optional"` for those
            that some samples lack, `"object"` for any.
        absent: Empty array of the dtype and number of dimensions of optional tensors.
            Ray cannot combine blocks whose kinds of a column differ.

    Memory: aliases an array `[B, …]`; copies a list.
    """
    if kind == "fixed":
        return ArrowTensorArray.from_numpy(arrays if isinstance(arrays, np.ndarray) else np.stack(arrays))
    if kind == "ragged":
        return ArrowVariableShapedTensorArray.from_numpy(list(arrays))
    if kind == "optional" and absent is not None:
        return _optional_column(arrays, absent)
    return object_column(list(arrays))


def _optional_column(arrays: Any, absent: Array) -> Any:
    """Return a ragged column with nulls.

    Hazard: Ray's conversion to numpy ignores which rows are null, and fails if their parts are null, too. So null rows have the
    parts of an empty tensor, which batches of numpy and pandas then contain.
    """
    found = ArrowVariableShapedTensorArray.from_numpy([absent if array is None else array for array in arrays])
    parts = [found.storage.field(at) for at in range(2)]
    nulls = pa.array([array is None for array in arrays], pa.bool_())
    storage = pa.StructArray.from_arrays(parts, fields=list(found.storage.type), mask=nulls)
    return found.type.wrap_array(storage)


def object_column(values: Sequence[Any]) -> Any:
    """Return a column of Python objects, each pickled, where None is a null; Ray itself would pickle None, too."""
    kind = ArrowPythonObjectType()
    pickled = [None if value is None else pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
    return kind.wrap_array(pa.array(pickled, kind.storage_type))


def value_kind(values: Iterable[Any]) -> str:
    """Return the name of the plain type of all values that are not None, `"object"` if they have none, "" without values."""
    kinds = set()
    for value in values:
        if value is None:
            continue
        cls = type(value)
        is_plain = cls in _PLAIN and (cls is not int or value in _INT64) and (cls is not str or _is_text(value))
        kinds.add(cls.__name__ if is_plain else "object")
    return kinds.pop() if len(kinds) == 1 else "object" if kinds else ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def value_column(values: Sequence[Any], declared: str = "") -> Any:
    """Return a column of small values: text, bools, 64-bit ints, floats or bytes if all have one type, else Python objects.

    Args:
        values: One value for each row; None is a null.
        declared: The kind that the column has in other blocks; "" if it is not known.
    """
    found = value_kind(values)
    kind = declared if found in ("", declared) else found
    if kind == "object" or (declared == "object"):
        return object_column(values)
    if not kind:
        return pa.nulls(len(values))
    (dtype,) = (dtype for cls, dtype in _PLAIN.items() if cls.__name__ == kind)
    return pa.array(values, dtype)


def column_values(column: Any) -> Any:
    """Return the values of a column, one for each row: an array `[B, …]` of numbers, or else a list.

    Args:
        column: An Arrow array, a series of pandas, an array of numpy, or a sequence.

    Memory: arrays alias the column if Arrow holds it in one piece.
    """
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return _arrow_values(column)
    if isinstance(column, np.ndarray):
        return column if column.dtype != object else [_plain(value) for value in column]
    if hasattr(column, "to_numpy") and hasattr(column, "iloc"):
        if isinstance(column.dtype, np.dtype):
            return column_values(column.to_numpy())
        return [_plain(value) for value in column]
    return [_plain(value) for value in column]


def _plain(value: Any) -> Any:
    """Return a value of pandas or Ray without its wrapper: the array of a tensor element, None for NA."""
    if type(value).__name__ == "TensorArrayElement":
        return value.to_numpy()
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _arrow_values(column: Any) -> Any:
    if not isinstance(column.type, pa.BaseExtensionType):
        kind = column.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if is_number and not column.null_count:  # as an array, because a Python float loses the bits of some NaNs
            chunk = column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks or [pa.nulls(0, kind)])
            return chunk.to_numpy(zero_copy_only=False)
        return column.to_pylist()
    if isinstance(column.type, ArrowPythonObjectType) or column.null_count:
        return column.to_pylist()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_tensors(chunk) for chunk in chunks if len(chunk)]
    if len(parts) == 1 and isinstance(parts[0], np.ndarray) and parts[0].dtype != object:
        return parts[0]
    return [tensor for part in parts for tensor in part]


def _tensors(chunk: Any) -> Any:
    """Return the tensors of one Arrow array without nulls."""
    if hasattr(chunk, "to_numpy_ndarray"):
        return chunk.to_numpy_ndarray()
    return chunk.to_numpy(zero_copy_only=False)


def values_by_column(batch: Any) -> dict[str, Sequence[Any]]:
    """Return the values of each column of a block or batch: an Arrow table, a data frame, or a dict of columns.

    Raises:
        TypeError: The batch is none of those.
    """
    if isinstance(batch, pa.Table):
        return {name: column_values(batch.column(at)) for at, name in enumerate(batch.column_names)}
    if isinstance(batch, Mapping):
        return {name: column_values(column) for name, column in batch.items()}
    if hasattr(batch, "columns") and hasattr(batch, "iloc"):
        return dict(_frame_columns(batch))
    raise TypeError(f"expected a batch of Ray: a table, a data frame or a dict of columns, got {type(batch).__name__}")


def _frame_columns(frame: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    for at, name in enumerate(frame.columns):
        yield str(name), column_values(frame.iloc[:, at])
