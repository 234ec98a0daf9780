"""A remote shard with the surface of an open local file, as far as reads at given offsets need it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from wds_tensorcache.errors import MissingShardError, TarFormatError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.fetch import fetch_many, run
from wds_tensorcache.storage.remote.retry import Target
from wds_tensorcache.storage.threads import per_process
from wds_tensorcache.storage.urls import conceal, shown

__all__ = ["RemoteFile", "RemoteIdentity", "missing_shard"]

RemoteIdentity = tuple[int, "str | None"]  # length in bytes, tag; a tag of None is not known yet


def missing_shard(path: str, manifest: str | None) -> MissingShardError:
    """Return the error for a remote shard that does not exist; `manifest` lists it, or is None."""
    if manifest is None:
        return MissingShardError("the shard does not exist; check the url, or upload it again").at(path)
    return MissingShardError(f"the shard does not exist, but {manifest} lists it; upload it again").at(path)


_lock = per_process(threading.Lock)  # held for a few attribute accesses, never during a request


class RemoteFile:
    """An object that must not change while it is read. The first response fixes its tag, and later reads require it.

    Args:
        url: Url of the object, concealed or not.
        nbytes: Length of the object, if it is known, for example from a manifest. None requests it.
        tag: Tag of the object, if it is known.
        manifest: Path or url of the manifest that lists the object, for messages.

    Attributes:
        url: The url, concealed.
        path: The url for messages, without secrets.
        nbytes: Length of the object.
        is_asked: True if a response has reported the object's state. A tag of None then means that the server has no tags.

    Raises:
        FileNotFoundError: The object does not exist; with `nbytes`, the first read raises MissingShardError.
        FormatError: A read found another length or tag.
        RemoteError: A request failed.

    Threads/fork/pickle: any thread and any forked process may read; a pickle holds url, length and tag.
    """

    def __init__(
        self, url: str, nbytes: int | None = None, tag: str | None = None, manifest: str | None = None
    ) -> None:
        self.url = conceal(url)
        self.path = shown(self.url)
        state = ObjectInfo(nbytes, tag) if nbytes is not None else run(lambda: client_for(self.url).stat(self.url))
        self.nbytes = state.nbytes
        self.manifest = manifest
        self.is_asked = nbytes is None
        self._state = state

    @classmethod
    def of_tail(cls, url: str, nbytes: int) -> tuple[RemoteFile, bytes]:
        """Return a file, and its last `nbytes` bytes or all of them. One request."""
        url = conceal(url)
        state, tail = run(lambda: client_for(url).read_tail(url, nbytes))
        return cls(url, state.nbytes, state.tag), tail

    @property
    def state(self) -> ObjectInfo:
        """Length and tag, as far as they are known."""
        return self._state

    @property
    def identity(self) -> RemoteIdentity:
        """Length and tag. Small, picklable and comparable; the tag is None until the first response."""
        state = self._state
        return state.nbytes, state.tag

    def fix(self, found: ObjectInfo) -> None:
        """Record the state that a response reports; raise FormatError if it is another than before."""
        with _lock():
            self.is_asked = True
            known = self._state
            if known.tag is None and known.nbytes == found.nbytes:
                self._state = found
                return
        Target(self.url).check_same(found, known)

    def missing(self) -> MissingShardError:
        """Return the error for an object that does not exist."""
        return missing_shard(self.path, self.manifest)

    def check_range(self, begin: int, end: int) -> None:
        """Raise FormatError if the file has no bytes `[begin, end)`."""
        if not 0 <= begin <= end <= self.nbytes:
            what = f"bytes [{begin}, {end}) are needed, but the object has only {self.nbytes} bytes; copy it again"
            raise TarFormatError(what, kind="truncated").at(self.path)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`. Memory: a copy."""
        self.check_range(begin, end)
        content = bytearray(end - begin)
        self.read_into([memoryview(content)], begin)
        return bytes(content)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Read from offset `begin` on into the 1-D byte buffers, in order."""
        fetch_many([(self, begin, buffers)])

    def is_resident(self, begin: int) -> bool:
        """Return False: no bytes are in memory."""
        return False

    def will_need(self, begin: int, end: int) -> None:
        """Do nothing: `fetch_many` has its own requests in flight."""

    def check_unchanged(self) -> None:
        """Do nothing: every read carries the tag, and compares tag and length."""

    def __repr__(self) -> str:
        return f"RemoteFile({self.path!r}, nbytes={self.nbytes})"

    def __reduce__(self) -> Any:
        return RemoteFile, (self.url, *self.identity)
