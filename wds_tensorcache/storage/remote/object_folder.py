"""A folder at a url: its objects are read as those of any server, and changed by conditional requests of an object store."""

from __future__ import annotations

import io
import mmap
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cached_property

from wds_tensorcache.errors import RemoteError
from wds_tensorcache.storage.output import Output
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.fetch import run
from wds_tensorcache.storage.remote.object_writer import ObjectWriter
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.remote.retry import Target
from wds_tensorcache.storage.urls import conceal, join_url, name_of, shown

_MAX_NBYTES = 1 << 28
_LONGEST_S = 600.0  # a thousand writers that finish at once have changed the manifest by then
# Google refuses more than about one change of an object each second with status 429
_BUSY = frozenset({409, 429})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


class ObjectFolder:
    """A folder at a url, with the methods of `LocalFolder`. Objects of web servers and hubs can be read, but not changed.

    A store has no locks. A new file is one request that succeeds only if no object has its name; a change replaces exactly the
    version of the object to which it was made. Before the first of these requests, the store is asked whether it obeys such
    conditions.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self.path = conceal(url)
        self._is_checked = False  # whether the store is known to obey conditions

    @cached_property
    def _objects(self) -> ObjectWriter:
        return ObjectWriter(self.path)

    def _checked(self) -> ObjectWriter:
        if not self._is_checked:
            self._objects.check_conditions(self.path)
            self._is_checked = True
        return self._objects

    def make(self) -> None:
        self._objects  # noqa: B018 its constructor raises

    def locate(self, name: str) -> str:
        return join_url(self.path, name)

    def names(self) -> list[str]:
        return sorted(name_of(url) for url, _ in run(lambda: list(client_for(self.path).list_objects(self.path))))

    def open(self, name: str) -> RemoteFile:
        return RemoteFile(self.locate(name))

    def read(self, name: str, max_nbytes: int = _MAX_NBYTES) -> bytes | None:
        url = self.locate(name)
        try:
            return run(lambda: client_for(url).read_whole(url, max_nbytes))[1]
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self._objects.put(self.locate(name), content)

    def change(self, name: str, apply: Callable[[bytes | None], bytes]) -> None:
        """See `LocalFolder`; raise RemoteError if other writers were faster for ten minutes."""
        url, begun, num_lost = self.locate(name), time.monotonic(), 0
        while True:
            before, version = self._objects.read(url) or (None, None)
            if version is not None:
                self._objects.check_tag(url, version)
            content = apply(before)
            if version is not None and content == before:  # also after a change whose response was lost
                return
            try:
                if self._checked().swap(url, content, version) is not None:
                    return
            except RemoteError as exc:
                if exc.status not in _BUSY:
                    raise
            if time.monotonic() - begun > _LONGEST_S:
                problem = (
                    f"other writers have changed the object {num_lost:,} times in {_LONGEST_S:.0f} s; resume later"
                )
                raise Target(url).error(problem)
            self._objects.pause(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(num_lost, 10))))
            num_lost += 1

    def delete(self, names: Iterable[str]) -> None:
        if urls := [self.locate(name) for name in names]:
            self._checked().delete(urls)

    def new_file(self, name: str) -> Output:
        return _Upload(self.locate(name), self._checked)

    def cancel(self) -> None:
        self._objects.cancel()


class _Upload(Output):
    """Bytes that are collected on local disk, and uploaded by `finish`. `TMPDIR` sets the folder of temporary files.

    The file has no name, and the system frees its space however this process ends.

    Threads/fork: as for `Output`.
    """

    def __init__(self, url: str, objects: Callable[[], ObjectWriter]) -> None:
        self._url, self._objects, self._folder = url, objects, tempfile.gettempdir()
        super().__init__(f"{shown(url)}, in the temporary folder {self._folder} (TMPDIR sets another one)", fsync=False)

    def _create(self) -> io.RawIOBase:
        return tempfile.TemporaryFile(buffering=0, dir=self._folder)

    def finish(self) -> None:
        """Create the object by one request; raise FileExistsError if another writer has created an object of this name."""
        self.flush()
        # not closed here: a request that was cancelled may still refer to the map
        nbytes = self._position
        content = mmap.mmap(self._file.fileno(), nbytes, access=mmap.ACCESS_READ) if nbytes else b""
        self._close()
        self._objects().create(self._url, content)
