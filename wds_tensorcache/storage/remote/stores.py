"""Objects of S3, Google Cloud Storage and Azure, through obstore."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from wds_tensorcache.errors import RemoteError
from wds_tensorcache.storage.remote.client import ObjectInfo, fill_buffers, read_tail_by_stat
from wds_tensorcache.storage.remote.event_loop import check_not_forked, run_async
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import (
    Attempts,
    Target,
    TransientError,
    check_cancelled,
    timeout_s,
    warn_of_delay,
)
from wds_tensorcache.storage.urls import bucket_and_key, shown

_CONNECT_S, _STALL_S = 10.0, 20.0
_PART = 4 << 20  # longer objects are read in parts, each with its own time limit
# by scheme, the variables of the environment that obstore reads
SETTINGS = {
    "s3": "AWS_ENDPOINT, AWS_REGION, AWS_ALLOW_HTTP and the credentials in AWS_…",
    "gs": "the credentials in GOOGLE_…",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and the credentials in AZURE_STORAGE_…",
}
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL")
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_OTHER_BYTES = {"Requested ": 206, "Received non-partial response": 200}  # statuses by texts of obstore's errors
_NO_BUCKET = "status code: 404"  # of a listing, in the text of obstore's error
_PROBE_S = 2.0  # to connect


def check_endpoint(scheme: str, target: Target) -> None:
    """Raise RemoteError if the environment names an endpoint of S3 that cannot work.

    obstore panics if the endpoint is not a url, and does not say that `http://` is switched off.
    """
    if scheme != "s3":
        return
    for name in _ENDPOINTS:
        # the value is not shown, because it may have credentials
        text = os.environ.get(name)
        if text is None:
            continue
        begin = text.partition("://")[0].lower()
        if begin not in ("http", "https"):
            raise target.error(f"{name} is not a url that begins with http:// or https://; set it, or remove it")
        if begin == "http" and not os.environ.get("AWS_ALLOW_HTTP"):
            raise target.error(f"{name} begins with http://, which also needs AWS_ALLOW_HTTP=true")


def _likely_cause(scheme: str) -> str:
    """Return the probable fault if obstore names none, from the environment and a connection to the endpoint."""
    has_proxy = any(os.environ.get(name) or os.environ.get(name.lower()) for name in _PROXIES)
    for name in _ENDPOINTS if scheme == "s3" and not has_proxy else ():
        try:
            endpoint = urlsplit(os.environ.get(name, ""))
            if endpoint.hostname is not None:
                port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
                socket.create_connection((endpoint.hostname, port), _PROBE_S).close()
        except (OSError, ValueError) as exc:
            return f"nothing answers at the address in {name} ({getattr(exc, 'strerror', None) or type(exc).__name__})"
    if scheme == "s3" and not any(map(os.environ.get, _CREDENTIALS)):
        return (
            "the environment has no credentials, and files such as ~/.aws/credentials are not read; a public bucket needs "
            "AWS_SKIP_SIGNATURE=true"
        )
    return "the bucket may not exist, or have another region"


def _warner(target: Target) -> Callable[[], None]:
    """Return a function that logs a warning if a request that begins now takes long: obstore repeats it in silence."""
    return partial(warn_of_delay, target, time.monotonic(), f"no response yet; trying for up to {timeout_s():g} s")


class StoreClient:
    """Reads objects of one bucket or container; see `Client`. The store is made from the environment, as obstore does.

    The strong ETag goes with every read (`If-Match`). obstore itself repeats requests that fail with a status that may pass;
    a range whose body is cut short is requested again here.

    Threads/fork/pickle: as `Client`.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.pace = Pace()
        self._scheme, _, self._bucket = origin.partition("://")
        self._has_suffix_ranges = self._scheme != "az"
        self._store = self._make()

    def __repr__(self) -> str:
        return f"StoreClient({self.origin!r})"

    def _make(self) -> Any:
        target = Target(self.origin)
        if "@" in self._bucket:
            raise target.error(f"credentials in the url are not read; set {SETTINGS[self._scheme]}")
        check_not_forked(target)
        check_endpoint(self._scheme, target)
        try:
            from obstore import store
        except ImportError as missing:
            raise ImportError(
                f"reading {self._scheme}:// needs obstore: pip install 'wds-tensorcache[remote]'"
            ) from missing
        cls: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[self._scheme]
        limit = timeout_s()
        # client_options= would replace those in the environment, such as AWS_ALLOW_HTTP.
        config = {
            "timeout": f"{limit:.3f}s",
            "connect_timeout": f"{min(_CONNECT_S, limit):.3f}s",
            "read_timeout": f"{min(_STALL_S, limit):.3f}s",
        }
        retries = {
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=limit),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=10), "base": 2},
        }
        failed: Exception
        try:
            return cls(self._bucket, config=config, retry_config=retries)
        except Exception as exc:
            failed = exc
        # raised here, so that the text of obstore's error, which may have credentials, is not its context
        raise self._error(failed, target)

    def _error(self, error: BaseException, target: Target) -> BaseException:
        """Return the error for an error of obstore. Its text is not shown, because it may contain signed urls."""
        from obstore import exceptions

        if isinstance(error, FileNotFoundError):
            return target.missing()
        if isinstance(error, exceptions.PreconditionError):
            return target.changed("the store has another version of it")
        name = type(error).__name__
        settings = SETTINGS[self._scheme]
        if isinstance(error, exceptions.UnauthenticatedError):
            return target.error(f"the store does not accept the credentials; check {settings}", 401)
        if isinstance(error, exceptions.PermissionDeniedError):
            return target.error(
                f"the credentials do not allow this, or the object does not exist; check {settings}", 403
            )
        if isinstance(error, (exceptions.InvalidPathError, ValueError)):
            return target.error(f"the store cannot have an object of this name, or a setting is not valid ({name})")
        if _NO_BUCKET in str(error):
            return FileNotFoundError(
                f"{shown(target.url)} does not exist: the bucket may not exist, or have another region"
            )
        if isinstance(error, (exceptions.BaseError, OSError)):
            for text, status in _OTHER_BYTES.items():
                if text in str(error):
                    problem = (
                        "the store answers a request for some bytes with other bytes; copy the cache to a local folder"
                    )
                    return target.error(problem, status)
            reason = f"the store refused the request or could not be reached ({name})"
            return target.error(f"{reason}: {_likely_cause(self._scheme)}; check {settings}")
        return error

    def _get(self, url: str, options: dict[str, Any], target: Target) -> _Found:
        """Send one request; return the head of its response, and the object that reads the body."""
        import obstore

        key = bucket_and_key(url)[1]
        if not key:
            raise target.error("the url has no object")
        begun = time.monotonic()
        failed: BaseException
        try:
            result = run_async(lambda: obstore.get_async(self._store, key, options=options), _warner(target))  # type: ignore[arg-type]
            return _Found(result, time.monotonic() - begun)
        except Exception as exc:
            failed = exc
        raise self._error(failed, target)

    def stat(self, url: str, /) -> ObjectInfo:
        return self._get(url, {"head": True}, Target(url)).state

    def read_tail(self, url: str, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        if nbytes > 0 and self._has_suffix_ranges:
            return self._suffix(url, nbytes)
        return read_tail_by_stat(self, url, nbytes)

    def _suffix(self, url: str, nbytes: int) -> tuple[ObjectInfo, bytes]:
        """Return the end of an object by a suffix range, which stores refuse for an empty object."""
        target = Target(url)
        try:
            response = self._get(url, {"range": {"suffix": nbytes}}, target)
        except RemoteError as exc:
            if exc.status in _OTHER_BYTES.values():  # s3rver answers `bytes=-100` with the first 101 bytes
                self._has_suffix_ranges = False
                return read_tail_by_stat(self, url, nbytes)
            if exc.status is None and self.stat(url).nbytes == 0:
                return ObjectInfo(0, None), b""
            raise
        state = response.state
        if response.range != (max(0, state.nbytes - nbytes), state.nbytes):
            raise target.error(
                f"asked for the last {nbytes} bytes, got bytes [{response.range[0]}, {response.range[1]})"
            )
        content = self._body(response, target)
        if content is None:
            memory = bytearray(response.range[1] - response.range[0])
            return self.read_into(url, [memoryview(memory)], response.range[0], state), bytes(memory)
        return state, bytes(content)

    def _body(self, response: _Found, target: Target) -> memoryview | None:
        """Return a response's body; None if it was cut short."""
        clock = self.pace.begin(response.head_s)
        content: memoryview | None = None
        # obstore has many errors for a lost connection. Whatever ended the body, the caller asks for the rest; if that
        # is refused, too, the error of the second request tells why.
        with contextlib.suppress(Exception):
            content = memoryview(run_async(response.result.bytes_async))
        clock.end(0 if content is None else len(content))
        return content

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, /) -> ObjectInfo:
        end = begin + sum(map(len, buffers))
        target = Target(url, begin, end)
        target.check_inside(expected)
        if begin == end:
            return expected
        attempts = Attempts(target, end - begin)
        options: dict[str, Any] = {"range": (begin, end)}
        while True:
            if expected.tag is not None and not expected.tag.startswith("W/"):
                options["if_match"] = expected.tag
            response = self._get(url, options, target)
            target.check_same(response.state, expected)
            if response.range != (begin, end):
                raise target.error(f"got bytes [{response.range[0]}, {response.range[1]})")
            expected = ObjectInfo(expected.nbytes, response.state.tag or expected.tag)
            content = self._body(response, target)
            if content is not None and len(content) == end - begin:
                check_cancelled()
                fill_buffers(buffers, content)
                return expected
            attempts.pause(TransientError("the body was cut short"))

    def read_whole(self, url: str, max_nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        target = Target(url)
        attempts = Attempts(target)
        while True:
            response = self._get(url, {}, target)
            state = response.state
            if state.nbytes > max_nbytes:
                raise target.error(f"the object has {state.nbytes} bytes, more than {max_nbytes}")
            if state.nbytes > _PART:
                break
            content = self._body(response, target)
            if content is not None and len(content) == state.nbytes:
                return state, bytes(content)
            attempts.pause(TransientError("the body was cut short"))
        del response
        memory = bytearray(state.nbytes)
        view = memoryview(memory)
        for begin in range(0, state.nbytes, _PART):
            state = self.read_into(url, [view[begin : begin + _PART]], begin, state)
        return state, bytes(memory)

    def list_objects(self, folder: str, /) -> Iterator[tuple[str, ObjectInfo]]:
        import obstore

        target = Target(folder)
        prefix = bucket_and_key(folder)[1].rstrip("/") or None
        failed: BaseException | None = None
        listed: Any = None
        try:
            listed = run_async(lambda: obstore.list_with_delimiter_async(self._store, prefix), _warner(target))
        except Exception as exc:
            failed = exc
        if failed is not None:
            raise self._error(failed, target)
        objects = [(one["path"], ObjectInfo(one["size"], one["e_tag"])) for one in listed["objects"]]
        for path, state in sorted(objects, key=lambda one: one[0]):
            yield f"{self.origin}/{path}", state


class _Found:
    """The head of a response."""

    __slots__ = ("head_s", "range", "result", "state")

    def __init__(self, result: Any, head_s: float) -> None:
        self.result, self.head_s = result, head_s
        meta = result.meta
        self.state = ObjectInfo(meta["size"], meta["e_tag"])
        self.range: tuple[int, int] = tuple(result.range)
