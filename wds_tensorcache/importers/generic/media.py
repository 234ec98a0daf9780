"""Conversion of other libraries' samples to tensors, plain values and members."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import as_tensor
from wds_tensorcache.importers.source import Faults, Loaded, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming

Row = tuple[str, Callable[[], Any]]  # the file of a sample, and the function that reads it

_READING = Lock()  # datasets of other libraries may have state, so one thread at a time reads them
_NUM_PROBED = 4096  # bytes of an index in which to look for the list of chunks
_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"WEBP": "webp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}


def import_library(module: str, package: str) -> Any:
    """Import a module of an optional package, or raise ImportError."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ImportError(f"this format is read by another package: pip install {package!r} ({exc})") from exc


def find_indexes(folder: SourceFolder, entry: str) -> Iterator[str]:
    """Yield the `index.json` files that contain the name `entry`, outermost first. Only their first 4,096 bytes are read."""
    for name in sorted(folder.by_suffix.get(".json", ()), key=lambda name: name.count("/")):
        if name.rpartition("/")[2] == "index.json":
            with folder.open(name) as file:
                if f'"{entry}"'.encode() in file.read(_NUM_PROBED):
                    yield name


def open_indexes(
    indexes: Iterable[str], open_index: Callable[[str, str], Iterable[Row]]
) -> tuple[list[SourceSample], dict[str, str]]:
    """Return the samples of all indexes, and the faults by index.

    The name of a sample is the folder of its index, followed by the sample's position in the index. The arguments of
    `open_index` are the path of an index, and the path of the index's folder, which is empty or ends with a slash.
    """
    samples: list[SourceSample] = []
    bad = Faults()
    for index in indexes:
        start = index[: index.rfind("/") + 1]
        with bad.of(index):
            for at, (file, read) in enumerate(list(open_index(index, start))):
                samples.append(SourceSample(f"{start}{at:08d}", (file, index), partial(_load, file, read)))
    return samples, bad


def _load(file: str, read: Callable[[], Any]) -> Loaded:
    with naming(file), _READING:
        return separate_media(read())


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded media in a sample, which become a member."""

    extension: str  # of the member, for example `jpg`
    content: bytes


def separate_media(value: Any) -> Loaded:
    """Return a sample with tensors in place of arrays, pixels and bytes. Media become members, named by their paths.

    In a name, such as `image.jpg` or `frames.0.jpg`, `_` replaces all characters but ASCII letters, digits, `.` and `-`.
    The name has no `.` and no `_` at its start. A dict entry that is media, or a list of media, is left out. In other lists
    and tuples, None replaces media.

    Raises:
        FormatError: Two media have the same name.
    """
    members: dict[str, bytes] = {}
    rest = _separate(value, "", members)
    return Loaded({} if isinstance(rest, Media) else rest, members)


def _separate(value: Any, path: str, members: dict[str, bytes]) -> Any:
    """Return a value without its media, which go into `members`."""
    if isinstance(value, Media):
        # readers of tars need such names, which must not begin with "_"
        name = re.sub(r"[^A-Za-z0-9.-]", "_", f"{path}.{value.extension}").lstrip("._")
        if name in members:
            raise FormatError(f"two media are named {name!r:.100}; rename a column")
        members[name] = value.content
        return value
    start = f"{path}." if path else ""
    if isinstance(value, dict):
        separated = {key: _separate(item, f"{start}{key}", members) for key, item in value.items()}
        return {key: item for key, item in separated.items() if not isinstance(item, Media)}
    if isinstance(value, (list, tuple)):
        items = [_separate(item, f"{start}{number}", members) for number, item in enumerate(value)]
        if items and all(isinstance(item, Media) for item in items):
            return items[0]
        return type(value)(None if isinstance(item, Media) else item for item in items)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return as_tensor(np.frombuffer(value, np.uint8))
    if hasattr(value, "__array_interface__"):  # arrays and numbers of numpy, pictures of Pillow
        return as_tensor(np.asarray(value))
    return value


def extension_of(content: bytes, name: str, default: str) -> str:
    """Return a media file's extension by its name, first bytes, or `default`."""
    suffix = name.rpartition("/")[2].rpartition(".")
    if suffix[1] and suffix[2].isascii() and suffix[2].isalnum() and len(suffix[2]) <= 5:
        return suffix[2].lower()
    return next((extension for start, extension in _SIGNATURES.items() if start in content[:12]), default)


def split_list(raw: bytes, begin: int, extension: str) -> list[Media]:
    """Parse a stored list of media: its length, item lengths, and items.

    The list begins at byte `begin` of `raw`. All items get the same `extension`.

    Raises:
        FormatError: The lengths do not add up to the length of `raw`.
    """
    count = int.from_bytes(raw[begin : begin + 4], "little")
    first = begin + 4 + 4 * count
    lengths = np.frombuffer(raw[begin + 4 : first], "<u4")
    if len(lengths) < count or first + lengths.sum() != len(raw):
        raise FormatError(f"a list of {count:,} items does not end with its {len(raw):,} bytes")
    ends = first + np.cumsum(lengths)
    return [Media(extension, raw[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
