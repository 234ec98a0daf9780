"""Conversions between values and the columns of Ray's blocks and batches."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from ray.data.extensions import (
    ArrowPythonObjectType,
    ArrowTensorArray,
    ArrowVariableShapedTensorArray,
    get_arrow_extension_tensor_types,
)

from wds_tensorcache.codec.carriers import arrow_carrier
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.reading.schema import TensorSchema

# tensors of one shape; of one number of dimensions; missing in some samples; Python objects. Ray cannot combine blocks in which
# a column has different kinds.
Kind = Literal["fixed", "ragged", "optional", "object"]
PLAIN = {"str": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "bytes": pa.binary()}
_INT64 = range(-(1 << 63), 1 << 63)
_SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 cannot encode them


def is_in_arrow(dtype: Any) -> bool:
    return dtype_name(dtype) == str(arrow_carrier(dtype).dtype)


def carry(value: Any, is_object: bool) -> Any:
    """View a tensor as its carrier. In a column of Python objects, bits are void of the tensor's shape."""
    array = arrow_carrier(value.dtype).carry(value)
    # Hazard: Ray makes one dtype of the numbers in a column, also of those that are bits. It leaves void as it is.
    if not is_object or is_in_arrow(value.dtype):
        return array
    return np.ascontiguousarray(array).reshape(-1).view(f"V{value.dtype.itemsize}").reshape(value.shape)


def tensor_column(arrays: Any, kind: Kind, tensor: TensorSchema) -> Any:
    """Return the column of an array `[B, …]` or a list. A list has B arrays, or None for lacking tensors."""
    if kind == "fixed":
        return ArrowTensorArray.from_numpy(arrays if isinstance(arrays, np.ndarray) else np.stack(arrays))
    if kind == "object":
        return object_column(list(arrays))
    carrier = arrow_carrier(tensor.dtype)
    absent = np.empty((0,) * len(tensor.shape or ()) + carrier.inner, carrier.dtype)
    column = ArrowVariableShapedTensorArray.from_numpy([absent if array is None else array for array in arrays])
    if kind == "ragged":
        return column
    # Hazard: Ray's conversion to numpy ignores which rows are null, and fails if their parts are null, too. So null rows have
    # the parts of an empty tensor, which batches of numpy and pandas then contain.
    parts = [column.storage.field(at) for at in range(2)]
    nulls = pa.array([array is None for array in arrays], pa.bool_())
    storage = pa.StructArray.from_arrays(parts, fields=list(column.storage.type), mask=nulls)
    return column.type.wrap_array(storage)


def object_column(values: Sequence[Any]) -> Any:
    kind = ArrowPythonObjectType()
    # Ray itself would pickle None, too
    pickled = [None if value is None else pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
    return kind.wrap_array(pa.array(pickled, kind.storage_type))


def value_kind(values: Iterable[Any]) -> str:
    """Return the common type of all values but None.

    It is a name in `PLAIN`, or `"object"`; "" if all values are None.
    """
    kinds = set()
    for value in values:
        if value is not None:
            cls = type(value).__name__
            is_plain = cls in PLAIN and (cls != "int" or value in _INT64)
            kinds.add(cls if is_plain and not (cls == "str" and _SURROGATE.search(value)) else "object")
    return kinds.pop() if len(kinds) == 1 else "object" if kinds else ""


def value_column(values: Sequence[Any], declared: str) -> Any:
    """Return a column of small values.

    `declared` is the column's kind in other blocks, or "" if it is unknown.
    """
    kind = value_kind(values) or declared
    if "object" in (kind, declared):
        return object_column(values)
    return pa.array(values, PLAIN[kind]) if kind else pa.nulls(len(values))


def values_by_column(batch: Any) -> dict[str, Any]:
    """Return the columns of a batch as arrays `[B, …]` or lists.

    Raises:
        TypeError: The batch is no table, data frame or dict.
        EncodeError: Two columns have the same name.
    """
    if isinstance(batch, pa.Table):
        # Ray's join leaves two tensors of one name, without a suffix
        if twice := {name for name in batch.column_names if batch.column_names.count(name) > 1}:
            raise EncodeError(
                f"two columns have the name {min(twice)!r}; leave out one before a join, by read_ray(select=…)"
            )
        return {name: _arrow_values(name, batch.column(at)) for at, name in enumerate(batch.column_names)}
    if hasattr(batch, "items"):
        return {str(name): _values(column) for name, column in batch.items()}
    raise TypeError(f"expected a batch of Ray: a table, a data frame or a dict of columns, got {type(batch).__name__}")


def _values(column: Any) -> Any:
    if hasattr(column, "iloc") and isinstance(column.dtype, np.dtype):
        column = column.to_numpy()
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column
    return [_unwrap(value) for value in column]


def _unwrap(value: Any) -> Any:
    """Return the array of a tensor element, or None for NA."""
    if type(value).__name__ == "TensorArrayElement":
        return value.to_numpy()
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _arrow_values(name: str, column: Any) -> Any:
    kind = column.type
    if pa.types.is_time64(kind):
        try:
            column = column.cast(pa.time64("us"))
        except pa.ArrowInvalid as exc:  # Python would cut the nanoseconds
            problem = f"column {name!r} has times more precise than datetime.time"
            raise EncodeError(f"{problem}; cast it to int64, or to time64('us') with safe=False") from exc
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if column.null_count or not (is_number or isinstance(kind, get_arrow_extension_tensor_types())):
        return column.to_pylist()
    if is_number:  # as an array, because a Python float loses the bits of some NaNs
        return column.to_numpy()
    parts = [
        chunk.to_numpy_ndarray() if hasattr(chunk, "to_numpy_ndarray") else chunk.to_numpy(zero_copy_only=False)
        for chunk in column.chunks
        if len(chunk)
    ]
    is_dense = len(parts) == 1 and parts[0].dtype != object
    return parts[0] if is_dense else [tensor for part in parts for tensor in part]
