"""FastVideo: Parquet files with columns `X_bytes`, `X_shape`, `X_dtype` for each tensor.

FastVideo writes `worker_*/data_chunk_{n}.parquet` with the tensors `vae_latent`, `text_embedding`, and for some models
`clip_feature`, `first_frame_latent`, `pil_image`, `trajectory_latents` and so on. Each row becomes a sample:

    {"vae_latent": …, "text_embedding": …, "id": "a1", "caption": "a cat", "width": 832, "num_frames": 77, …}

A tensor without bytes and without shape is absent in its row, and so in the sample. The name of a sample is its `id` if all
rows have different ids. Otherwise it is the path of its file and the number of its row. Any Parquet file with such columns is
read. Lists of numbers in other columns become tensors, or plain lists if some numbers are null. pyarrow is needed.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache, partial
from typing import Any

import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_values import import_pyarrow, lists_of, value_of
from wds_tensorcache.importers.generic.media import separate_media
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming

_NUM_PROBED = 8  # files
_FOOTER_NBYTES = 1 << 16  # at the end of a file, in which to look for the names of columns
_MAX_KEPT = 2  # row groups
_PARTS = ("_bytes", "_shape", "_dtype")
_DTYPES = "float64 float32 float16 bfloat16 complex64 complex128 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool".split()


def _recognize(folder: SourceFolder) -> int:
    names = folder.by_suffix.get(".parquet", [])
    return len(names) if any(_has_tensors(folder, name) for name in names[:_NUM_PROBED]) else 0


def _has_tensors(folder: SourceFolder, name: str) -> bool:
    with folder.open(name) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _FOOTER_NBYTES))
        footer = file.readall()
    return all(part.encode() in footer for part in _PARTS)


def _open(folder: SourceFolder) -> Source:
    import_pyarrow()
    import pyarrow.parquet

    rows: list[tuple[str, int, tuple[int, int], Any]] = []  # file, row in the file, (row group, row in the group), id
    bad = Faults()
    tensors: set[str] = set()

    @lru_cache(_MAX_KEPT)
    def read_group(name: str, group: int) -> Any:
        table = pyarrow.parquet.ParquetFile(folder.locate(name)).read_row_group(group)
        table.validate(full=True)
        return table

    for name in folder.by_suffix.get(".parquet", ()):
        with bad.of(name), pyarrow.parquet.ParquetFile(folder.locate(name)) as file:
            columns = file.schema_arrow.names
            if not _tensors(columns):
                raise FormatError("no tensor has the columns X_bytes, X_shape and X_dtype")
            if doubles := set(_tensors(columns)).intersection(columns):
                raise FormatError(f"has a tensor and a column called {min(doubles)!r:.100}; rename the column")
            tensors.update(_tensors(columns))
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            places = [(group, row) for group, count in enumerate(counts) for row in range(count)]
            ids = file.read(["id"])["id"].to_pylist() if "id" in columns else [None] * len(places)
            rows += [(name, number, *row) for number, row in enumerate(zip(places, ids, strict=True))]
    ids = [row[-1] for row in rows]
    has_ids = all(ids) and len(set(ids)) == len(ids)
    samples = [
        SourceSample(
            str(id) if has_ids else f"{os.path.splitext(name)[0]}/{number:08d}",
            (name,),
            partial(_load, read_group, name, *place),
        )
        for name, number, place, id in rows
    ]
    # Hazard: after a new file with an id of another file, a resumed import would store all samples twice.
    names = {"names": "of files, because ids repeat or are missing"} if any(ids) and not has_ids else {}
    return Source(samples, {"tensors": sorted(tensors), **names}, bad)


def _tensors(columns: list[str]) -> list[str]:
    names = [column.removesuffix("_bytes") for column in columns if column.endswith("_bytes")]
    return [name for name in names if {name + part for part in _PARTS} <= set(columns)]


def _load(read_group: Any, name: str, group: int, row: int) -> Loaded:
    with naming(name):
        table = read_group(name, group).slice(row, 1).combine_chunks()
        arrays = {column: table.column(column).chunk(0) for column in table.column_names}
        value: dict[str, Any] = {}
        for tensor in _tensors(table.column_names):
            raw, shape, dtype = (arrays.pop(tensor + part)[0].as_py() for part in _PARTS)
            if raw or shape:
                value[tensor] = _tensor(tensor, raw or b"", shape, dtype)
        rest = {column: value_of(array, lists=lists_of(array)) for column, array in arrays.items()}
        return separate_media(value | rest)


def _tensor(name: str, raw: bytes, shape: Any, dtype: Any) -> torch.Tensor:
    if dtype not in _DTYPES or any(type(size) is not int or size < 0 for size in shape or ()):
        raise FormatError(f"tensor {name!r:.100} has the dtype {dtype!r:.40} and the shape {shape!r:.200}")
    kind = getattr(torch, dtype)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise FormatError(f"tensor {name!r:.100} of {dtype} {shape!r:.200} has {len(raw):,} bytes")
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)


FORMAT = Format(
    "fastvideo",
    "FastVideo: Parquet files with the columns X_bytes, X_shape and X_dtype of each tensor",
    _recognize,
    _open,
)
