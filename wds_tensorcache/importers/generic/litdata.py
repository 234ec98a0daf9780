"""litdata: folders with `index.json` and `chunk-0-0.bin`, …, as `litdata.optimize` writes them.

Each sample has the structure that the optimized function returned. Its leaves become:

- `tensor`, `no_header_tensor`, `numpy`, `no_header_numpy`: tensors;
- `int`, `float`, `bool`, `str`, `text`, `json`: the values themselves; `bytes`: a uint8 tensor [n];
- `pil`: the pixels, uint8 [height, width, channels];
- `jpeg`, `image`, `video`, `audio`, `tifffile`, `pdf`, `file` and similar media: members, named by their path: `image.jpg`;
- `pickle`, which litdata also uses for None: refused unless the files are trusted.

Samples are named by their position, after the path of their folder. The package `litdata` decodes the samples; it may be unable
to decode chunks of older releases. Chunks that are compressed as wholes are expanded into a temporary folder. Graphs, token
datasets, encrypted chunks and Parquet are refused.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.media import (
    Media,
    Row,
    extension_of,
    find_indexes,
    import_library,
    open_indexes,
    split_list,
)
from wds_tensorcache.importers.safe_files import REMEDY
from wds_tensorcache.importers.source import Format, Source
from wds_tensorcache.importers.source_folder import SourceFolder

_PACKAGE = "litdata>=0.2.76"
_PLAIN = frozenset(
    "tensor no_header_tensor numpy no_header_numpy int float bool str text json bytes pil jpeg_array".split()
)
_MEDIA = {  # kind: extension if neither the format nor the first bytes show it
    "jpeg": "jpg", "image": "jpg", "video": "mp4", "audio": "wav", "tifffile": "tif", "tiff": "tif", "pdf": "pdf",
    "file": "bin", "mesh": "bin", "nifti": "nii",
}  # fmt: skip
_CONTAINERS = (None, "builtins.dict", "collections.OrderedDict", "builtins.list", "builtins.tuple")


def _recognize(folder: SourceFolder) -> int:
    if next(find_indexes(folder, "chunks"), None) is None:
        return 0
    return sum(name.rpartition("/")[2].startswith("chunk-") for name in folder.by_suffix.get(".bin", ()))


def _open(folder: SourceFolder) -> Source:
    formats: dict[str, Any] = {}

    def open_index(index: str, start: str) -> Iterator[Row]:
        content = folder.read_json(index)
        _check_config(content["config"], folder.trust)
        names = [start + chunk["filename"] for chunk in content["chunks"]]
        for name, chunk in zip(names, content["chunks"], strict=True):
            _check_chunk(folder, start, name, chunk["chunk_bytes"], content["config"].get("compression"))
        counts = [operator.index(chunk["chunk_size"]) for chunk in content["chunks"]]
        dataset = _open_dataset(folder, names, content)
        formats[start.rstrip("/")] = content["config"]["data_format"]
        for at, name in enumerate(chain.from_iterable(map(repeat, names, counts))):
            yield name, partial(_read, dataset, at)

    samples, bad = open_indexes(find_indexes(folder, "chunks"), open_index)
    return Source(samples, {"data_format": next(iter(formats.values())) if len(formats) == 1 else formats}, bad)


def _check_config(config: dict[str, Any], trust: bool) -> None:
    """Refuse samples that litdata cannot read, or whose reading may run code."""
    if config.get("item_loader", "PyTreeLoader") != "PyTreeLoader":
        raise FormatError(f"chunks for {config['item_loader']!r:.80} are not read, only for PyTreeLoader")
    if config.get("encryption"):
        raise FormatError("the chunks are encrypted, which is not supported")
    for form in config["data_format"]:
        kind = form.partition(":")[0]
        if kind not in _PLAIN | _MEDIA.keys() and not (trust and kind == "pickle"):
            raise FormatError(f"a leaf has the kind {form!r:.80}, which may run code{REMEDY * (kind == 'pickle')}")
    todo = [json.loads(config["data_spec"])[1]]
    while todo:
        spec = todo.pop()
        if spec["type"] not in _CONTAINERS:  # Hazard: litdata imports the module that a defaultdict names
            raise FormatError(f"samples contain a {spec['type']!r:.100}, expected dicts, lists and tuples")
        todo += spec["children_spec"]


def _check_chunk(folder: SourceFolder, start: str, name: str, nbytes: int, codec: str | None) -> None:
    if name not in folder:
        raise FormatError("is missing, although the index lists it").at(name)
    if "/" in name.removeprefix(start):  # two chunks could have the same place in the temporary folder
        raise FormatError("is in a subfolder, where litdata writes no chunk").at(name)
    # Hazard: litdata waits minutes for a chunk to grow to its length
    size = os.path.getsize(folder.locate(name))
    if not codec and size < nbytes:
        raise FormatError(f"has {size:,} bytes, but the index lists {nbytes:,}").at(name)


class _Member:
    """A serializer for litdata that leaves media encoded."""

    def __init__(self, kind: str) -> None:
        self._default, self._named = _MEDIA[kind], ""

    def setup(self, data_format: str) -> None:
        kind, _, named = data_format.partition(":")
        # litdata names pictures jpg if it does not know their extension
        self._named = named if named.isalnum() and kind != "image" else ""
        self._default = named if named.isalnum() else self._default

    def deserialize(self, raw: Any) -> Media:
        content = bytes(raw)
        return Media(self._named or extension_of(content, "", self._default), content)


class _Members:
    def setup(self, data_format: str) -> None: ...

    def deserialize(self, raw: Any) -> list[Media]:
        return split_list(bytes(raw), 0, "jpg")


def _open_dataset(folder: SourceFolder, names: list[str], content: dict[str, Any]) -> Any:
    """Open checked chunks in a temporary folder of links."""
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # litdata would ask a server
    litdata = import_library("litdata", _PACKAGE)
    path = tempfile.mkdtemp(prefix="tensorcache-")
    config, codec = content["config"], content["config"].get("compression")
    is_whole = codec and config.get("compression_level") in (None, "chunk")
    serializers = {**{kind: _Member(kind) for kind in _MEDIA}, "jpeg_array": _Members()}
    try:
        for name in names:
            target = os.path.join(path, name.rpartition("/")[2])
            # Hazard: litdata expands compressed chunks in place, and deletes the compressed files.
            if is_whole:
                expand = import_library("litdata.streaming.compression", _PACKAGE)._COMPRESSORS[codec].decompress
                Path(target).write_bytes(expand(folder.read(name)))
            else:
                os.symlink(os.path.abspath(folder.locate(name)), target)
        if is_whole:
            config = {**config, "compression": None, "compression_level": None}
        with open(os.path.join(path, "index.json"), "w") as file:
            json.dump({**content, "config": config}, file)
        dataset = litdata.StreamingDataset(path, serializers=serializers, batch_decode=0)
    except BaseException:
        shutil.rmtree(path)
        raise
    weakref.finalize(dataset, shutil.rmtree, path, ignore_errors=True)
    return dataset


def _read(dataset: Any, at: int) -> Any:
    # Hazard: litdata's tensors alias a map of the file, which it closes
    return rebuild(dataset[at], torch.clone, torch.Tensor)


FORMAT = Format(
    "litdata",
    "litdata: chunk-*.bin files listed by index.json",
    _recognize,
    _open,
)
