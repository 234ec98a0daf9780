"""A folder at a url. Objects of any server can be read; conditional requests change the objects of an object store."""

from __future__ import annotations

import contextlib
import io
import mmap
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from wds_tensorcache.errors import RemoteError
from wds_tensorcache.storage.output import Output
from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.fetch import list_objects
from wds_tensorcache.storage.remote.remote_file import read_whole
from wds_tensorcache.storage.remote.retry import Request, TransientError
from wds_tensorcache.storage.remote.stores import NO_CONDITIONS, NO_TAGS, StoreClient, Unmet
from wds_tensorcache.storage.threads import computed_once
from wds_tensorcache.storage.urls import bucket_and_key, check_writable, conceal, join_url, name_of, origin_of, shown

# the longest object that one request stores, in bytes: S3 and its copies accept 5 GiB, Azure 5,000 MiB, Google 5 TiB
_MAX_PUT_NBYTES = {"s3": 5 << 30, "az": 5000 << 20, "gs": 5 << 40}
_LONGEST_S = 600.0  # a thousand writers that finish at once have changed the manifest by then
# Google refuses more than about one change of an object each second with status 429
_BUSY = frozenset({409, 429})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_TOKEN = "tensorcache"  # user-defined metadata of an object: identifies the call that created it
# uploads are given up below 512 KiB/s, 8 times the rate of reads: a large upload that stalls would hold up its writer for hours
_UPLOAD_FACTOR = 8
_PROBE = ".tensorcache-conditions"  # one name for all writers: writers that may not delete leave a single object

_Result = TypeVar("_Result")


# of an object, for compare and swap: its `e_tag`, and the store's number of the `version` if it has one
_Version = dict[str, str]


class ObjectFolder:
    """A folder at a url, with the methods of `LocalFolder`. Objects of web servers and hubs can be read, but not changed.

    A store has no locks. A new file is created by one request, which succeeds only if no object has this name. A change
    succeeds only if it replaces the version of the object that was read before. Before the first of these requests to S3, a
    test with a small object checks that the store obeys such conditions.

    Objects are not uploaded in parts: Google has no conditional multipart uploads, obstore makes none, and a killed process
    would leave parts in the bucket.

    Threads/fork/pickle: any thread may call. A forked child cannot change an object store. Cannot be pickled.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self.path = conceal(url)
        self._is_checked = False  # whether the store is known to obey conditions
        self._cancel = retry.Cancel()

    @computed_once
    def _client(self) -> StoreClient:
        """A client of this folder alone."""
        check_writable(self.path)
        # not `client_for`: the environment may have been corrected since an earlier writer failed
        return StoreClient(origin_of(self.path))

    def make(self) -> None:
        self._client  # noqa: B018, raises

    def locate(self, name: str) -> str:
        return join_url(self.path, name)

    def names(self) -> list[str]:
        return sorted(map(name_of, list_objects(self.path)))

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return read_whole(self.locate(name))
        return None

    def write(self, name: str, content: bytes) -> None:
        url = self.locate(name)
        request = Request(url)
        while True:
            with contextlib.suppress(Unmet):
                self._put(url, content, mode="overwrite")
                return
            self._wait_for_other(request)

    def change(self, name: str, apply: Callable[[bytes | None], bytes]) -> None:
        """Change a file as `LocalFolder` does. Raise RemoteError if other writers keep changing it for ten minutes."""
        url, begun, num_lost = self.locate(name), time.monotonic(), 0
        while True:
            before, version = self._read(url) or (None, None)
            if version is not None:
                _check_tag(url, version)
            content = apply(before)
            if version is not None and content == before:  # also after a change whose response was lost
                return
            self._check_conditions()
            try:
                if self._swap(url, content, version) is not None:
                    return
            except RemoteError as exc:
                if exc.status not in _BUSY:
                    raise
            if time.monotonic() - begun > _LONGEST_S:
                problem = (
                    f"other writers have changed the object {num_lost:,} times in {_LONGEST_S:.0f} s; resume later"
                )
                raise Request(url).error(problem)
            with retry.bind_cancel(self._cancel):
                retry.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(num_lost, 10))))
            num_lost += 1

    def delete(self, names: Iterable[str]) -> None:
        if urls := [self.locate(name) for name in names]:
            self._check_conditions()
            self._delete(urls)

    def new_file(self, name: str) -> Output:
        return _Upload(self.locate(name), self)

    def cancel(self) -> None:
        self._cancel.set()

    def create(self, url: str, content: Any) -> None:
        """Store a new object. Raise FileExistsError if another call has stored it.

        Args:
            content: Bytes, a memory map or another flat buffer; it must not change during the call.
        """
        self._check_conditions()
        token, request = secrets.token_hex(16), Request(url)
        while True:
            with contextlib.suppress(Unmet):
                self._put(url, content, mode="create", attributes={_TOKEN: token})
                return
            # The response to the attempt that stored the object may have been lost.
            metadata = self._get(url, lambda response: dict(response.attributes), head=True)
            if metadata is not None and metadata.get(_TOKEN) == token:
                return
            if metadata is not None:
                problem = "exists already, and another writer has created it"
                raise FileExistsError(f"{shown(url)} {problem}; write to another folder, or resume after that writer")
            self._wait_for_other(request)

    def _wait_for_other(self, request: Request) -> None:
        # S3 refuses a request with status 409 while another request for the same key runs
        with retry.bind_cancel(self._cancel):
            request.pause(TransientError("another request for this object is running", 409))

    def _check_conditions(self) -> None:
        """Check that the store obeys the conditions of `create` and `change`."""
        # Lost update: otherwise, writers would silently overwrite each other's shards and entries.
        # Google and Azure obey; Google refuses a second change of an object within a second
        if self._is_checked or self._client.scheme != "s3":
            return
        url, is_ours = join_url(self.path, _PROBE), True
        try:
            first = self._swap(url, b"1", None)
            is_ours = first is not None
            if first is not None:  # otherwise another writer is checking the same
                # A proxy may weaken the tags of answers to reads alone.
                if (current := self._read(url)) is not None:
                    _check_tag(url, current[1])
                is_created_twice = self._swap(url, b"2", None) is not None
                self._swap(url, b"3", first)
                if is_created_twice or self._swap(url, b"4", first) is not None:
                    raise Request(self.path).error(NO_CONDITIONS)
        finally:
            if is_ours:
                with contextlib.suppress(RemoteError):  # these credentials may not delete
                    self._delete([url])
        self._is_checked = True

    def _swap(self, url: str, content: bytes, version: _Version | None) -> _Version | None:
        """Replace a version of an object; return the new version or None."""
        if version is not None:
            _check_tag(url, version)
        try:
            result = self._put(url, content, mode="create" if version is None else version)
        except Unmet:
            # The object has another version. An earlier attempt of this call, whose response was lost, may have made it. So the
            # caller must read the object again, and check whether it contains the change.
            return None
        return _version(result)

    def _put(self, url: str, content: Any, **options: Any) -> Any:
        nbytes, most = len(content), _MAX_PUT_NBYTES[self._client.scheme]
        if nbytes > most:
            problem = f"{nbytes:,} bytes, but one request stores at most {most:,}"
            raise Request(url).error(f"{problem}; pass a smaller max_nbytes=")
        request = Request(url, nbytes=nbytes // _UPLOAD_FACTOR)
        return self._call(request, lambda store, key: store.put(key, content, use_multipart=False, **options))

    def _read(self, url: str) -> tuple[bytes, _Version] | None:
        """Return an object's content and version; None if it does not exist."""
        return self._get(url, lambda response: (bytes(response.bytes()), _version(response.meta)))

    def _get(self, url: str, parse: Callable[[Any], _Result], **options: Any) -> _Result | None:
        with contextlib.suppress(FileNotFoundError):
            return self._call(Request(url), lambda store, key: parse(store.get(key, options=options)))
        return None

    def _delete(self, urls: list[str]) -> None:
        keys = [bucket_and_key(url)[1] for url in urls]
        with contextlib.suppress(FileNotFoundError):
            self._call(Request(urls[0]), lambda store, _: store.delete(keys))

    def _call(self, request: Request, send: Callable[[Any, str], _Result]) -> _Result:
        """Send a request to the store; repeat it after transient faults."""
        with retry.bind_cancel(self._cancel):
            return request.repeat(lambda: self._client.call(request, send, is_upload=True))


def _version(meta: Any) -> _Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _check_tag(url: str, version: _Version) -> None:
    """Raise RemoteError if a version has no strong ETag, which conditions need."""
    if version.get("e_tag", "W/").startswith("W/"):
        raise Request(url).error(NO_TAGS)


class _Upload(Output):
    """A new object, collected in a temporary file and uploaded by `finish`."""

    def __init__(self, url: str, folder: ObjectFolder) -> None:
        self._url, self._object_folder, self._spool_folder = url, folder, tempfile.gettempdir()
        where = f"in the temporary folder {self._spool_folder} (TMPDIR sets another one)"
        super().__init__(f"{shown(url)}, {where}", fsync=False)

    def _create(self) -> io.RawIOBase:
        # without a name, so that the system frees its space even if this process is killed
        return tempfile.TemporaryFile(buffering=0, dir=self._spool_folder)

    def finish(self) -> None:
        """Create the object by one request. Raise errors as `ObjectFolder.create` does."""
        self.flush()
        nbytes = self._position
        content = mmap.mmap(self._file.fileno(), nbytes, access=mmap.ACCESS_READ) if nbytes else b""
        self._close()
        self._object_folder.create(self._url, content)
