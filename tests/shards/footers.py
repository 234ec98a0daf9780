"""Indexes taken apart and put together again by stock tools, with a right digest (FORMAT.md 4)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

Arrays = dict[str, Any]
Change = Callable[[Arrays], object]
U8, U64 = np.uint8, np.uint64
TRAILER_NBYTES = 40


def body_of(path: Path) -> bytes:
    """Return the index at the end of a shard or sidecar, a safetensors file."""
    content = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", content[-TRAILER_NBYTES:][:8])
    return content[-TRAILER_NBYTES - nbytes : -TRAILER_NBYTES]


def end_of(path: Path) -> int:
    """Return the offset of the end of the archive that the index of a shard declares."""
    return int.from_bytes(path.read_bytes()[-32:-24], "little")


def put_footer(path: Path, body: bytes, end: int | None = None) -> None:
    """Replace the index of a shard, or add one, with a right trailer."""
    end = end_of(path) if end is None else end
    shard = path.read_bytes()[: end + 1024]
    numbers = struct.pack("<QQQ", len(body), end, len(shard) + len(body) + TRAILER_NBYTES)
    digest = xxhash.xxh3_64_intdigest(numbers, seed=xxhash.xxh3_64_intdigest(body))
    path.write_bytes(shard + body + numbers + struct.pack("<Q8s", digest, b"tcindex1"))


def forge(path: Path, change: Change) -> None:
    """Change the arrays in the footer of a shard."""
    arrays = safetensors.numpy.load(body_of(path))
    change(arrays)
    put_footer(path, safetensors.numpy.save(arrays))


def forge_names(path: Path, **changes: Any) -> None:
    """Change entries of the JSON in the footer of a shard; None deletes one."""
    forge(path, rename(**changes))


def put(name: str, at: int, value: int) -> Change:
    """Return a change of one number."""

    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].astype(U64)
        arrays[name][at] = value

    return change


def replace(**changes: Any) -> Change:
    """Return a change of arrays by name, in which `__` stands for a dot."""
    return lambda arrays: arrays.update({name.replace("__", "."): np.asarray(array) for name, array in changes.items()})


def rename(**changes: Any) -> Change:
    """Return a change of entries of the JSON in an index; None deletes one."""

    def change(arrays: Arrays) -> None:
        names = json.loads(arrays["names"].tobytes()) | changes
        text = json.dumps({name: value for name, value in names.items() if value is not None})
        arrays["names"] = np.frombuffer(text.encode(), U8)

    return change
