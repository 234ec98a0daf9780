"""MosaicML streaming (MDS): folders with `index.json` and shards such as `shard.00000.mds`.

Shards may be compressed as wholes. Each sample has the columns that `MDSWriter(columns=…)` declared:

- `ndarray`, with or without dtype and shape: a tensor;
- `uint8` … `float64`: a tensor of shape [];
- `int`, `str_int`, `str_float`, `str_decimal`, `str`, `json`: the value itself;
- `bytes`: a uint8 tensor [n]. Neither its dtype nor its shape is in the data. MicroDiffusion, for example, stores float16:
  `batch["latents_256"].view(torch.float16).reshape(-1, 4, 32, 32)`;
- `pil`: the pixels, uint8 [height, width, channels];
- `jpeg`, `png`, and lists of these: members, for example `COLUMN.jpg` or `COLUMN.0.jpg`;
- `pkl`: refused unless the files are trusted.

Samples are named by their position, after the path of their folder. The package `mosaicml-streaming` decodes them. Hashes in
the index are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.media import (
    Media,
    Row,
    find_indexes,
    import_library,
    open_indexes,
    split_list,
)
from wds_tensorcache.importers.safe_files import REMEDY
from wds_tensorcache.importers.source import Format, Source
from wds_tensorcache.importers.source_folder import SourceFolder

_PACKAGE = "mosaicml-streaming"
_MAX_EXPANDED = 2  # compressed shards, each of 64 MiB by default
_PLAIN = frozenset(
    "ndarray uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 "
    "int str_int str_float str_decimal str json bytes pil list[pil]".split()
)
_MEDIA = {"jpeg": "jpg", "png": "png"}
_LISTS = {"jpeg_array": (0, "jpg"), "jpegarray": (0, "jpg"), "list[jpeg]": (4, "jpg"), "list[png]": (4, "png")}


def _recognize(folder: SourceFolder) -> int:
    if next(find_indexes(folder, "shards"), None) is None:
        return 0
    return sum(".mds" in name.rpartition("/")[2] for name in folder.names)


def _open(folder: SourceFolder) -> Source:
    columns: dict[str, str] = {}
    listed: set[str] = set()

    @lru_cache(_MAX_EXPANDED)
    def expand(file: str, codec: str) -> bytes:
        decompress = import_library("streaming.base.compression", _PACKAGE).decompress
        try:
            return decompress(codec, folder.read(file))  # type: ignore[no-any-return]
        except MemoryError as exc:
            problem = "cannot be expanded: it declares more bytes than there is memory"
            raise FormatError(f"shard {file!r:.200} {problem}") from exc

    def open_index(index: str, start: str) -> Iterator[Row]:
        shards = [(shard, _check(folder, start, shard)) for shard in folder.read_json(index)["shards"]]
        # the index of an outer folder may list shards of inner folders
        shards = [(shard, file) for shard, file in shards if file not in listed]
        if not shards:
            return
        listed.update(file for _, file in shards)
        streaming = import_library("streaming.base.format.mds", _PACKAGE)
        for shard, file in shards:
            columns.update(zip(shard["column_names"], shard["column_encodings"], strict=True))
            encodings = ["bytes" if name in _MEDIA or name in _LISTS else name for name in shard["column_encodings"]]
            reader = streaming.MDSReader.from_json(folder.path, None, {**shard, "column_encodings": encodings})
            if file == start + shard["raw_data"]["basename"]:
                read = partial(folder.read_range, file)
            else:
                read = partial(_slice, partial(expand, file, shard["compression"]))
            for row in range(reader.samples):
                yield file, partial(_read, read, reader, row, shard["column_encodings"])

    samples, bad = open_indexes(find_indexes(folder, "shards"), open_index)
    return Source(samples, {"columns": columns}, bad)


def _check(folder: SourceFolder, start: str, shard: Any) -> str:
    """Check a shard's entry in an index, and return the shard's file."""
    if shard["format"] != "mds" or shard["version"] != 2:
        raise FormatError(f"a shard has the format {shard['format']!r:.40}, expected mds, version 2")
    for name, encoding in zip(shard["column_names"], shard["column_encodings"], strict=True):
        if encoding.partition(":")[0] not in _PLAIN | _MEDIA.keys() | _LISTS.keys() and not folder.trust:
            raise FormatError(f"column {name!r:.100} has the encoding {encoding!r:.40}, which may run code{REMEDY}")
    if type(shard["samples"]) is not int or any(type(size) not in (int, type(None)) for size in shard["column_sizes"]):
        raise TypeError("its numbers are no integers")
    files: list[str] = [start + shard[kind]["basename"] for kind in ("raw_data", "zip_data") if shard[kind]]
    for file in files:
        if file in folder:
            return file
    raise FormatError(f"shard {files[-1]!r:.200} is missing")


def _slice(expand: Callable[[], bytes], begin: int, end: int) -> bytes:
    return expand()[begin:end]


def _read(read: Callable[[int, int], bytes], reader: Any, row: int, encodings: list[str]) -> dict[str, Any]:
    count = int.from_bytes(read(0, 4), "little")
    begin, end = np.frombuffer(read(4 + 4 * row, 12 + 4 * row), "<u4").tolist()
    if count != reader.samples:
        raise FormatError(f"has {count:,} samples, but the index lists {reader.samples:,}")
    raw = read(begin, end)
    sizes = [size for size in reader.column_sizes if size]
    head = 4 * (len(encodings) - len(sizes))
    if not len(raw) == end - begin == head + sum(sizes) + int(np.frombuffer(raw[:head], "<u4").sum()):
        raise FormatError("the columns do not end with the sample")
    value: dict[str, Any] = reader.decode_sample(raw)
    for (name, content), encoding in zip(value.items(), encodings, strict=True):
        if encoding in _MEDIA:
            value[name] = Media(_MEDIA[encoding], content)
        elif encoding in _LISTS:
            value[name] = split_list(content, *_LISTS[encoding])
    return value


FORMAT = Format(
    "mds",
    "MosaicML streaming: .mds shards listed by index.json",
    _recognize,
    _open,
)
