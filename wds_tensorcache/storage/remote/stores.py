"""A client of S3, Google Cloud Storage and Azure, through obstore."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import (
    TRANSIENT_STATUSES,
    ObjectInfo,
    Request,
    TransientError,
    check_cancelled,
    timeout_s,
)
from wds_tensorcache.storage.urls import bucket_and_key

_CONNECT_S, _STALL_S = 10.0, 20.0
# by scheme, the variables of the environment that obstore reads
_SETTINGS = {
    "s3": "AWS_ENDPOINT, AWS_REGION, AWS_ALLOW_HTTP and the credentials in AWS_…, since files such as ~/.aws/credentials are "
    "not read; a public bucket needs AWS_SKIP_SIGNATURE=true",
    "gs": "the credentials in GOOGLE_…",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and the credentials in AZURE_STORAGE_…",
}
NO_CONDITIONS = (
    "this store has no conditional writes (If-None-Match, If-Match), which protect shards and manifests from other "
    "writers; write to a local folder, and copy it: shards first, then manifest.json"
)
NO_TAGS = (
    "this store, or a proxy before it, answers without strong ETags, by which a writer notices the changes of other writers; "
    "write to a local folder, and copy it, as in docs/remote_writing.md"
)
_OTHER_BYTES = "the store answers a request for some bytes with other bytes; copy the cache to a local folder"
_NOT_PERMITTED = "the credentials of this process do not permit this request, or the object does not exist"

# obstore's errors have no attribute for the status, nor for the code of S3; the texts that name them are never shown
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist").search  # of S3, Azure and Google
# S3 gives `RequestTimeout` the status 400: no byte of an upload arrived for 20 s
_TRANSIENT_CODES = frozenset({"RequestTimeout", "IncompleteBody", "BadDigest"})
_EXPIRED = "the credentials of this process have expired"
# by parts of the text of an error without a status: the status, and the problem
_TEXTS: dict[str, tuple[int | None, str]] = {
    "Requested ": (206, _OTHER_BYTES),
    "Received non-partial response": (200, _OTHER_BYTES),
    "ETag Header missing": (None, NO_TAGS),
    "ETag required": (None, NO_TAGS),
    "builder error": (None, "the endpoint of the bucket is wrong"),
    "redirect without LOCATION": (None, "the region of the bucket is wrong"),
}
# the same, by the name of a class of obstore, or by the code of S3
_CAUSES: dict[str, tuple[int | None, str]] = {
    "PermissionDeniedError": (403, _NOT_PERMITTED),
    "UnauthenticatedError": (401, "the store does not permit this request with these credentials"),
    "InvalidPathError": (None, "the name has an empty part, `.` or `..`, or a control character; use another url"),
    "ValueError": (None, "the store cannot have an object of this name, or a setting is not valid"),
    "UnknownConfigurationKeyError": (None, "a setting is not valid"),
    "AccessDenied": (403, _NOT_PERMITTED),  # also in an answer to a request that deletes several objects
    "ExpiredToken": (None, _EXPIRED),
    "TokenRefreshRequired": (None, _EXPIRED),
}
_FORKED = (
    "obstore does not work in a process that was forked after its first use; start worker processes by 'forkserver' or "
    "'spawn': tc.torch_loader does so, and DataLoader takes multiprocessing_context='forkserver'"
)

_Result = TypeVar("_Result")
_pid: int | None = None  # of the process in which obstore started its threads


class Unmet(Exception):
    """An unmet condition: the object exists, or has another version."""


def _check_endpoint(scheme: str, request: Request) -> None:
    """Raise RemoteError if the environment's S3 endpoint cannot work."""
    # Hazard: obstore panics if the endpoint is not a url, and its error for `http://` does not name the variable to set.
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL") if scheme == "s3" else ():
        # the value is not shown, because it may have credentials
        text = os.environ.get(name)
        if text is None:
            continue
        begin = text.partition("://")[0].lower()
        if begin not in ("http", "https"):
            raise request.error(f"{name} is not a url that begins with http:// or https://; set it, or remove it")
        if begin == "http" and not os.environ.get("AWS_ALLOW_HTTP"):
            raise request.error(f"{name} begins with http://, which also needs AWS_ALLOW_HTTP=true")


class StoreClient:
    """A client of one bucket or container, for reads and writes. Each call is one attempt; see `Client`.

    obstore reads the settings from the environment, and refuses responses with another range. Reads send a known strong ETag
    (`If-Match`). obstore's calls block until they are done or the time limit of the request is reached.

    Threads/fork/pickle: as `Client`; refused in a child that was forked after its parent used obstore.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.pace = Pace()
        self.scheme, _, self._bucket = origin.partition("://")
        self._has_suffix_ranges = self.scheme != "az"
        self._stores: dict[tuple[float, bool], Any] = {}  # by time limit, for uploads or not
        _check_endpoint(self.scheme, Request(origin))
        self._store(timeout_s(), Request(origin))

    def _store(self, limit_s: float, request: Request, is_upload: bool = False) -> Any:
        """Return obstore's client with a time limit of `limit_s` to `2 * limit_s`."""
        global _pid
        # a request of a child that was forked after its parent used obstore would never end
        if _pid is not None and _pid != os.getpid():
            raise request.error(_FORKED)
        limit_s = 2.0 ** int(min(limit_s, 1e6)).bit_length()  # the limit may be infinite
        if (limit_s, is_upload) in self._stores:
            return self._stores[limit_s, is_upload]
        try:
            stores = importlib.import_module("obstore.store")
        except ImportError as missing:
            need = f"{self.scheme}:// urls need obstore"
            raise ImportError(f"{need}: pip install 'wds-tensorcache[remote]'") from missing
        _pid = os.getpid()
        make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self.scheme]
        # client_options= would replace the options in the environment, such as AWS_ALLOW_HTTP.
        config = {
            "timeout": f"{limit_s:.0f}s",
            "connect_timeout": f"{min(_CONNECT_S, limit_s):.0f}s",
            # while an upload is sent, no byte of the response arrives
            "read_timeout": f"{limit_s if is_upload else min(_STALL_S, limit_s):.0f}s",
        }
        try:
            # `Request.repeat` repeats: obstore itself would silently repeat a creation
            store = make(self._bucket, config=config, retry_config={"max_retries": 0})
            return self._stores.setdefault((limit_s, is_upload), store)
        except Exception as exc:
            name = type(exc).__name__
        # raised here, so that obstore's error, whose text may have credentials, is not its context
        raise request.error(f"the store cannot be opened ({name}); check {_SETTINGS[self.scheme]}")

    def call(self, request: Request, send: Callable[[Any, str], _Result], *, is_upload: bool = False) -> _Result:
        """Return `send(store, key)`. Raise Unmet if the request's condition is not met, and errors as `Client` does."""
        key = bucket_and_key(request.url)[1]
        store = self._store(request.limit_s, request, is_upload)
        failed: Exception
        try:
            return send(store, key)
        except Exception as exc:
            failed = exc
        # raised here, so that obstore's error, whose text may have signed urls, is not its context
        raise self._error(failed, request)

    def _error(self, failed: Exception, request: Request) -> Exception:
        name, text = type(failed).__name__, str(failed)
        if name in ("AlreadyExistsError", "PreconditionError"):
            return Unmet()
        match = _STATUS.search(text)
        status = int(match[1]) if match else None
        if isinstance(failed, FileNotFoundError) or status == 404:
            if _NO_BUCKET(text):
                return request.missing_bucket_error(self._bucket)
            # the answer to a HEAD has no code
            names = f"no bucket {self._bucket!r}; check both names, and the endpoint, region or account"
            return request.missing_error("object" if _CODE.search(text) else f"object, or {names}")
        if name in ("NotSupportedError", "NotImplementedError"):
            return request.error(NO_CONDITIONS, 501)
        check = f"check {_SETTINGS[self.scheme]}"
        code = next((code_match[1] or code_match[2] for code_match in _CODE.finditer(text)), "")
        if code in _TRANSIENT_CODES:
            return TransientError(f"the server answers with the error {code}", status)
        cause = _CAUSES.get(name) or _CAUSES.get(code)
        if cause is None and status is None:
            cause = next((cause for part, cause in _TEXTS.items() if part in text), None)
        if cause is not None:
            status = cause[0] or status
            return request.error((f"status {status}: " if status else "") + f"{cause[1]}; {check}", status)
        if name not in ("GenericError", "JoinError"):
            return failed
        if status is None:
            return TransientError(f"no response: the server cannot be reached, or the connection was lost; {check}")
        if status == 501:
            return request.error(NO_CONDITIONS, status)
        if status < 500 and status not in TRANSIENT_STATUSES and status != 409:
            return request.error(f"the server refuses the request with status {status}; {check}", status)
        return TransientError(f"the server responds with status {status}", status)

    def _get(self, request: Request, options: dict[str, Any]) -> tuple[Any, float]:
        """Request a read; return the response, and the seconds until its head."""
        if not bucket_and_key(request.url)[1]:
            raise request.error("the url has no object")
        begun = time.monotonic()
        if request.state is not None and (request.state.tag or "").startswith('"'):
            options["if_match"] = request.state.tag
        try:
            result = self.call(request, lambda store, key: store.get(key, options=options))
        except Unmet:
            # Azurite answers with 412 also if the object does not exist, for which this request has another error
            self.call(request, lambda store, key: store.head(key))
            raise request.changed_error("the store has another version of it") from None
        return result, time.monotonic() - begun

    def _body(self, result: Any, head_s: float, nbytes: int) -> memoryview:
        begun, content = self.pace.begin(head_s), memoryview(b"")
        try:
            with suppress(Exception):  # obstore has many errors for a lost connection, whose texts may have signed urls
                content = memoryview(result.bytes())
        finally:
            self.pace.end(begun, len(content))
        if len(content) != nbytes:
            raise TransientError("the body was cut short")
        check_cancelled()
        return content

    def read_head(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        result, head_s = self._get(request, {} if nbytes else {"head": True})
        state = _state(result)
        if nbytes and state.nbytes > nbytes:  # the body that has begun is dropped
            result, head_s = self._get(request, {"range": (0, nbytes)})
            state = _state(result)
        nbytes = min(nbytes, state.nbytes)
        return state, bytes(self._body(result, head_s, nbytes)) if nbytes else b""

    def read_tail(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes] | None:
        if nbytes > 0 and self._has_suffix_ranges:
            try:
                result, head_s = self._get(request, {"range": {"suffix": nbytes}})
            except OSError as exc:
                status = getattr(exc, "status", None)
                if status not in (200, 206, 416):
                    raise
                # 416 is also the response for an empty object; s3rver answers `bytes=-100` with the first 101 bytes
                self._has_suffix_ranges = status == 416
            else:
                state = _state(result)
                return state, bytes(self._body(result, head_s, min(nbytes, state.nbytes)))
        return None

    def read_range(self, request: Request, buffers: Sequence[memoryview], /) -> ObjectInfo:
        begin, end = request.at, request.end
        assert end is not None
        result, head_s = self._get(request, {"range": (begin, end)})
        state = request.check(_state(result))
        content = self._body(result, head_s, end - begin)
        for buffer in buffers:
            buffer[:], content = content[: len(buffer)], content[len(buffer) :]
        return state

    def list_objects(self, request: Request, /) -> list[str]:
        listed = self.call(request, lambda store, key: store.list_with_delimiter(key.rstrip("/") or None))
        return [f"{self.origin}/{path}" for path in sorted(entry["path"] for entry in listed["objects"])]


def _state(response: Any) -> ObjectInfo:
    meta = response.meta
    return ObjectInfo(meta["size"], meta["e_tag"])
