"""A remote shard with the reading methods of a local shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wds_tensorcache.errors import FormatError, MissingShardError, TarFormatError
from wds_tensorcache.storage.readahead import ReadAhead, Readers
from wds_tensorcache.storage.remote.fetch import PART_NBYTES, fetch_many, read_head, read_tail, stat
from wds_tensorcache.storage.remote.retry import MissingBucketError, ObjectInfo, Request
from wds_tensorcache.storage.system import MAX_WHOLE_NBYTES
from wds_tensorcache.storage.threads import Threads, per_process
from wds_tensorcache.storage.urls import conceal, shown

RemoteIdentity = tuple["int | None", "str | None"]  # length in bytes, tag; None until known
_NUM_AHEAD = 4  # requests of `read_through` at a time, of 4 MiB each


_lock = per_process(threading.Lock)  # held for a few attribute accesses, never during a request


class RemoteFile:
    """An object that must not change while it is read. The first response fixes its tag, and later reads require it.

    Args:
        url: Url of the object, concealed or not.
        nbytes: Length of the object, if it is known, for example from a manifest.
        tag: Tag of the object, if it is known.
        manifest: Path or url of the manifest that lists the object, for messages.
        cache: The `NodeCache` through which the object is read; None without a cache.

    Attributes:
        url: The url, concealed.
        path: The url for messages, without secrets.
        digest: Digest of url, length and tag, once the node's cache has used it.
        is_asked: True if a response has reported the object's state. A tag of None then means that the server has no tags.

    Raises (all methods that make requests):
        MissingShardError: The object does not exist.
        FormatError: A response reports another length or tag.
        RemoteError: A request failed.

    Threads/fork/pickle: any thread and any forked process may read. Not pickled.
    """

    is_remote = True

    def __init__(
        self,
        url: str,
        nbytes: int | None = None,
        tag: str | None = None,
        manifest: str | None = None,
        cache: Any = None,
    ) -> None:
        self.url = conceal(url)
        self.path = shown(self.url)
        self.manifest, self.cache = manifest, cache
        self.digest: bytes | None = None
        self.is_asked = False
        self._state = None if nbytes is None else ObjectInfo(nbytes, tag)

    @property
    def state(self) -> ObjectInfo:
        """Length and tag; the tag is None if unknown. Cost: one request if the length is unknown."""
        if self._state is None:
            self.ask()
        assert self._state is not None
        return self._state

    @property
    def nbytes(self) -> int:
        """Length of the object in bytes. Cost: one request if it is unknown."""
        return self.state.nbytes

    @property
    def identity(self) -> RemoteIdentity:
        """Length and tag, each None if unknown, picklable and comparable. Cost: no request."""
        state = self._state
        return (None, None) if state is None else (state.nbytes, state.tag)

    def ask(self) -> None:
        """Request the length and the tag."""
        try:
            reported = stat(self.url)
        except FileNotFoundError as exc:
            raise self.missing_error(exc) from exc
        self.fix(reported)

    def expect(self, nbytes: int) -> None:
        """Record the length if it is unknown. Cost: no request."""
        with _lock():
            self._state = self._state or ObjectInfo(nbytes, None)

    def fix(self, reported: ObjectInfo) -> None:
        """Record a reported state. Raise FormatError if it has changed."""
        with _lock():
            self.is_asked = True
            expected = self._state
            if expected is None or (expected.tag is None and expected.nbytes == reported.nbytes):
                self._state = reported
                return
        if expected.tag is None and self.manifest is not None:
            problem = f"the shard has {reported.nbytes} bytes, but {self.manifest} says {expected.nbytes}"
            raise FormatError(f"{problem}: one of the two is stale; upload both again", kind="index").at(self.path)
        Request(self.url, state=expected).check(reported)

    def missing_error(self, cause: FileNotFoundError) -> MissingShardError:
        """Return the error for a missing object; `cause` is the request's error."""
        if isinstance(cause, MissingBucketError):
            return MissingShardError(str(cause.strerror)).at(self.path)
        problem, remedy = "the shard does not exist", "check the url, or upload it again"
        if self.manifest is not None:
            problem, remedy = f"{problem}, but {self.manifest} lists it", "upload it again"
        return MissingShardError(f"{problem}; {remedy}").at(self.path)

    def check_range(self, begin: int, end: int) -> None:
        """Raise FormatError if the file has no bytes `[begin, end)`."""
        if not 0 <= begin <= end <= self.nbytes:
            problem = f"bytes [{begin}, {end}) are needed, but the object has only {self.nbytes} bytes; copy it again"
            raise TarFormatError(problem, kind="truncated").at(self.path)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `[begin, end)`. Memory: a copy."""
        self.check_range(begin, end)
        content = bytearray(end - begin)
        self.read_into([memoryview(content)], begin)
        return bytes(content)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Read from offset `begin` on into the 1-D byte buffers, in order."""
        self._fetch([(self, begin, buffers)])

    def read_many(self, begins: Iterable[int], ends: Iterable[int]) -> list[bytes]:
        """Return the bytes of many ranges, by one round of requests."""
        extents = list(zip(begins, ends, strict=True))
        contents = [bytearray(end - begin) for begin, end in extents]
        self._fetch([(self, begin, [content]) for (begin, _), content in zip(extents, contents, strict=True)])
        return list(map(bytes, contents))

    def read_tail(self, nbytes: int) -> bytes:
        """Return the last `nbytes` bytes, fewer if the object is shorter. The response also reports the state."""
        try:
            reported, tail = read_tail(self.url, nbytes)
        except FileNotFoundError as exc:
            raise self.missing_error(exc) from exc
        self.fix(reported)
        return tail

    @contextmanager
    def read_through(self) -> Iterator[Callable[[int, int], bytes]]:
        """Yield a function like `read`, for one pass over the object. Several requests run ahead of the caller."""
        with Threads(_NUM_AHEAD, "tensorcache-scan") as pool, ReadAhead(self, Readers(pool, _NUM_AHEAD)) as ahead:
            yield ahead.read

    def view(self, begin: int, end: int) -> None:
        """Return None, because a remote file has no map."""

    def _fetch(self, ranges: Sequence[tuple[RemoteFile, int, Sequence[Any]]]) -> None:
        (fetch_many if self.cache is None else self.cache.read_many)(ranges)

    def check_unchanged(self) -> None:
        """Do nothing: every read compares tag and length."""


def read_whole(url: str) -> bytes:
    """Return the bytes of an object. Raise FileNotFoundError if it is missing, RemoteError if it exceeds 256 MiB."""
    state, content = read_head(url, PART_NBYTES)
    if state.nbytes > MAX_WHOLE_NBYTES:
        raise Request(url).error(f"the object has {state.nbytes} bytes, more than {MAX_WHOLE_NBYTES}")
    if len(content) < state.nbytes:
        file = RemoteFile(url)
        file.fix(state)
        content += file.read(len(content), state.nbytes)
    return content
