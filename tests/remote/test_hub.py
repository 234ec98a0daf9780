"""Files of a hub, through huggingface_hub, against a web server that answers as a hub does."""

from __future__ import annotations

import json
import random

import pytest

import wds_tensorcache as tc
from tests.remote.reads import refused
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import fetch_many, list_objects, stat
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole

pytest.importorskip("huggingface_hub")
CONTENT = random.Random(8).randbytes(100_000)
FOLDER = "hf://datasets/org/name/cache"
URL = f"{FOLDER}/a b.tar"
PATH = f"datasets/org/name/resolve/{'1' * 40}/cache/a b.tar"


def publish(server: HttpServer, commit: str, content: bytes) -> None:
    """Let the hub's main branch be a commit with two files in a folder."""
    repository = json.dumps({"id": "org/name", "sha": commit, "siblings": []}).encode()
    for name in ("", "/revision/main", f"/revision/{commit}"):
        server.put(f"api/datasets/org/name{name}", repository)
    large = {"oid": "f" * 64, "size": 5, "pointerSize": 100}
    tree = [
        {"type": "file", "oid": commit, "size": len(content), "path": "cache/a b.tar"},
        {"type": "file", "oid": "b" * 40, "size": 5, "path": "cache/large", "lfs": large},
        {"type": "directory", "oid": "c" * 40, "size": 0, "path": "cache/folder"},
    ]
    server.put(f"api/datasets/org/name/tree/{commit}/cache", json.dumps(tree).encode())
    server.put(f"datasets/org/name/resolve/{commit}/cache/a b.tar", content)


@pytest.fixture
def hub(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    monkeypatch.setenv("HF_ENDPOINT", http_server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    publish(http_server, "1" * 40, CONTENT)
    forget_clients()
    return http_server


def test_reads(hub: HttpServer) -> None:
    assert stat(URL).nbytes == len(CONTENT)
    assert RemoteFile(URL).read_tail(1000) == CONTENT[-1000:]
    assert read_whole(URL, len(CONTENT)) == CONTENT
    assert list_objects(FOLDER) == [URL, f"{FOLDER}/large"]
    file = RemoteFile(URL, len(CONTENT))
    buffers = [memoryview(bytearray(10)) for _ in range(9)]
    fetch_many([(file, 10_000 * i, [buffers[i]]) for i in range(9)])
    assert [bytes(buffer) for buffer in buffers] == [CONTENT[10_000 * i : 10_000 * i + 10] for i in range(9)]
    for url in (URL.replace("name/", "name@main/"), URL.replace("name/", f"name@{'1' * 40}/")):
        assert RemoteFile(url).read(5, 9) == CONTENT[5:9]
    requests = [request for request in hub.log() if "resolve" in request.path]
    assert {request.headers.get("authorization") for request in requests} == {"Bearer hf_hunter2"}
    assert not any("/main/" in request.path for request in requests)


def test_large_files_are_on_another_server(hub: HttpServer) -> None:
    """The token does not follow, and the tag is that of the hub: the other server has another one."""
    with HttpServer() as other:
        url = other.put("blob", CONTENT) + "?S1GNATURE"
        hub.script(PATH, {"redirect": url, "headers": {"X-Linked-Etag": '"f00"'}, "times": -1})
        file = RemoteFile(URL)
        assert file.read_tail(10) == CONTENT[-10:]
        assert file.read(3, 70_000) == CONTENT[3:70_000]
        assert file.state.tag == '"f00"'
        requests = other.log()
        assert len(requests) == 2
        assert not any({"authorization", "if-match"} & set(request.headers) for request in requests)


def test_a_branch_that_moves(hub: HttpServer) -> None:
    """One process reads one commit; another version is refused where the first is expected."""
    file = RemoteFile(URL)
    file.ask()
    publish(hub, "2" * 40, CONTENT[::-1])
    assert file.read(0, 10) == CONTENT[:10]
    assert RemoteFile(URL).read(0, 10) == CONTENT[:10]
    forget_clients()
    assert RemoteFile(URL).read(0, 10) == CONTENT[::-1][:10]
    with pytest.raises(tc.FormatError, match="changed"):
        file.read(0, 10)


def test_faults(hub: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.script(PATH, {"drop_after": 5}, {"drop_body_after": 5}, {"status": 503})
    assert RemoteFile(URL).read(3, 90) == CONTENT[3:90]
    for status in (401, 403, 416):
        hub.script(PATH, {"status": status, "times": -1})
        error = refused(tc.RemoteError, RemoteFile(URL, len(CONTENT)).read, 3, 90)
        assert (error.status, error.begin, error.end, error.url) == (status, 3, 90, URL)
    assert "hunter2" not in f"{client_for(URL)!r}"
    forget_clients()
    hub.script("api/datasets/org/name", {"status": 500}, {"status": 403, "times": -1})
    assert refused(tc.RemoteError, stat, URL).status == 403
    hub.script("api/datasets/org/name")
    for url in (f"{FOLDER}/none", f"{FOLDER}/folder", "hf://datasets/org/other/a"):
        with pytest.raises(tc.MissingShardError):
            RemoteFile(url).ask()
    for url in ("hf://datasets", "hf://", "hf://datasets/org"):
        refused((tc.RemoteError, FileNotFoundError), stat, url)
