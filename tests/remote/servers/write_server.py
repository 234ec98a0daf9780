"""An S3 server (moto) in its own process, with one write at a time, and faults of uploads that a test scripts.

moto looks at the condition of a request and stores the object in two steps, so that two threads may both create an object.
Here a lock makes them one step.

    with WriteServer() as server:
        os.environ.update(server.environment)
        server.script({"method": "PUT", "suffix": ".tar", "status": 503})
        tc.ShardWriter("s3://bucket/cache")

Faults, in the order of requests that match `method` and `suffix`, the end of the key:
    status      an answer without storing the object
    code        the code of S3 in the body of that answer
    denied      key of an object that the body of that answer says may not be deleted
    lost        store the object, then close the connection without an answer
    cut         read half of the body, then close the connection
    hold        wait for the next call of `script` before the request is handled
    ignore      handle the request without its conditions; "IF_MATCH" or "IF_NONE_MATCH": without this one
    tags        "weak": the answer has a weak ETag, and no condition matches it; "none": the answer has no ETag
    times       how many requests the fault applies to; -1 for all
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from tests.remote.servers.process import ServerProcess

BUCKET = "bucket"
SECRET = "v3ry-s3cret-k3y"


class WriteServer(ServerProcess):
    """An S3 server on 127.0.0.1 with one bucket; see the module's docstring.

    Attributes:
        environment: Variables with which obstore finds the server.
    """

    def __init__(self) -> None:
        super().__init__(["-m", "tests.remote.servers.write_server"])
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = environment(self.endpoint)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def script(self, *faults: dict[str, Any]) -> None:
        """Replace the faults of the next requests."""
        self._call("script", json.dumps(faults).encode())

    def wait_until_held(self) -> None:
        """Wait until a request is held."""
        self._call("wait_until_held")

    def wait_until_idle(self) -> None:
        """Wait until all requests that clients have sent are handled, those of killed clients included."""
        self._call("wait_until_idle")

    def log(self) -> list[tuple[str, str, int]]:
        """Return method, key and status of the requests since the last call; the status is 0 without an answer."""
        return [(method, key, status) for method, key, status in json.loads(self._call("log"))]

    def clear(self) -> None:
        """Remove all objects and faults."""
        self._call("clear")

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return the objects whose keys begin with a prefix, by the rest of the key, as they are at one moment."""
        objects = json.loads(self._call("objects", prefix.encode()))
        return {key[len(prefix) :]: content.encode("latin-1") for key, content in objects.items()}

    def put(self, key: str, content: bytes) -> str:
        """Make or replace an object; return its url."""
        self._call("put", json.dumps(key).encode() + b"\n" + content)
        return f"s3://{BUCKET}/{key}"

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._call("delete", key.encode())

    def _call(self, act: str, body: bytes = b"") -> bytes:
        request = urllib.request.Request(f"{self.endpoint}/{act}", body, {"X-Control": "1"}, method="POST")
        with self._opener.open(request, timeout=60) as response:
            return bytes(response.read())


@lru_cache
def shared_server() -> WriteServer:
    """Return the one server of this process, whose clients of `s3://bucket` keep its address."""
    server = WriteServer()
    atexit.register(server.close)
    return server


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which obstore finds a server."""
    return {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


_Start = Callable[..., Any]


class _Faults:
    """A WSGI application that handles control requests, and passes all other requests to moto."""

    def __init__(self, application: Callable[[dict[str, Any], _Start], Iterable[bytes]], backend: Any) -> None:
        self._application, self._backend = application, backend
        self._faults: list[dict[str, Any]] = []
        self._log: list[tuple[str, str, int]] = []
        self._lock = threading.Lock()
        self._is_held, self._may_pass = threading.Event(), threading.Event()
        backend.create_bucket(BUCKET, "us-east-1")

    def __call__(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].encode("latin-1").decode()
        if "HTTP_X_CONTROL" in environ:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("200 OK", [])
            if path == "/wait_until_held":
                assert self._is_held.wait(60)
                return [b""]
            if path == "/wait_until_idle":
                _wait_until_idle(environ["werkzeug.socket"])
                return [b""]
            with self._lock:  # a writer, which deletes the object with which it checks the store, waits
                return [self._control(path.lstrip("/"), body)]
        key = path.removeprefix(f"/{BUCKET}/")
        fault = self._fault(method, key)
        if "hold" in fault:
            may_pass = self._may_pass
            self._is_held.set()
            may_pass.wait(60)
        if "ignore" in fault:
            for name in {"IF_MATCH", "IF_NONE_MATCH"} & {fault["ignore"]} or ("IF_MATCH", "IF_NONE_MATCH"):
                environ.pop(f"HTTP_{name}", None)
        statuses: list[int] = []

        if fault.get("tags") == "weak" and environ.get("HTTP_IF_MATCH", "").startswith("W/"):
            environ["HTTP_IF_MATCH"] = '"a strong comparison with a weak tag fails"'

        def answer(status: str, headers: Any, *rest: Any) -> Any:
            statuses.append(int(status[:3]))
            if "tags" in fault:
                tags = [f"W/{value}" for name, value in headers if name.lower() == "etag" and fault["tags"] == "weak"]
                headers = [(name, value) for name, value in headers if name.lower() != "etag"]
                headers += [("ETag", tag) for tag in tags]
            return None if "lost" in fault else start(status, headers, *rest)

        if "status" in fault:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            answer(f"{fault['status']} A fault", [])
            self._log.append((method, key, fault["status"]))
            if "denied" in fault:
                error = f"<Error><Key>{fault['denied']}</Key><Code>AccessDenied</Code><Message></Message></Error>"
                return [f"<DeleteResult>{error}</DeleteResult>".encode()]
            code = f"<Code>{fault['code']}</Code>" if "code" in fault else ""
            return [f"<Error>{code}<StringToSign>{SECRET}</StringToSign></Error>".encode()]
        if "cut" in fault:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            return self._drop(environ, method, key)
        if method == "PUT":
            nbytes = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(nbytes)
            if len(body) < nbytes:  # the client was killed
                return self._drop(environ, method, key)
            environ["wsgi.input"] = io.BytesIO(body)
        with self._lock if method in ("PUT", "DELETE", "POST") else contextlib.nullcontext():
            answered = list(self._application(environ, answer))
        if "lost" in fault:
            return self._drop(environ, method, key)
        self._log.append((method, key, statuses[-1]))
        return answered

    def _drop(self, environ: dict[str, Any], method: str, key: str) -> Iterable[bytes]:
        self._log.append((method, key, 0))
        with contextlib.suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    def _fault(self, method: str, key: str) -> dict[str, Any]:
        with self._lock:
            for at, fault in enumerate(self._faults):
                if fault.get("method", method) == method and key.endswith(fault.get("suffix", "")):
                    fault["times"] = fault.get("times", 1) - 1
                    if not fault["times"]:
                        del self._faults[at]
                    return fault
        return {}

    def _control(self, act: str, body: bytes) -> bytes:
        keys = self._backend.buckets[BUCKET].keys
        if act == "script":
            self._faults = json.loads(body)
            self._is_held.clear()
            self._may_pass.set()
            self._may_pass = threading.Event()
        elif act == "log":
            log, self._log = self._log, []
            return json.dumps(log).encode()
        elif act == "clear":
            self._faults = []
            for key in list(keys):
                self._backend.delete_object(BUCKET, key)
        elif act == "objects":
            names = sorted(key for key in keys if key.startswith(body.decode()))
            return json.dumps({key: bytes(keys[key].value).decode("latin-1") for key in names}).encode()
        elif act == "delete":
            self._backend.delete_object(BUCKET, body.decode())
        elif act == "put":
            name, _, content = body.partition(b"\n")
            self._backend.put_object(BUCKET, json.loads(name), content)
        return b""


_connections: set[socket.socket] = set()
_waiting: set[socket.socket] = set()  # connections of which a thread waits for the next request


def _wait_until_idle(own: socket.socket) -> None:
    """Wait until every other connection waits for a request, and nothing of one has arrived. A killed client's ends then."""
    deadline = time.monotonic() + 60
    while not all(each in _waiting and not _is_readable(each) for each in _connections - {own}):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _is_readable(connection: socket.socket) -> bool:
    try:
        return bool(select.select([connection], [], [], 0)[0])
    except (OSError, ValueError):  # closed
        return True


def _main() -> None:
    import logging

    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def setup(self) -> None:
            _connections.add(self.request)
            super().setup()

        def handle_one_request(self) -> None:
            _waiting.add(self.connection)
            select.select([self.connection], [], [])
            _waiting.discard(self.connection)
            super().handle_one_request()

        def finish(self) -> None:
            _connections.discard(self.request)
            super().finish()

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    backend = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
    application = _Faults(DomainDispatcherApplication(create_backend_app), backend)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _main()
