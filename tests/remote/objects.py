"""Objects in a local folder, read as a store would send them: with a latency, and a log of all requests of all processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wds_tensorcache.storage.node_cache.cache import CachedFile, NodeCache
from wds_tensorcache.storage.node_cache.fill import Range

Added = tuple[str, int, str]  # url, length and tag of an object


def cached(cache: NodeCache, added: Added) -> CachedFile:
    """Return a file that is read through a cache."""
    return CachedFile(cache, *added)


def nbytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files of a folder take."""
    return sum(512 * file.lstat().st_blocks for file in folder.iterdir())


class Objects:
    """Objects of pseudorandom bytes.

    Args:
        folder: Folder for the objects and the log.
        seed: Seed of the bytes.
        latency_s: Time that each call takes.
    """

    def __init__(self, folder: Path, seed: int = 0, latency_s: float = 0.0) -> None:
        self.folder, self.latency_s = folder, latency_s
        self._random = np.random.default_rng(seed)
        folder.mkdir(exist_ok=True)

    def add(self, name: str, nbytes: int, tag: str = "1") -> Added:
        """Write an object, and return its url, length and tag."""
        (self.folder / name).write_bytes(self._random.bytes(nbytes))
        return f"https://host.test/{name}", nbytes, tag

    def content(self, url: str) -> bytes:
        """Return the bytes of an object."""
        return (self.folder / url.rpartition("/")[2]).read_bytes()

    def fetch(self, ranges: Sequence[Range], *, merges: bool = True) -> None:
        """Read ranges, and log them."""
        lines = "".join(json.dumps([file.url, begin, sum(map(len, buffers))]) + "\n" for file, begin, buffers in ranges)
        # one call appends all lines, so that those of several processes do not mix
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(log, lines.encode())
        os.close(log)
        time.sleep(self.latency_s)
        for file, begin, buffers in ranges:
            content = self.content(file.url)
            for buffer in buffers:
                memoryview(buffer)[:] = content[begin : begin + len(buffer)]
                begin += len(buffer)

    def requests(self) -> list[tuple[str, int, int]]:
        """Return url, first byte and number of bytes of all requests since the last call."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [tuple(json.loads(line)) for line in lines]
