"""Files of a hub, through huggingface_hub, against a web server that answers as a hub does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.reads import read_cache, refused, write_shard
from tests.remote.servers.http_server import HttpServer

pytest.importorskip("huggingface_hub")
COMMITS = ["1" * 40, "2" * 40]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    return [write_shard(tmp_path_factory.mktemp("cache"), seed) for seed in range(2)]


@pytest.fixture
def hub(module_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A hub whose repositories each test publishes under a name of its own."""
    monkeypatch.setenv("HF_ENDPOINT", module_server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    module_server.log()
    return module_server


def publish(server: HttpServer, name: str, commit: str, files: dict[str, bytes]) -> str:
    """Let the main branch of a repository be a commit with a cache in a folder; return the url of the folder."""
    repository = json.dumps({"id": f"org/{name}", "sha": commit, "siblings": []}).encode()
    api = f"api/datasets/org/{name}"
    for suffix in ("", "/revision/main", f"/revision/{commit}"):
        server.put(f"{api}{suffix}", repository)
    large = {"oid": "f" * 64, "size": 5, "pointerSize": 100}
    tree = [
        {"type": "file", "oid": commit, "size": len(files["a.tar"]), "path": "a cache/a.tar", "lfs": large},
        {"type": "directory", "oid": "c" * 40, "size": 0, "path": "a cache/folder"},
    ]
    server.put(f"{api}/tree/{commit}/a cache", json.dumps(tree).encode())
    for file, content in files.items():
        server.put(f"datasets/org/{name}/resolve/{commit}/a cache/{file}", content)
    return f"hf://datasets/org/{name}/a cache"


def test_reads(hub: HttpServer, files: list[dict[str, bytes]]) -> None:
    url = publish(hub, "reads", COMMITS[0], files[0])
    for revision in ("", "@main", f"@{COMMITS[0]}"):
        for name in ("", "/manifest.json", "/a.tar", "/*.tar"):
            assert read_cache(url.replace("/a cache", f"{revision}/a cache") + name)["seed"] == 0
    requests = [request for request in hub.log() if "resolve" in request.path]
    assert {request.headers.get("authorization") for request in requests} == {"Bearer hf_hunter2"}
    assert not any("/main/" in request.path for request in requests)


def test_large_files_are_on_another_server(
    hub: HttpServer, http_server: HttpServer, files: list[dict[str, bytes]], tmp_path: Path
) -> None:
    """The token does not follow, and the tag is that of the hub: the other server has another one."""
    url = publish(hub, "large", COMMITS[0], files[0])
    redirect = http_server.put("blob", files[0]["a.tar"]) + "?S1GNATURE"
    path = f"datasets/org/large/resolve/{COMMITS[0]}/a cache/a.tar"
    hub.script(path, {"redirect": redirect, "headers": {"X-Linked-Etag": '"f00"'}, "times": -1})
    for _ in range(2):
        with tc.open(url, keep_indexes=tmp_path) as cache:
            assert cache[0]["seed"] == 0
    requests = http_server.log()
    assert [request.range for request in requests[2:]] == ["bytes=0-0", requests[1].range]  # the index was kept
    assert not any({"authorization", "if-match"} & set(request.headers) for request in requests)


def test_a_branch_that_moves(hub: HttpServer, files: list[dict[str, bytes]]) -> None:
    """One process reads one commit, and a new process the next one."""
    url = publish(hub, "moves", COMMITS[0], files[0])
    with tc.open(url) as cache:
        assert cache[0]["seed"] == 0
        publish(hub, "moves", COMMITS[1], files[1])
        assert [cache[0]["seed"], read_cache(url)["seed"]] == [0, 0]

        def work() -> None:
            assert read_cache(url)["seed"] == 1
            with pytest.raises(tc.FormatError, match="changed"):
                cache[0]

        assert run_in_child(work) == 0


def test_faults(hub: HttpServer, files: list[dict[str, bytes]]) -> None:
    url = publish(hub, "faults", COMMITS[0], files[0])
    path = f"datasets/org/faults/resolve/{COMMITS[0]}/a cache/a.tar"
    hub.script(path, {"drop_after": 5}, {"drop_body_after": 5}, {"status": 503})
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        for status in (401, 403, 416):
            hub.script(path, {"status": status, "times": -1})
            error = refused(tc.RemoteError, lazy.load)
            assert (error.status, error.end - error.begin, error.url) == (status, 130, f"{url}/a.tar")
    hub.script("api/datasets/org/denied", {"status": 500}, {"status": 403, "times": -1})
    assert refused(tc.RemoteError, tc.open, "hf://datasets/org/denied/a.tar").status == 403
    for missing in (f"{url}/none.tar", f"{url}/folder.tar", "hf://datasets/org/other/a.tar"):
        refused(tc.MissingShardError, tc.open, missing)
    for invalid in ("hf://datasets", "hf://", "hf://datasets/org"):
        refused((ValueError, tc.RemoteError, FileNotFoundError), tc.open, invalid)
