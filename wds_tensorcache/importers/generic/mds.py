"""MosaicML streaming (MDS): folders with `index.json` and `shard.00000.mds`, …, which may be compressed as wholes.

Each sample has the columns that `MDSWriter(columns=…)` declared:

- `ndarray`, with or without dtype and shape: a tensor;
- `uint8` … `float64`: a tensor of shape [];
- `int`, `str_int`, `str_float`, `str_decimal`, `str`, `json`: the value itself;
- `bytes`: a uint8 tensor [n]. Neither its dtype nor its shape is in the data. MicroDiffusion, for example, stores float16:
  `batch["latents_256"].view(torch.float16).reshape(-1, 4, 32, 32)`;
- `pil`: the pixels, uint8 [height, width, channels];
- `jpeg`, `png`, and lists of these: members, named `COLUMN.jpg` or `COLUMN.0.jpg`;
- `pkl`: plain values, tensors and arrays. Anything else is refused unless the files are trusted.

Samples are named by their position, after the path of their folder. The files are read without the streaming library.
Compressed shards need pyarrow. Hashes in the index are not compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.chunk_files import ChunkReader, find_indexes, read_json
from wds_tensorcache.importers.generic.media import Media, decode_list, decode_pil, separate_media
from wds_tensorcache.importers.safe_files import as_tensor, parse_pickle
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_SHARD = re.compile(r"[^/]*\.mds(?:\.[a-z0-9]+)?", re.ASCII)
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    codec: str | None
    columns: tuple[tuple[str, str, int], ...]  # name, encoding, and length in bytes, 0 if it varies


def _recognize(folder: SourceFolder) -> int:
    if next(find_indexes(folder, "shards"), None) is None:
        return 0
    return sum(_SHARD.fullmatch(name.rpartition("/")[2]) is not None for name in folder.names)


def _open(folder: SourceFolder) -> Source:
    """Find the samples of all indexes; the index of an outer folder may list the shards of inner ones."""
    reader = ChunkReader(folder)
    samples: list[SourceSample] = []
    bad: dict[str, str] = {}
    columns: dict[str, str] = {}
    listed: set[str] = set()
    for index in find_indexes(folder, "shards"):
        root = index.rpartition("/")[0]
        start = f"{root}/" if root else ""
        try:
            shards = [_parse_shard(folder, start, entry) for entry in _entries(folder, index)]
        except (FormatError, OSError) as exc:
            bad[index] = str(exc)
            continue
        counts = Counter(shard.name for shard in shards)
        bad.update((name, f"{index} lists it {count:,} times") for name, count in counts.items() if count > 1)
        shards = [shard for shard in shards if counts[shard.name] == 1]
        if listed.issuperset(shard.name for shard in shards):
            continue
        listed.update(shard.name for shard in shards)
        at = 0
        for shard in shards:
            columns.update((name, encoding) for name, encoding, _ in shard.columns)
            try:
                offsets = reader.read_offsets(shard.name, shard.codec)
            except (FormatError, OSError) as exc:
                bad[shard.name] = str(exc)
                continue
            for begin, end in pairwise(offsets):
                load = partial(_load, folder.trust, reader, shard, begin, end)
                samples.append(SourceSample(f"{start}{at:08d}", (shard.name, index), load))
                at += 1
    return Source(samples, {"columns": columns}, bad)


def _entries(folder: SourceFolder, index: str) -> list[Any]:
    entries = read_json(folder, index).get("shards")
    if not isinstance(entries, list):
        raise FormatError("has no list of shards").at(index)
    return entries


def _parse_shard(folder: SourceFolder, start: str, entry: Any) -> _Shard:
    try:
        if entry["format"] != "mds" or entry["version"] != 2:
            raise FormatError(f"a shard has the format {entry['format']!r:.40}, expected mds, version 2")
        codec = str(entry["compression"])
        raw, compressed = (entry[key] and start + entry[key]["basename"] for key in ("raw_data", "zip_data"))
        sizes = [size or 0 for size in entry["column_sizes"]]
        columns = tuple(zip(entry["column_names"], entry["column_encodings"], sizes, strict=True))
        if any(
            type(name) is not str or type(encoding) is not str or type(size) is not int
            for name, encoding, size in columns
        ):
            raise TypeError("the columns of a shard are not names, encodings and sizes")
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, FormatError):
            raise
        raise FormatError(f"a shard is not described as streaming does: {exc!r:.200}") from exc
    if raw in folder:
        return _Shard(raw, None, columns)
    if compressed is None or compressed not in folder:
        raise FormatError(f"shard {compressed or raw!r:.200} is missing")
    return _Shard(compressed, codec, columns)


def _load(trust: bool, reader: ChunkReader, shard: _Shard, begin: int, end: int) -> Loaded:
    try:
        raw = reader.read(shard.name, begin, end, shard.codec)
        head = 4 * sum(not size for _, _, size in shard.columns)
        varying = iter(np.frombuffer(raw[:head], "<u4").tolist())
        value, at = {}, head
        for name, encoding, size in shard.columns:
            nbytes = size or next(varying)
            if at + nbytes > len(raw):
                raise FormatError(f"column {name!r:.100} ends after its sample")
            value[name] = _decode(encoding, raw[at : at + nbytes], trust, name)
            at += nbytes
        if at != len(raw):
            raise FormatError(f"the columns end at byte {at:,}, the sample at byte {len(raw):,}")
        return separate_media(value)
    except FormatError as exc:
        raise exc.at(shard.name) from exc
    except StopIteration as exc:
        raise FormatError("the sample is cut short").at(shard.name) from exc


def _decode(encoding: str, raw: bytes, trust: bool, column: str) -> Any:
    kind, _, arguments = encoding.partition(":")
    try:
        if kind == "ndarray":
            return as_tensor(_decode_array(raw, *arguments.split(":")))
        if kind == "pkl":
            return parse_pickle(raw, trust)
        if kind in _DTYPES.values():
            return torch.as_tensor(as_tensor(np.frombuffer(raw, kind).reshape(())))
        if kind not in _DECODERS:
            raise FormatError("the encoding is unknown")
        return _DECODERS[kind](raw)
    except FormatError as exc:
        raise exc.at(f"column {column!r:.100} ({encoding:.40})") from exc
    except (ValueError, ArithmeticError, LookupError) as exc:
        what = f"column {column!r:.100} ({encoding:.40}) cannot be decoded: {exc!r:.200}"
        raise FormatError(what) from exc


def _decode_array(raw: bytes, dtype: str = "", shape: str = "") -> np.ndarray[Any, Any]:
    """Decode an array; its dtype and shape are in its first bytes unless the encoding names them."""
    at = 0
    if not dtype:
        dtype, at = _DTYPES[raw[0]], 1
    elif dtype not in _DTYPES.values():
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    if shape:
        dims = [int(size) for size in shape.split(",")]
    else:
        ndim, width = raw[at] >> 2, 1 << (raw[at] & 3)
        dims = np.frombuffer(raw, f"<u{width}", ndim, at + 1).tolist()
        at += 1 + ndim * width
    if min(dims, default=0) < 0:
        raise ValueError(f"the shape {dims} is negative")
    return np.frombuffer(raw[at:], dtype).reshape(dims)


_jpeg, _png = partial(Media, "jpg"), partial(Media, "png")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda raw: as_tensor(np.frombuffer(raw, np.uint8)),
    "str": bytes.decode,
    "int": lambda raw: int(np.frombuffer(raw, "<i8")[0]),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda raw: Decimal(raw.decode()),
    "json": json.loads,
    "pil": decode_pil,
    "jpeg": _jpeg,
    "png": _png,
    **dict.fromkeys(("jpeg_array", "jpegarray"), lambda raw: decode_list(raw, 0, _jpeg)),
    "list[pil]": lambda raw: decode_list(raw, 4, decode_pil),
    "list[jpeg]": lambda raw: decode_list(raw, 4, _jpeg),
    "list[png]": lambda raw: decode_list(raw, 4, _png),
}

FORMAT = Format(
    "mds",
    "MosaicML streaming: .mds shards listed by index.json",
    _recognize,
    _open,
)
