"""FastVideo: Parquet files with three columns for each tensor, `X_bytes`, `X_shape` and `X_dtype`.

FastVideo writes `worker_*/data_chunk_{n}.parquet` with the tensors `vae_latent`, `text_embedding`, and for some models
`clip_feature`, `first_frame_latent`, `pil_image`, `trajectory_latents` and so on. Each row becomes a sample:

    {"vae_latent": …, "text_embedding": …, "id": "a1", "caption": "a cat", "width": 832, "num_frames": 77, …}

A tensor without bytes and without shape is absent in its row, and so in the sample. The name of a sample is its `id` if all
ids are different, else the path of its file and the number of its row. Any Parquet file with such columns is read. pyarrow is
needed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_stream import open_for_arrow
from wds_tensorcache.importers.generic.arrow_values import import_pyarrow, value_of
from wds_tensorcache.importers.generic.chunk_files import Recent
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_NUM_PROBED = 8  # files
_MAX_FOOTER = 1 << 24
_MAX_ID = 4096  # characters of an id that becomes a name
_MAX_KEPT = 2  # row groups
_MAX_RATIO, _MIN_LIMIT = 64, 1 << 28  # a row group may expand to 64 times the length of its file, or to 256 MiB
_DTYPES = "float64 float32 float16 bfloat16 complex64 complex128 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool".split()


def _recognize(folder: SourceFolder) -> int:
    names = folder.by_suffix.get(".parquet", [])
    return len(names) if any(_has_tensors(folder, name) for name in names[:_NUM_PROBED]) else 0


def _has_tensors(folder: SourceFolder, name: str) -> bool:
    """Return whether the names of the columns, which are at the end of the file, include all three of a tensor."""
    try:
        nbytes = os.path.getsize(folder.locate(name))
        length = int.from_bytes(folder.read_range(name, nbytes - 8, nbytes - 4), "little")
        footer = folder.read_range(name, max(0, nbytes - 8 - min(length, _MAX_FOOTER)), nbytes)
    except (FormatError, OSError, ValueError):
        return False
    tensors = {match[1] for match in re.finditer(rb"(?<!\w)(\w{1,200})_bytes", footer)}
    return any(tensor + b"_shape" in footer and tensor + b"_dtype" in footer for tensor in tensors)


def _open(folder: SourceFolder) -> Source:
    arrow = import_pyarrow()
    found: list[tuple[str, int, int, int, str | None]] = []  # file, row group, row in it, row in the file, id
    bad: dict[str, str] = {}
    tensors: set[str] = set()
    for name in folder.by_suffix.get(".parquet", ()):
        try:
            with _open_file(arrow, folder, name) as file:
                tensors.update(_tensors(file.schema_arrow.names))
                found += _rows(file, name, os.path.getsize(folder.locate(name)))
        except (arrow.ArrowException, OSError, ValueError) as exc:
            bad[name] = f"is not a Parquet file of FastVideo: {exc!s:.200}"
    ids = [each for *_, each in found]
    has_ids = all(ids) and len(set(ids)) == len(ids)
    groups: Recent[Any] = Recent(_MAX_KEPT)
    samples = [
        SourceSample(
            str(each) if has_ids else f"{os.path.splitext(name)[0]}/{number:08d}",
            (name,),
            partial(_load, folder, groups, name, group, row),
        )
        for name, group, row, number, each in found
    ]
    return Source(samples, {"tensors": sorted(tensors)}, bad)


@contextmanager
def _open_file(arrow: Any, folder: SourceFolder, name: str) -> Iterator[Any]:
    """Open a Parquet file. Repeated bytes and texts stay in a dictionary: otherwise a small file could expand to any size."""
    types = arrow.types
    with open_for_arrow(folder, name) as opened:
        try:
            fields = list(arrow.parquet.read_schema(opened))
            names = [field.name for field in fields if types.is_binary(field.type) or types.is_string(field.type)]
            opened.seek(0)
            with arrow.parquet.ParquetFile(opened, read_dictionary=names) as file:
                yield file
        except OSError as exc:
            if exc.errno is not None:  # pyarrow raises OSError without a number for damage
                raise
            raise FormatError(f"is damaged: {exc!s:.200}").at(name) from exc


def _plain(array: Any) -> Any:
    return array.dictionary_decode() if hasattr(array, "dictionary") else array


def _rows(file: Any, name: str, nbytes: int) -> Iterator[tuple[str, int, int, int, str | None]]:
    if not _tensors(file.schema_arrow.names):
        raise FormatError("no tensor has the columns X_bytes, X_shape and X_dtype")
    number = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if count > nbytes:  # empty rows take no bytes in the file, but memory here
            raise FormatError(f"row group {group} has {count:,} rows, in a file of {nbytes:,} bytes")
        ids = [None] * count
        if "id" in file.schema_arrow.names and _nbytes_of(file, group, "id") <= max(_MAX_RATIO * nbytes, _MIN_LIMIT):
            column = file.read_row_group(group, columns=["id"]).column("id").combine_chunks()
            texts = getattr(column, "dictionary", column)
            if texts.nbytes <= nbytes and max(map(len, texts.to_pylist()), default=0) <= _MAX_ID:
                ids = column.to_pylist()
        for row, each in enumerate(ids):
            yield name, group, row, number, each
            number += 1


def _nbytes_of(file: Any, group: int, name: str) -> int:
    """Return the length of a column in a row group before compression, as the file says."""
    columns = file.metadata.row_group(group)
    found = (columns.column(number) for number in range(columns.num_columns))
    return sum(each.total_uncompressed_size for each in found if each.path_in_schema == name)


def _tensors(columns: list[str]) -> list[str]:
    names = [column.removesuffix("_bytes") for column in columns if column.endswith("_bytes")]
    return [name for name in names if {f"{name}_shape", f"{name}_dtype"} <= set(columns)]


def _load(folder: SourceFolder, groups: Recent[Any], name: str, group: int, row: int) -> Loaded:
    arrow = import_pyarrow()
    try:
        table = groups.get((name, group), lambda: _read_group(folder, arrow, name, group)).slice(row, 1)
        arrays = {column: _plain(table.column(column).combine_chunks()) for column in table.column_names}
        tensors = {each: _tensor(arrays, each) for each in _tensors(table.column_names)}
        parts = {f"{each}_{part}" for each in tensors for part in ("bytes", "shape", "dtype")}
        value: dict[str, Any] = {each: tensor for each, tensor in tensors.items() if tensor is not None}
        value |= {column: value_of(array) for column, array in arrays.items() if column not in parts}
    except FormatError as exc:
        raise exc.at(name) from exc
    except (arrow.ArrowException, ValueError) as exc:
        raise FormatError(f"row {row} of row group {group} cannot be decoded: {exc!r:.200}").at(name) from exc
    return Loaded(value)


def _read_group(folder: SourceFolder, arrow: Any, name: str, group: int) -> Any:
    path = folder.locate(name)
    with _open_file(arrow, folder, name) as file:
        nbytes = file.metadata.row_group(group).total_byte_size
        if nbytes > max(_MAX_RATIO * os.path.getsize(path), _MIN_LIMIT):
            raise FormatError(f"row group {group} expands to {nbytes:,} bytes")
        table = file.read_row_group(group)
    table.validate(full=True)
    return table


def _tensor(arrays: dict[str, Any], name: str) -> torch.Tensor | None:
    raw, shape, dtype = (arrays[f"{name}_{part}"][0].as_py() for part in ("bytes", "shape", "dtype"))
    if not raw and not shape:
        return None
    if dtype not in _DTYPES or any(type(size) is not int or size < 0 for size in shape or ()):
        raise FormatError(f"tensor {name!r:.100} has the dtype {dtype!r:.40} and the shape {shape!r:.200}")
    kind = getattr(torch, dtype)
    if math.prod(shape) * kind.itemsize != len(raw or b""):
        raise FormatError(f"tensor {name!r:.100} of {dtype} {shape!r:.200} has {len(raw or b''):,} bytes")
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)


FORMAT = Format(
    "fastvideo",
    "FastVideo: Parquet files with the columns X_bytes, X_shape and X_dtype of each tensor",
    _recognize,
    _open,
)
