"""Files of a hub, through fsspec and huggingface_hub, against a web server that answers as a hub does."""

from __future__ import annotations

import json
import random

import pytest

import wds_tensorcache as tc
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile

pytest.importorskip("huggingface_hub")
CONTENT = random.Random(8).randbytes(100_000)
FOLDER = "hf://datasets/org/name/cache"
URL = f"{FOLDER}/a b.tar"


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
    client = client_for(URL)
    state = ObjectInfo(len(CONTENT), "1" * 40)
    assert client.stat(URL) == state
    assert client.read_tail(URL, 1000) == (state, CONTENT[-1000:])
    assert client.read_whole(URL, len(CONTENT)) == (state, CONTENT)
    assert list(client.list_objects(FOLDER)) == [(URL, state), (f"{FOLDER}/large", ObjectInfo(5, "f" * 64))]
    file = RemoteFile(URL, len(CONTENT))
    buffers = [memoryview(bytearray(10)) for _ in range(9)]
    fetch_many([(file, 10_000 * i, [buffers[i]]) for i in range(9)])
    assert [bytes(buffer) for buffer in buffers] == [CONTENT[10_000 * i : 10_000 * i + 10] for i in range(9)]
    with pytest.raises(tc.RemoteError, match="more than"):
        client.read_whole(URL, 1000)


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


@pytest.mark.long
def test_faults(hub: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"datasets/org/name/resolve/{'1' * 40}/cache/a b.tar"
    hub.script(path, {"drop_after": 5}, {"drop_body_after": 5}, {"status": 503})
    assert RemoteFile(URL).read(3, 90) == CONTENT[3:90]
    for status in (401, 403, 416):
        hub.script(path, {"status": status, "times": -1})
        with pytest.raises(tc.RemoteError) as caught:
            RemoteFile(URL).read(3, 90)
        assert (caught.value.status, caught.value.begin, caught.value.end, caught.value.url) == (status, 3, 90, URL)
        assert "hunter2" not in f"{caught.value}{caught.value.__context__}{client_for(URL)!r}"
    for url in (f"{FOLDER}/none", f"{FOLDER}/folder", "hf://datasets/org/other/a"):
        with pytest.raises(FileNotFoundError):
            RemoteFile(url).ask()
    for url in ("hf://datasets", "hf://", "hf://datasets/org"):
        with pytest.raises((tc.RemoteError, FileNotFoundError)):
            RemoteFile(url).ask()
