"""Conversion of values in Arrow arrays to tensors and plain values."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.media import Media, extension_of, import_library
from wds_tensorcache.importers.safe_files import as_tensor

_MEDIA = {"Image": "png", "Audio": "wav", "Video": "mp4", "Pdf": "pdf", "Nifti": "nii"}
_PACKAGE = "pyarrow>=14.0.1"  # Hazard: older releases run pickles in the metadata of a schema (CVE-2023-47248)


class Lists(IntEnum):
    """The form of a column's lists of numbers."""

    TENSORS = 0  # nested lists are one tensor
    INNERMOST = 1  # the innermost lists are tensors, because lists of one level have different lengths
    PLAIN = 2  # lists of numbers and None


def import_pyarrow() -> Any:
    """Import `pyarrow`; raise ImportError if it is missing or unsafe."""
    arrow = import_library("pyarrow", _PACKAGE)
    if tuple(int(part) for part in arrow.__version__.split(".")[:3] if part.isdigit()) < (14, 0, 1):
        raise ImportError(f"pyarrow {arrow.__version__} may run code in files: pip install {_PACKAGE!r}")
    return arrow


def lists_of(array: Any) -> Lists:
    """Return the simplest form that fits all lists in these rows."""
    types = import_pyarrow().types
    array = getattr(array, "storage", array)
    bounds = np.arange(len(array) + 1)  # of the rows, in the elements of the current level
    form = Lists.TENSORS
    is_row = True  # a row may be null
    while _is_list(types, array.type):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        counts = np.diff(bounds)
        firsts = lengths[bounds[:-1][counts > 0]]
        if array.null_count and not is_row:
            form = Lists.PLAIN
        elif form is Lists.TENSORS and (lengths != np.repeat(firsts, counts[counts > 0])).any():
            form = Lists.INNERMOST
        bounds = np.concatenate(([0], np.cumsum(lengths)))[bounds]
        array, is_row = array.flatten(), False
    if types.is_struct(array.type):
        return max(map(lists_of, array.flatten()), default=Lists.TENSORS)
    if hasattr(array, "storage"):  # of an extension type, such as Array2D
        return lists_of(array)
    return Lists.PLAIN if array.null_count and _is_number(types, array.type) and not is_row else form


def value_of(array: Any, feature: Any = None, lists: Lists = Lists.TENSORS) -> Any:
    """Return the only element of a checked Arrow array. Media, which are structs of bytes and a path, become `Media`.

    `feature` is the description of the column in `dataset_info.json`, if there is one.

    Raises:
        FormatError: The struct contains only the path of media, and not the bytes; or Python has no such time.
    """
    types = import_pyarrow().types
    array = getattr(array, "storage", array)  # of an extension type
    if array.null_count:
        return None
    kind = array.type
    described = feature if isinstance(feature, dict) else {}
    if types.is_struct(kind):
        if str(described.get("_type")) in _MEDIA and {field.name for field in kind} == {"bytes", "path"}:
            return _media(array[0].as_py(), _MEDIA[described["_type"]])
        fields = zip(kind, array.flatten(), strict=True)
        return {field.name: value_of(item, described.get(field.name), lists) for field, item in fields}
    if not _is_list(types, kind):
        if str(kind) == "time64[ns]" and array[0].value % 1000:
            raise FormatError(f"has the time {array[0].value} ns, more precise than datetime.time")
        return array[0].as_py()
    sizes: list[int] = []
    flat = array
    while _is_list(types, flat.type) and (lists is Lists.TENSORS or not sizes):
        is_fixed = types.is_fixed_size_list(flat.type)
        sizes.append(flat.type.list_size if is_fixed else len(flat.flatten()) // max(len(flat), 1))
        flat = flat.flatten()
    if lists is not Lists.PLAIN and _is_number(types, flat.type):
        shape = described.get("shape")  # sizes inside an empty list are unknown
        if isinstance(shape, list) and len(shape) == len(sizes):
            sizes = [size or (wanted if type(wanted) is int else 0) for size, wanted in zip(sizes, shape, strict=True)]
        return as_tensor(flat.to_numpy(zero_copy_only=False).reshape(sizes))
    inner = feature[0] if isinstance(feature, list) and feature else described.get("feature")
    flat = array.flatten()
    return [value_of(flat.slice(i, 1), inner, lists) for i in range(len(flat))]


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _media(value: dict[str, Any], default: str) -> Any:
    content, path = value["bytes"], value["path"]
    if content is None:
        raise FormatError(f"contains only the path of a file, {path!r:.200}, which is not in the dataset; embed it")
    return Media(extension_of(content, path or "", default), content)
