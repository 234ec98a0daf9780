"""Servers that respond with whole objects to requests for ranges: now and then, from some time on, or always."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import write
from tests.remote.servers.http_server import HttpServer

SHARDS = ["000000.tar", "000001.tar", "000002.tar"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 4 MB, with two samples each: a tensor of 16 bytes and one of 2 MB."""
    path = tmp_path_factory.mktemp("shards")
    tensors = [(torch.full((4,), i), torch.full((2_000_000,), i, dtype=torch.uint8)) for i in range(6)]
    write(path / "%06d.tar", [{"small": small, "large": large} for small, large in tensors], max_samples=2)
    return path


@pytest.fixture
def server(http_server: HttpServer, folder: Path) -> HttpServer:
    http_server.set(folder=folder)
    return http_server


def read_small(cache: tc.TensorCache) -> None:
    for i in (0, 2, 4):
        assert cache[i]["small"].load().tolist() == [i] * 4


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("shard", SHARDS)
def test_one_response_with_the_whole_object(
    server: HttpServer, caplog: pytest.LogCaptureFixture, shard: str, position: int
) -> None:
    """As of a proxy that fetches the object for the first time: the request is repeated, and the next ones ask for ranges."""
    obeyed = [{"headers": {}}] * position
    server.script(shard, *obeyed, {"ignores_range": True})
    with tc.open(server.url) as cache:
        read_small(cache)
        read_small(cache)
    requests = [request for request in server.log() if request.path.endswith(".tar")]
    assert {request.method for request in requests} == {"GET"}
    assert [request.path for request in requests if request.status == 200] == [f"/{shard}"]
    assert sum(request.nbytes for request in requests if request.status == 206) < 60_000
    (warning,) = warnings_of(caplog)
    assert f"{shard}" in warning
    assert "the whole object instead of the range" in warning


def test_many_such_responses_at_once(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    server.script_all({shard: [{"ignores_range": True, "times": 2}] for shard in SHARDS})
    with tc.open(server.url) as cache:
        assert cache.select("small").read_batch([0, 2, 4])["small"][:, 0].tolist() == [0, 2, 4]
        read_small(cache)
    assert sum(request.nbytes for request in server.log() if request.status == 206) < 60_000
    assert len(warnings_of(caplog)) == 1


def test_ranges_that_end_and_return(server: HttpServer, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that ignores three requests in a row is no longer asked again, until it obeys one."""
    cache = tc.open(server.url)
    assert cache[0]["small"].load().tolist() == [0] * 4
    server.log()
    server.set(ranges=False)
    read_small(cache)
    read_small(cache)
    assert Counter(request.path for request in server.log()) == {
        f"/{SHARDS[0]}": 3,
        f"/{SHARDS[1]}": 1,
        f"/{SHARDS[2]}": 1,
    }
    assert len(warnings_of(caplog)) == 1
    server.set(ranges=True)
    for name in SHARDS:
        server.put(f"again/{name}", (folder / name).read_bytes())
    read_small(tc.open(f"{server.url}/again/{{000000..000002}}.tar"))
    assert {request.status for request in server.log()} == {206}


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_server_without_ranges(
    server: HttpServer, folder: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each shard is fetched once, also if its first requests are many at a time, with an index on disk; one warning."""
    server.set(ranges=False, etag=None)  # as Python's `http.server`
    source = server.url if kind == "folder" else f"{server.url}/{{000000..000002}}.tar"

    def work() -> None:
        with tc.open(source, keep_indexes=tmp_path / "kept") as cache:
            read_small(cache)
            batch = cache.read_batch(range(6))
            assert batch["large"][:, -1].tolist() == list(range(6))
            assert cache.read_batch([5, 0])["small"][:, 0].tolist() == [5, 0]
        (warning,) = warnings_of(caplog)
        assert "each shard is fetched whole into TMPDIR on its first use" in warning

    for _ in range(2):  # the second process finds the indexes that the first one has kept
        assert run_in_child(work) == 0
        sent = [(request.path, request.nbytes) for request in server.log() if request.path.endswith(".tar")]
        assert sorted(sent) == [(f"/{shard}", (folder / shard).stat().st_size) for shard in SHARDS]


def test_a_replaced_shard_of_a_server_without_ranges_and_tags(server: HttpServer, tmp_path: Path) -> None:
    """Nothing but the shard itself shows that it has changed, so each `open` fetches it again."""
    server.set(ranges=False, etag=None, last_modified=False)
    for value in (1, 2):
        write(tmp_path / f"{value}.tar", [{"x": torch.full((4,), value)}])
        server.put("replaced.tar", (tmp_path / f"{value}.tar").read_bytes())
        with tc.open(f"{server.url}/replaced.tar") as cache:
            assert cache[0]["x"].load().tolist() == [value] * 4
            assert cache.read_batch([0])["x"].tolist() == [[value] * 4]
        assert len(server.log()) == 1


@pytest.mark.parametrize(("etag", "is_dated"), [("strong", True), (None, True), (None, False)])
def test_a_replaced_shard_whose_index_is_in_a_folder(
    server: HttpServer, tmp_path: Path, etag: str | None, is_dated: bool
) -> None:
    """The server is asked for the shard's state before a copy from an earlier `open` is read, although the index is here."""
    path, indexes = tmp_path / "replaced.tar", tmp_path / "indexes"
    indexes.mkdir()
    for value in (1, 2):
        write(path, [{"x": torch.full((4,), value)}], footer=False, overwrite=True)
        tc.write_index(path)
        (tmp_path / "replaced.tar.index").replace(indexes / "replaced.tar.index")
        server.set(ranges=False, etag=etag, last_modified=is_dated and 10**9 + value)
        server.put("replaced.tar", path.read_bytes())
        with tc.open(f"{server.url}/replaced.tar", index_folder=indexes) as cache:
            assert cache[0]["x"].load().tolist() == [value] * 4
            assert cache.read_batch([0])["x"].tolist() == [[value] * 4]
