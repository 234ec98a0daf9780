"""Write whole objects into object stores through obstore: create, compare and swap, delete, list."""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from wds_tensorcache.errors import RemoteError
from wds_tensorcache.storage.remote.event_loop import check_not_forked, run_async
from wds_tensorcache.storage.remote.retry import Attempts, Cancel, Target, TransientError, cancellable, check_cancelled
from wds_tensorcache.storage.remote.stores import SETTINGS, check_endpoint
from wds_tensorcache.storage.urls import bucket_and_key, join_url, shown

_Result = TypeVar("_Result")

WRITABLE = frozenset({"s3", "gs", "az"})
# the longest object that one request stores, in bytes: S3 and its copies accept 5 GiB, Azure 5,000 MiB, Google 5 TiB
_MAX_PUT_NBYTES = {"s3": 5 << 30, "az": 5000 << 20, "gs": 5 << 40}
_TICK_S = 0.1
_WRONG_SETTINGS = ("builder error", "redirect without LOCATION")  # also without an attribute
_TOKEN = "tensorcache"  # user-defined metadata of an object: which call created it
_STATUS = re.compile(r"status code: (\d{3})\b")  # in the texts of obstore's errors, which have no attribute for it
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")  # of S3, in the same texts
# S3 gives the first one status 400: no byte of an upload arrived for 20 s
_TRANSIENT_CODES = frozenset({"RequestTimeout", "IncompleteBody", "BadDigest"})
_EXPIRED = frozenset({"ExpiredToken", "TokenRefreshRequired"})
# uploads are given up below 512 KiB/s, 8 times the rate of reads: a large one that stalls would hold up its writer for hours
_UPLOAD_FACTOR = 8
_TRANSIENT = frozenset({408, 409, 425, 429})
_NO_PERMISSION = {"PermissionDeniedError": 403, "UnauthenticatedError": 401}
_NO_CONDITIONS = (
    "this store has no conditional writes (If-None-Match, If-Match), which protect shards and manifests from other "
    "writers; write to a local folder, and copy it: shards first, then manifest.json"
)
_NO_TAGS = (
    "this store, or a proxy before it, answers without strong ETags, by which a writer notices the changes of other writers; "
    "write to a local folder, and copy it, as in docs/remote_writing.md"
)
_PROBE = ".tensorcache-conditions"  # one name for all writers, of which those that may not delete leave a single object
_TAG_MISSING = ("ETag Header missing", "ETag required")  # also without an attribute
_NOT_PERMITTED = "the credentials of this process do not permit this request"
_NOT_SUPPORTED = "this store does not support this request"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an object, for compare and swap: its ETag, and the store's number of the version if it has one."""

    tag: str | None
    number: str | None

    def mode(self) -> dict[str, str]:
        """Return the condition for obstore."""
        return {k: v for k, v in (("e_tag", self.tag), ("version", self.number)) if v is not None}


def check_writable(url: str) -> None:
    """Raise ValueError unless a url is one of an object store, with a bucket and without credentials."""
    scheme = url.partition("://")[0].lower()
    if scheme not in WRITABLE:
        raise ValueError(f"{shown(url)}: shards are written to s3://, gs:// or az:// urls, or to a local path")
    bucket, _ = bucket_and_key(url)
    if "@" in bucket:
        raise ValueError(f"{shown(url)}: credentials in the url are not read; set {SETTINGS[scheme]}")
    if not bucket:
        raise ValueError(f"{shown(url)}: expected the name of a bucket after {scheme}://")


class ObjectWriter:
    """Writes objects of one bucket, each by one request, so that an object appears complete or not at all.

    Objects are not uploaded in parts: Google has no conditional multipart uploads, obstore makes none, and a killed process
    would leave parts in the bucket. Every method retries faults that may pass, within the limits of `Attempts`.

    Args:
        url: Url of any object or folder in the bucket.

    Raises:
        ImportError: obstore is not installed.
        RemoteError: The store needs options that are missing, such as the account of a container.
        ValueError: The scheme is not `s3`, `gs` or `az`, or the url has no bucket.

    Threads/fork/pickle: any thread may call; in a forked child, methods raise RemoteError, because obstore's threads do not
        exist there; not pickled. The repr has no credentials.
    """

    def __init__(self, url: str) -> None:
        check_writable(url)
        self.scheme = url.partition("://")[0].lower()
        self._bucket, _ = bucket_and_key(url)
        self._shown = f"{self.scheme}://{self._bucket}"
        self._stores: dict[float, Any] = {}  # by time limit of a request
        self._cancel = Cancel()
        check_not_forked(Target(self._shown))
        check_endpoint(self.scheme, Target(self._shown))
        self._store(Attempts(Target(url)).limit_s)

    def __repr__(self) -> str:
        return f"ObjectWriter({self._shown!r})"

    def _store(self, limit_s: float) -> Any:
        """Return a client of obstore whose requests end after about this time."""
        limit_s = float(1 << max(0, int(limit_s).bit_length()))
        if limit_s in self._stores:
            return self._stores[limit_s]
        try:
            stores = importlib.import_module("obstore.store")
        except ImportError as exc:
            problem = f"writing {self.scheme}:// urls needs obstore: pip install 'wds-tensorcache[remote]'"
            raise ImportError(problem) from exc
        make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self.scheme]
        # client_options= would replace those in the environment, such as AWS_ALLOW_HTTP.
        config = {"timeout": f"{limit_s:.0f}s", "connect_timeout": "10s"}
        failed: Exception
        try:
            # Retries are those of `Attempts`: obstore's own would repeat a creation without telling.
            store = self._stores[limit_s] = make(self._bucket, config=config, retry_config={"max_retries": 0})
            return store
        except Exception as exc:
            failed = exc
        # raised here, so that obstore's error, whose text may have credentials, is not its context
        problem = f"the store cannot be opened ({type(failed).__name__}); check {SETTINGS[self.scheme]}"
        raise Target(self._shown).error(problem)

    def create(self, url: str, content: Any) -> None:
        """Store a new object; raise FileExistsError if the object exists, unless an earlier attempt of this call stored it.

        Args:
            content: Bytes, a memory map or another flat buffer; it must not change during the call.
        """
        token, attempts = secrets.token_hex(16), Attempts(Target(url))
        while True:
            with contextlib.suppress(_Unmet):
                self._put(url, content, mode="create", attributes={_TOKEN: token})
                return
            # The response to the attempt that stored the object may have been lost.
            metadata = self._metadata(url)
            if metadata is not None and metadata.get(_TOKEN) == token:
                return
            if metadata is not None:
                problem = "exists already, and another writer has created it"
                raise FileExistsError(f"{shown(url)} {problem}; write to another folder, or resume after that writer")
            # S3 refuses a creation with status 409 while another request for the same key runs
            with cancellable(self._cancel):
                attempts.pause(TransientError("another request for this object is running", 409))

    def swap(self, url: str, content: bytes, version: Version | None) -> Version | None:
        """Replace a version of an object, or create the object if `version` is None; return its new version.

        Return None if the object has another version. An attempt of this call may have made that version, but its
        response was lost. So the caller must read the object again, and look for its change.

        Raises:
            RemoteError: The version has no strong ETag, and so meets no condition.
        """
        if version is not None:
            self.check_tag(url, version)
        try:
            result = self._put(url, content, mode="create" if version is None else version.mode())
        except _Unmet:
            return None
        return Version(result["e_tag"], result["version"])

    def check_tag(self, url: str, version: Version) -> None:
        """Raise RemoteError if a version has no strong ETag, so that the object cannot be replaced by `swap`."""
        if version.tag is None or version.tag.startswith("W/"):
            raise Target(url).error(_NO_TAGS)

    def put(self, url: str, content: bytes) -> None:
        """Store an object, or replace it."""
        self._put(url, content, mode="overwrite")

    def check_conditions(self, folder: str) -> None:
        """Check, with a small object that is deleted again, that the store obeys the conditions of `create` and `swap`.

        Raises:
            RemoteError: The store ignores conditions, or has no strong ETags, so writers would silently overwrite each
                other's shards and entries.
        """
        if self.scheme != "s3":  # Google and Azure obey; Google refuses a second change of an object within a second
            return
        url, is_ours = join_url(folder, _PROBE), True
        try:
            first = self.swap(url, b"1", None)
            is_ours = first is not None
            if not is_ours:  # another writer is checking the same
                return
            # A proxy may weaken the tags of answers to reads alone.
            if (current := self.read(url)) is not None:
                self.check_tag(url, current[1])
            is_created_twice = self.swap(url, b"2", None) is not None
            self.swap(url, b"3", first)
            if is_created_twice or self.swap(url, b"4", first) is not None:
                raise Target(folder).error(_NO_CONDITIONS)
        finally:
            if is_ours:
                with contextlib.suppress(RemoteError):  # these credentials may not delete
                    self.delete([url])

    def read(self, url: str) -> tuple[bytes, Version] | None:
        """Return the content of an object and its version; None if there is no such object."""
        obstore = _obstore()

        async def read(store: Any) -> tuple[bytes, Version]:
            result = await obstore.get_async(store, _key(url))
            return bytes(await result.bytes_async()), Version(result.meta["e_tag"], result.meta["version"])

        with contextlib.suppress(FileNotFoundError):
            return self._try(url, 0, read)
        return None

    def delete(self, urls: Sequence[str]) -> None:
        """Delete objects; ignore those that do not exist."""
        obstore = _obstore()

        async def delete(store: Any) -> None:
            await obstore.delete_async(store, [_key(url) for url in urls])

        if urls:
            with contextlib.suppress(FileNotFoundError):
                self._try(urls[0], 0, delete)

    def cancel(self) -> None:
        """End running requests, and refuse later ones, with CancelledError."""
        self._cancel.is_set = True

    def pause(self, seconds: float) -> None:
        """Wait; raise CancelledError soon after `cancel` is called."""
        until = time.monotonic() + seconds
        with cancellable(self._cancel):
            while (remaining := until - time.monotonic()) > 0:
                check_cancelled()
                time.sleep(min(remaining, _TICK_S))

    def _metadata(self, url: str) -> dict[str, str] | None:
        """Return the user-defined metadata of an object; None if there is no such object."""
        obstore = _obstore()

        async def read(store: Any) -> dict[str, str]:
            result = await obstore.get_async(store, _key(url), options={"head": True})
            return dict(result.attributes)

        with contextlib.suppress(FileNotFoundError):
            return self._try(url, 0, read)
        return None

    def _put(self, url: str, content: Any, **options: Any) -> Any:
        nbytes, most = len(content), _MAX_PUT_NBYTES[self.scheme]
        if nbytes > most:
            problem = f"{nbytes:,} bytes, but {self.scheme}:// accepts at most {most:,} in one request"
            raise Target(url).error(f"{problem}; pass a smaller max_nbytes=")
        obstore = _obstore()

        async def put(store: Any) -> Any:
            return await obstore.put_async(store, _key(url), content, use_multipart=False, **options)

        is_conditional = options["mode"] != "overwrite"
        return self._try(url, nbytes // _UPLOAD_FACTOR, put, _NO_CONDITIONS if is_conditional else _NOT_SUPPORTED)

    def _try(
        self, url: str, nbytes: int, start: Callable[[Any], Awaitable[_Result]], unsupported: str = _NOT_SUPPORTED
    ) -> _Result:
        """Return the result of a request; repeat it after faults that may pass.

        Args:
            url: The object, for errors.
            nbytes: Bytes by which `Attempts` sets the time limit; an eighth of those that an upload moves.
            start: Function that starts the request, given a client of obstore.
            unsupported: Message if the store does not support the request.

        Raises:
            _Unmet: The condition of the request is not met.
            FileNotFoundError: There is no such object.
            RemoteError: The request failed.
            CancelledError: `cancel` was called.
        """
        attempts = Attempts(Target(url), nbytes)
        check_not_forked(attempts.target)
        with cancellable(self._cancel):
            while True:
                store = self._store(attempts.limit_s)
                failed: Exception
                try:
                    return run_async(partial(start, store))
                except Exception as exc:
                    failed = exc
                # raised here, so that obstore's error, whose text may have credentials, is not its context
                attempts.pause(_fault(failed, attempts.target, unsupported))


class _Unmet(Exception):
    """The condition of a request is not met: the object exists, or has another version."""


def _obstore() -> Any:
    return importlib.import_module("obstore")


def _key(url: str) -> str:
    return bucket_and_key(url)[1]


def _fault(exc: Exception, target: Target, unsupported: str) -> TransientError:
    """Return the fault if it may pass; otherwise raise its error.

    Error texts of stores contain signed strings, and urls with signatures. So only their status is shown, and the errors of
    obstore are not chained to ours.
    """
    kind = type(exc).__name__
    if kind in ("AlreadyExistsError", "PreconditionError"):
        if unsupported is _NO_CONDITIONS:
            raise _Unmet from None
        return TransientError("another request for this object is running", 409)  # the request has no condition
    if isinstance(exc, FileNotFoundError):
        raise FileNotFoundError(f"{shown(target.url)} does not exist, or its bucket does not") from None
    if kind in _NO_PERMISSION:
        raise target.error(f"status {_NO_PERMISSION[kind]}: {_NOT_PERMITTED}", _NO_PERMISSION[kind]) from None
    if kind in ("NotSupportedError", "NotImplementedError"):
        raise target.error(unsupported, 501) from None
    if kind in ("InvalidPathError", "ValueError"):
        problem = (
            "a name of an object here is not possible: it has an empty part, or `.` or `..`, or a control character"
        )
        raise target.error(f"{problem}; use another folder, or another url") from None
    if kind not in ("GenericError", "JoinError"):
        raise exc
    status_match = _STATUS.search(str(exc))
    status = int(status_match[1]) if status_match else None
    code = next((match[1] or match[2] for match in _CODE.finditer(str(exc))), None)
    if code in _TRANSIENT_CODES:
        return TransientError(f"the server answers with the error {code}", status)
    if code in _EXPIRED:
        raise target.error("the credentials of this process have expired", status) from None
    if code == "AccessDenied":  # in an answer to a request that deletes several objects
        raise target.error(_NOT_PERMITTED, 403) from None
    if status is None and any(text in str(exc) for text in _TAG_MISSING):
        raise target.error(_NO_TAGS) from None
    if status is None and any(text in str(exc) for text in _WRONG_SETTINGS):
        problem = (
            "the region or the endpoint of the bucket is wrong; an endpoint with http:// also needs AWS_ALLOW_HTTP=true"
        )
        raise target.error(problem) from None
    if status == 404:
        raise FileNotFoundError(f"{shown(target.url)} does not exist, or its bucket does not") from None
    if status is None:
        return TransientError("no response: the server cannot be reached, or the connection was lost, or time is over")
    if status == 501:
        raise target.error(unsupported, status) from None
    if 300 <= status < 500 and status not in _TRANSIENT:
        remedy = "check the region and the endpoint of the bucket"
        raise target.error(f"the server refuses the request with status {status}; {remedy}", status) from None
    return TransientError(f"the server responds with status {status}", status)
