"""Files with many samples and a table of their offsets, as MosaicML streaming and litdata write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source_folder import SourceFolder

_Item = TypeVar("_Item")
_INDEX = "index.json"
_MAX_INDEX_NBYTES = 1 << 28
_NUM_PROBED = 4096  # bytes of an index in which to look for the list of chunks
_MAX_KEPT = 4  # expanded chunks
_MAX_RATIO, _MIN_LIMIT = 64, 1 << 28  # a chunk may expand to 64 times its length, or to 256 MiB
_PIECE_NBYTES = 1 << 20
_CODECS = {"gz": "gzip", "bz2": "bz2", "zstd": "zstd", "br": "brotli", "snappy": "snappy"}


def find_indexes(folder: SourceFolder, entry: str) -> Iterator[str]:
    """Yield the paths of the `index.json` files that begin with a list named `entry`, those of outer folders first."""
    pattern = re.compile(rb'[{,]\s*"' + entry.encode() + rb'"\s*:\s*\[')
    for name in sorted(folder.by_suffix.get(".json", ()), key=lambda name: name.count("/")):
        if name.rpartition("/")[2] == _INDEX:
            try:
                with folder.open(name) as file:
                    begin = file.read(_NUM_PROBED)
            except FormatError:
                continue
            if pattern.search(begin):
                yield name


def read_json(folder: SourceFolder, name: str) -> dict[str, Any]:
    """Return the dict in a JSON file.

    Raises:
        FormatError: The file is damaged, is nested too deeply, or contains something else.
    """
    try:
        content = json.loads(folder.read_text(name, _MAX_INDEX_NBYTES))
    except (json.JSONDecodeError, RecursionError) as exc:
        raise FormatError(f"is not JSON: {exc!r:.200}").at(name) from exc
    if not isinstance(content, dict):
        raise FormatError(f"contains {type(content).__name__}, expected a dict").at(name)
    return content


class _Slot(Generic[_Item]):
    """One result, once it is loaded."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.found: list[_Item] = []


class Recent(Generic[_Item]):
    """The results of the last calls, by key.

    Threads/fork/pickle: safe to use in several threads. A thread waits while another one loads the same result.
    """

    def __init__(self, max_kept: int) -> None:
        self._lock = Lock()
        self._kept: dict[Hashable, _Slot[_Item]] = {}
        self._max_kept = max_kept

    def get(self, key: Hashable, load: Callable[[], _Item]) -> _Item:
        """Return the result for `key`; call `load` if it is not kept."""
        with self._lock:
            slot = self._kept.pop(key) if key in self._kept else _Slot[_Item]()
            self._kept[key] = slot
            if len(self._kept) > self._max_kept:
                del self._kept[next(iter(self._kept))]
        with slot.lock:
            if not slot.found:
                slot.found.append(load())
            return slot.found[0]


class ChunkReader:
    """Reader of chunks. A chunk has the number of samples N, N + 1 offsets, and the samples; it may be compressed as a whole.

    Threads/fork/pickle: safe to use in several threads.
    """

    def __init__(self, folder: SourceFolder) -> None:
        self._folder = folder
        self._recent: Recent[bytes] = Recent(_MAX_KEPT)

    def read(self, name: str, begin: int, end: int, codec: str | None = None) -> bytes:
        """Return the bytes `[begin, end)` of a chunk, which `codec` compresses as a whole.

        Raises:
            FormatError: The chunk is damaged, or has fewer bytes.
            ImportError: Its compression needs pyarrow, which is not installed.
        """
        if codec is None:
            return self._folder.read_range(name, begin, end)
        content = self._recent.get((name, -1), lambda: expand(self._folder.read(name), codec))
        if end > len(content):
            raise FormatError(f"the chunk has {len(content):,} bytes, expected at least {end:,}").at(name)
        return content[begin:end]

    def read_frame(self, name: str, begin: int, end: int, codec: str) -> bytes:
        """Return the expanded content of the bytes `[begin, end)` of a chunk. It raises the same errors as `expand`."""
        return self._recent.get((name, begin), lambda: expand(self._folder.read_range(name, begin, end), codec))

    def read_offsets(self, name: str, codec: str | None = None) -> list[int]:
        """Return the offset of each sample, and the end of the last, from the table at the beginning of the chunk.

        Raises:
            FormatError: The chunk is damaged, or its offsets do not ascend.
        """
        count = int.from_bytes(self.read(name, 0, 4, codec), "little")
        table = np.frombuffer(self.read(name, 4, 8 + 4 * count, codec), "<u4").astype(np.int64)
        if (np.diff(table) < 0).any():
            raise FormatError("the offsets of its samples do not ascend").at(name)
        offsets: list[int] = table.tolist()
        return offsets


def expand(raw: bytes, codec: str) -> bytes:
    """Return expanded bytes.

    Args:
        raw: Compressed bytes.
        codec: Name of the compression, with or without a level: `zstd:3`.

    Raises:
        FormatError: The bytes are damaged, expand too much, or their compression is unknown.
        ImportError: pyarrow is not installed.
    """
    kind = _CODECS.get(codec.partition(":")[0])
    if kind is None:
        raise FormatError(f"unknown compression {codec!r:.80}; there are {', '.join(_CODECS)}")
    try:
        import pyarrow
    except ImportError as exc:
        raise ImportError("reading compressed chunks needs pyarrow: pip install pyarrow") from exc
    limit = max(_MAX_RATIO * len(raw), _MIN_LIMIT)
    try:
        if kind == "snappy":
            content = bytes(pyarrow.Codec(kind).decompress(raw, _snappy_nbytes(raw, limit)))
        else:
            content = _read_all(pyarrow.input_stream(pyarrow.py_buffer(raw), compression=kind), limit)
    except (OSError, pyarrow.ArrowException) as exc:
        raise FormatError(f"cannot be expanded by {kind}: {exc!r:.200}") from exc
    if len(content) > limit:
        raise FormatError(f"{len(raw):,} bytes expand to more than {limit:,} bytes; store the chunk uncompressed")
    return content


def _read_all(stream: Any, limit: int) -> bytes:
    """Return the bytes of a stream of pyarrow, or more than `limit` of them; close it."""
    # If the bytes are damaged, `stream.read` leaks the memory that it has allocated for its result.
    content, piece = bytearray(), bytearray(_PIECE_NBYTES)
    with stream:
        while len(content) <= limit and (count := stream.readinto(piece)):
            content += memoryview(piece)[:count]
    return bytes(content)


def _snappy_nbytes(raw: bytes, limit: int) -> int:
    """Return the expanded length, which is stored in the first bytes, seven bits in each."""
    nbytes = 0
    for number, byte in enumerate(raw[:5]):
        nbytes |= (byte & 127) << 7 * number
        if byte < 128:
            break
    return min(nbytes, limit + 1)
