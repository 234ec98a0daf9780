"""Objects on a web server, which keeps a log of the requests of all processes, and their files in a node's cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.node_cache.cache import NodeCache
from wds_tensorcache.storage.remote.fetch import stat
from wds_tensorcache.storage.remote.remote_file import RemoteFile

Added = tuple[str, int, "str | None"]  # url, length and tag of an object


def cached(cache: NodeCache, added: Added) -> RemoteFile:
    """Return a file that is read through a cache."""
    return RemoteFile(*added, cache=cache)


def nbytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files of a folder take."""
    return sum(512 * file.lstat().st_blocks for file in folder.iterdir())


class Objects:
    """Objects of pseudorandom bytes on `server`."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._random = np.random.default_rng(0)
        self._contents: dict[str, bytes] = {}

    def add(self, name: str, nbytes: int) -> Added:
        """Put an object, and return its url, length and tag."""
        content = self._random.bytes(nbytes)
        url = self.server.put(name, content)
        self._contents[url] = content
        tag = stat(url).tag
        self.server.log()
        return url, nbytes, tag

    def content(self, url: str) -> bytes:
        """Return the bytes of an object."""
        return self._contents[url]

    def requests(self) -> list[tuple[str, int, int]]:
        """Return path, first byte and number of bytes of all requests since the last call."""
        ranges = [
            (request.path, *map(int, str(request.range).removeprefix("bytes=").split("-")))
            for request in self.server.log()
        ]
        return [(path, first, last + 1 - first) for path, first, last in ranges]
