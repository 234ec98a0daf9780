"""litdata: folders with `index.json` and `chunk-0-0.bin`, …, as `litdata.optimize` writes them.

Each sample has the structure that the optimized function returned. Its leaves become:

- `tensor`, `no_header_tensor`, `numpy`, `no_header_numpy`: tensors;
- `int`, `float`, `bool`, `str`, `text`: the values themselves; `bytes`: a uint8 tensor [n];
- `pil`: the pixels, uint8 [height, width, channels];
- `jpeg`, `image`, `video`, `audio`, `tifffile`, `pdf`, `file` and similar media: members, named by their path: `image.jpg`;
- `pickle`: plain values (None, for example), tensors and arrays. Anything else is refused unless the files are trusted;
- `json`: the value, if it is stored as JSON text. litdata's compact form is refused, and so are graphs.

In datasets for its `TokensLoader`, each sample is one array, and not a block of a fixed length.

Samples are named by their position, after the path of their folder. The files are read without litdata. Compressed chunks
(`zstd` in all three levels) need pyarrow. Encrypted chunks and Parquet are refused.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.chunk_files import ChunkReader, find_indexes, read_json
from wds_tensorcache.importers.generic.litdata_leaves import decode_leaf
from wds_tensorcache.importers.generic.media import separate_media
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_CHUNK = re.compile(r"chunk-[^/]*\.bin", re.ASCII)
_FRAMED = struct.Struct("<8sHHIII")  # magic, version, flags, samples, samples of a frame, frames
_FRAME = struct.Struct("<IIQII")  # first sample, samples, offset, compressed length, expanded length
_MAGIC = b"LDFZ01\0\0"

_Read = Callable[[], bytes]  # reads one sample


def _recognize(folder: SourceFolder) -> int:
    if next(find_indexes(folder, "chunks"), None) is None:
        return 0
    return sum(_CHUNK.fullmatch(name.rpartition("/")[2]) is not None for name in folder.by_suffix.get(".bin", ()))


def _open(folder: SourceFolder) -> Source:
    """Find the samples of all indexes."""
    reader = ChunkReader(folder)
    samples: list[SourceSample] = []
    bad: dict[str, str] = {}
    formats: dict[str, Any] = {}
    for index in find_indexes(folder, "chunks"):
        root = index.rpartition("/")[0]
        start = f"{root}/" if root else ""
        try:
            content = read_json(folder, index)
            decode = _parse_config(content["config"], folder.trust)
            codec, level = content["config"].get("compression"), content["config"].get("compression_level")
            names = [start + chunk["filename"] for chunk in content["chunks"]]
        except (FormatError, OSError) as exc:
            bad[index] = str(exc)
            continue
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            bad[index] = f"is not an index of litdata: {exc!r:.200}"
            continue
        formats[root] = content["config"]["data_format"]
        at = 0
        for name, count in Counter(names).items():
            try:
                if name not in folder:
                    raise FormatError("is missing, but the index lists it")
                if count > 1:
                    raise FormatError(f"the index lists it {count:,} times")
                for read in _find_samples(reader, name, codec and str(codec), level):
                    samples.append(SourceSample(f"{start}{at:08d}", (name, index), partial(_load, name, read, decode)))
                    at += 1
            except (FormatError, OSError) as exc:
                bad[name] = str(exc)
    return Source(samples, {"data_format": next(iter(formats.values())) if len(formats) == 1 else formats}, bad)


def _find_samples(reader: ChunkReader, name: str, codec: str | None, level: str | None) -> Iterator[_Read]:
    """Yield a function that reads each sample of a chunk."""
    if codec and level == "batch":
        yield from _find_framed(reader, name, codec)
        return
    whole = codec if level in (None, "chunk") else None
    offsets = reader.read_offsets(name, whole)
    for begin, end in pairwise(offsets):
        if codec and not whole:
            yield partial(reader.read_frame, name, begin, end, codec)
        else:
            yield partial(reader.read, name, begin, end, whole)


def _find_framed(reader: ChunkReader, name: str, codec: str) -> Iterator[_Read]:
    """Yield the same for a chunk of compressed frames with many samples each."""
    magic, version, _, count, _, num_frames = _FRAMED.unpack(reader.read(name, 0, _FRAMED.size))
    if magic != _MAGIC or version != 1:
        raise FormatError("is not a chunk of compressed frames, version 1").at(name)
    at = _FRAMED.size + 4 * (count + 1)
    offsets = np.frombuffer(reader.read(name, _FRAMED.size, at), "<u4").astype(np.int64).tolist()
    if any(begin > end for begin, end in pairwise(offsets)):
        raise FormatError("the offsets of its samples do not ascend").at(name)
    table = reader.read(name, at, at + _FRAME.size * num_frames)
    number = 0
    for first, size, begin, nbytes, _ in _FRAME.iter_unpack(table):
        if first != number or first + size > count:
            raise FormatError("its frames do not follow each other").at(name)
        frame = partial(reader.read_frame, name, begin, begin + nbytes, codec)
        for number in range(first, first + size):
            yield partial(_slice, frame, offsets[number] - offsets[first], offsets[number + 1] - offsets[first])
        number = first + size
    if number != count:
        raise FormatError(f"its frames have {number:,} samples, expected {count:,}").at(name)


def _slice(frame: _Read, begin: int, end: int) -> bytes:
    content = frame()
    if end > len(content):
        raise FormatError(f"a frame has {len(content):,} bytes, expected at least {end:,}")
    return content[begin:end]


def _load(name: str, read: _Read, decode: Callable[[bytes], Any]) -> Loaded:
    try:
        return separate_media(decode(read()))
    except FormatError as exc:
        raise exc.at(name) from exc


def _parse_config(config: dict[str, Any], trust: bool) -> Callable[[bytes], Any]:
    """Return the function that decodes a sample."""
    loader = config.get("item_loader", "PyTreeLoader")
    formats = config["data_format"]
    if config.get("encryption"):
        raise FormatError("the chunks are encrypted, which is not supported")
    if loader == "TokensLoader":
        return partial(decode_leaf, formats[0], trust)
    if loader != "PyTreeLoader":
        raise FormatError(f"chunks for {loader!r:.80} are not read, only for PyTreeLoader and TokensLoader")
    version, spec = json.loads(config["data_spec"])
    if version != 1:
        raise FormatError(f"the structure has version {version!r:.20}, expected 1")
    return partial(_decode_sample, spec, [str(each) for each in formats], trust)


def _decode_sample(spec: dict[str, Any], formats: list[str], trust: bool, raw: bytes) -> Any:
    begin = 4 * len(formats)
    if len(raw) < begin:
        raise FormatError("a sample is cut short")
    sizes = np.frombuffer(raw, "<u4", len(formats)).tolist()
    if begin + sum(sizes) != len(raw):
        raise FormatError(f"the leaves of a sample end at byte {begin + sum(sizes):,} of {len(raw):,}")
    leaves = []
    for kind, size in zip(formats, sizes, strict=True):
        leaves.append(decode_leaf(kind, trust, raw[begin : begin + size]))
        begin += size
    remaining = iter(leaves)
    try:
        value = _build(spec, remaining)
    except (StopIteration, LookupError, TypeError, ValueError) as exc:
        raise FormatError(f"the structure in the index does not match the samples: {exc!r:.200}") from exc
    if next(remaining, None) is not None:
        raise FormatError("the structure in the index has too few leaves")
    return value


def _build(spec: dict[str, Any], leaves: Iterator[Any]) -> Any:
    """Return the structure that a specification of torch's pytree describes."""
    kind = spec["type"]
    if kind is None:
        return next(leaves)
    children = [_build(child, leaves) for child in spec["children_spec"]]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return dict(zip(json.loads(spec["context"]), children, strict=True))
    if kind in ("builtins.list", "builtins.tuple"):
        return children if kind == "builtins.list" else tuple(children)
    raise FormatError(f"samples contain a {kind!r:.100}, expected dicts, lists and tuples")


FORMAT = Format(
    "litdata",
    "litdata: chunk-*.bin files listed by index.json",
    _recognize,
    _open,
)
