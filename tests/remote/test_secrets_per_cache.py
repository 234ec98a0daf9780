"""Queries, user names and passwords belong to the cache that was opened with them: two revisions and two users at once."""

from __future__ import annotations

import base64
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.remote.servers.http_server import HttpServer

COUNT = 6
NAMES = ["manifest.json", "000.tar", "001.tar", "002.tar"]
MODES = {
    "etag": {},
    "equal etags": {"etag": "length"},
    "date": {"etag": None, "last_modified": 1_700_000_000},
    "neither": {"etag": None, "last_modified": False},
}


def key(revision: int, i: int) -> str:
    return f"{'xyz'[revision] if i % 2 else 'k'}{i}"


def value(revision: int, i: int) -> int:
    return 1000 * revision + i


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Files of the revisions 0 to 2: equal names, lengths and shapes; other values, and every second key is another."""
    found = []
    for revision in range(3):
        folder = tmp_path_factory.mktemp("revision")
        numbers = {key(revision, i): value(revision, i) for i in range(COUNT)}
        samples = {name: {"v": torch.full((500,), number), "i": number + 10_000} for name, number in numbers.items()}
        write(folder, samples, max_samples=2)
        found.append({name: (folder / name).read_bytes() for name in NAMES})
    assert len({tuple(map(len, each.values())) for each in found}) == 1
    return found


@pytest.fixture(scope="module", params=MODES)
def server_of_all(
    request: pytest.FixtureRequest, module_server: HttpServer, contents: list[dict[str, bytes]]
) -> HttpServer:
    """A server of three revisions: without a query, it sends revision 0."""
    module_server.reset()
    module_server.set(**MODES[request.param])
    for revision, files in enumerate(contents):
        for name, content in files.items():
            module_server.put(f"cache/{name}" + (f"?rev={revision}" if revision else ""), content)
    return module_server


@pytest.fixture
def server(server_of_all: HttpServer) -> HttpServer:
    server_of_all.log()
    return server_of_all


def source(server: HttpServer, revision: int, kind: str) -> Any:
    folder = f"{server.url}/cache"
    query = f"?rev={revision}"
    if kind == "shards":
        return [f"{folder}/{name}{query}" for name in NAMES[1:]]
    return f"{folder}{query}" if kind == "folder" else f"{folder}/{kind}{query}"


def check(cache: Any, revision: int, i: int) -> None:
    assert cache[i]["v"].load().tolist() == [value(revision, i)] * 500
    assert cache.keys()[i] == key(revision, i)
    assert cache[i]["i"] == value(revision, i) + 10_000


def check_queries(server: HttpServer) -> None:
    requests = server.log()
    assert requests
    assert all(request.path.endswith(("?rev=1", "?rev=2")) for request in requests), requests


@pytest.mark.parametrize(
    ("kind", "is_used"),
    [("folder", False), ("folder", True), ("manifest.json", True), ("shards", False), ("{000..002}.tar", True)],
)
def test_two_revisions(server: HttpServer, kind: str, is_used: bool) -> None:
    with tc.open(source(server, 2, kind)) as first:
        if is_used:
            check(first, 2, 3)
        with tc.open(source(server, 1, kind)) as second:
            for i in range(COUNT):
                check(first, 2, i)
                check(second, 1, i)
            for cache, revision in ((first, 2), (second, 1)):
                batch = cache.read_batch(range(COUNT))
                assert batch["v"][:, 0].tolist() == [value(revision, i) for i in range(COUNT)]
    check_queries(server)


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_two_revisions_in_one_cache(server: HttpServer, kind: str) -> None:
    both = [source(server, 1, kind), source(server, 2, kind)]
    with tc.open(both) as cache:
        expected = [value(revision, i) for revision in (1, 2) for i in range(COUNT)]
        assert cache.read_batch(range(2 * COUNT))["v"][:, 0].tolist() == expected
        assert [int(cache[i]["v"].load()[0]) for i in range(2 * COUNT)] == expected
    check_queries(server)


@pytest.mark.filterwarnings("ignore:reading without the cache")
@pytest.mark.parametrize("query", ["rev={}", "signature={}"])  # caches on disk ignore names of signatures
def test_indexes_and_blocks_on_disk(server: HttpServer, tmp_path: Path, query: str) -> None:
    """Revisions share the folders on disk, and nothing in them."""
    options: dict[str, Any] = {"keep_indexes": tmp_path / "kept", "cache_dir": tmp_path / "blocks"}
    for revision in (1, 2, 1, 2):
        with tc.open(source(server, revision, "folder"), **options) as cache:
            for i in range(COUNT):
                check(cache, revision, i)
            assert cache.read_batch(range(COUNT))["v"][:, 0].tolist() == [value(revision, i) for i in range(COUNT)]
    check_queries(server)
    for path in tmp_path.rglob("*"):
        assert "rev=" not in path.name
        assert path.is_dir() or b"rev=" not in path.read_bytes()


# spawned workers differ by the cache's pickle, which has its tags and query
@pytest.mark.parametrize(
    ("server_of_all", "method"),
    [*((mode, "fork") for mode in MODES), ("equal etags", "spawn"), ("neither", "spawn")],
    indirect=["server_of_all"],
)
@pytest.mark.long
def test_worker_processes(server: HttpServer, method: str) -> None:
    """Workers read both revisions, and lazy tensors that they return are read here."""
    with tc.open(source(server, 1, "folder")) as first, tc.open(source(server, 2, "folder")) as second:
        loaders = [
            iter(DataLoader(cache, batch_size=None, num_workers=1, multiprocessing_context=method))  # type: ignore[arg-type]
            for cache in (first, second)
        ]
        for i in range(COUNT):
            for revision, loader in enumerate(loaders, 1):
                sample = next(loader)
                assert sample["i"] == value(revision, i) + 10_000
                assert sample["v"].load().tolist() == [value(revision, i)] * 500
    check_queries(server)


def test_copies_and_pickles(server: HttpServer) -> None:
    """A copy has the query. A pickle may become a file, so it has none, and never reads another revision instead."""
    with tc.open(source(server, 1, "folder")) as cache:
        check(copy.deepcopy(cache), 1, 3)
        lazy = cache[0]["v"]
        shown = f"{cache!r}{lazy!r}{cache.describe()}{pickle.dumps(cache)!r}{pickle.dumps(lazy)!r}"
        assert "rev=" not in shown
        with pytest.raises(tc.RemoteError, match=r"000\.tar: a pickle left out the query of this url"):
            pickle.loads(pickle.dumps(lazy)).load()
        with pytest.raises(tc.RemoteError, match="open the whole url in this process"):
            pickle.loads(pickle.dumps(cache))[0]
    check_queries(server)


def test_streams(server: HttpServer) -> None:
    urls = [source(server, revision, "{000..002}.tar") for revision in (1, 2)]
    streams = [iter(tc.ResumablePipeline(url, tc.decode(lazy=False), shuffle=False)) for url in urls]
    for i in range(COUNT):
        for revision, stream in enumerate(streams, 1):
            sample = next(stream)
            assert sample["__key__"] == key(revision, i)
            assert "rev=" not in repr(sample)
    both = tc.ResumablePipeline([url.replace("{000..002}", "001") for url in urls], shuffle=False)
    assert [sample["__key__"] for sample in both] == [key(revision, i) for revision in (1, 2) for i in (2, 3)]
    check_queries(server)


# --- users


def user_of(header: str | None) -> str | None:
    return None if header is None else base64.b64decode(header.removeprefix("Basic ")).decode()


@pytest.mark.filterwarnings("ignore:reading without the cache")
def test_two_users(server: HttpServer, contents: list[dict[str, bytes]], tmp_path: Path) -> None:
    """The requests for a cache have the user of its url, those for a cache without one have none."""
    users = {"team-a": "alice:A", "team-b": "bob:B"}
    for folder in (*users, "public"):
        for name, content in contents[0].items():
            server.put(f"{folder}/{name}", content)
    options: dict[str, Any] = {"keep_indexes": tmp_path / "kept", "cache_dir": tmp_path / "blocks"}
    caches = [
        tc.open(f"{server.url.replace('://', f'://{user}@')}/{folder}", **options) for folder, user in users.items()
    ]
    caches.append(tc.open(f"{server.url}/public", **options))
    for i in range(COUNT):
        for cache in caches:
            check(cache, 0, i)
    for cache in caches:
        assert ":A" not in (shown := repr(cache) + repr(list(cache._paths())) + repr(pickle.dumps(cache)))
        assert "alice" not in shown
        cache.close()
    requests = server.log()
    assert {user_of(request.headers.get("authorization")) for request in requests} == {"alice:A", "bob:B", None}
    for request in requests:
        assert user_of(request.headers.get("authorization")) == users.get(request.path.split("/")[1])
