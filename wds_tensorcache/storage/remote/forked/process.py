"""The process that runs obstore for a forked process, and ends with it.

    python -m wds_tensorcache.storage.remote.forked.process FD

FD is a Unix socket, over which the forked process sends a socket for each of its threads. A request on one of them is a line of
JSON. So is the response, and the bytes follow.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

from wds_tensorcache.errors import FormatError, RemoteError
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for

__all__: list[str] = []


def _serve(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            head, content = _respond(**json.loads(line))
            head["nbytes"] = len(content)
            try:
                connection.sendall(json.dumps(head).encode() + b"\n")
                connection.sendall(content)
            except OSError:  # the request was cancelled
                return


def _respond(act: str, url: str, begin: int, end: int, expected: tuple[int, str | None]) -> tuple[dict[str, Any], Any]:
    try:
        client = client_for(url)
        content: bytes | bytearray = b""
        if act == "list":
            return {"objects": [(name, state.nbytes, state.tag) for name, state in client.list_objects(url)]}, b""
        if act == "stat":
            state = client.stat(url)
        elif act == "tail":
            state, content = client.read_tail(url, end)
        elif act == "whole":
            state, content = client.read_whole(url, end)
        else:
            content = bytearray(end - begin)
            state = client.read_into(url, [memoryview(content)], begin, ObjectInfo(*expected))
        return {"state": (state.nbytes, state.tag)}, content
    except FileNotFoundError:
        return {"error": "missing"}, b""
    except FormatError as exc:
        return {"error": "format", "text": exc.reason, "where": exc.where}, b""
    except RemoteError as exc:
        fields = {"url": exc.url, "begin": exc.begin, "end": exc.end, "status": exc.status}
        return {"error": "remote", "text": str(exc), **fields}, b""
    except Exception as exc:  # the text of an unknown error may have secrets
        return {"error": "other", "text": type(exc).__name__}, b""


def _main(control: socket.socket) -> None:
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            os._exit(0)  # the forked process has ended
        threading.Thread(target=_serve, args=(socket.socket(fileno=fds[0]),), daemon=True).start()


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
