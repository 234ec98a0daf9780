"""Objects of an S3 server, through obstore: right bytes or a clear error, and forked processes, which are refused."""

from __future__ import annotations

import math
import random
import socket
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.caches import small, write_cache
from tests.remote.reads import outcomes, read, reads_of, refused
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import SECRET, WriteServer, environment
from tests.same import assert_same
from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import fetch_many, list_objects, stat
from wds_tensorcache.storage.remote.object_info import ObjectInfo
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole
from wds_tensorcache.storage.urls import join_url, name_of

CONTENT = random.Random(5).randbytes(300_000)
SHORT = CONTENT[:150]
READS = reads_of(SHORT)


@pytest.mark.parametrize("name", ["a.tar", "odd name #1?%41%.tar", "deep/er/ü.tar"])
def test_reads(write_server: WriteServer, name: str) -> None:
    url = write_server.put(f"cache/{name}", CONTENT)
    assert url == join_url("s3://bucket/cache/", name)
    assert name_of(url) == name.rpartition("/")[2]
    state = stat(url)
    assert state.nbytes == len(CONTENT)
    for nbytes in (1000, 1_000_000):
        assert RemoteFile(url).read_tail(nbytes) == CONTENT[-nbytes:]
    assert read_whole(url, len(CONTENT)) == CONTENT
    assert "more than" in str(refused(tc.RemoteError, read_whole, url, len(CONTENT) - 1))
    file = RemoteFile(url, len(CONTENT))
    buffers = [[memoryview(bytearray(nbytes)) for nbytes in (100, 0, 3000)] for _ in range(10)]
    fetch_many([(file, 29_000 * i, buffers[i]) for i in range(10)])
    for i in range(10):
        assert b"".join(buffers[i]) == CONTENT[29_000 * i : 29_000 * i + 3100]
    assert file.state == state


def test_empty_and_long_objects(write_server: WriteServer) -> None:
    for content in (b"", random.Random(6).randbytes(9_000_001)):
        url = write_server.put(f"{len(content)}", content)
        assert RemoteFile(url).read_tail(10) == content[-10:]
        assert read_whole(url, 10_000_000) == content
        assert RemoteFile(url).read(0, len(content)) == content


def test_listing(write_server: WriteServer) -> None:
    names = ["b.tar", "a.tar", "c d#?%.tar", "sub/x.tar"]
    for name in names:
        write_server.put(f"cache/{name}", name.encode())
    write_server.put("cached", b"x")
    assert list_objects("s3://bucket/cache/") == [f"s3://bucket/cache/{name}" for name in sorted(names[:3])]
    assert list_objects("s3://bucket/none") == []
    assert list_objects("s3://bucket") == ["s3://bucket/cached"]


def test_changed_and_missing_objects(write_server: WriteServer) -> None:
    url = write_server.put("a.tar", CONTENT)
    file = RemoteFile(url)
    file.ask()
    write_server.put("a.tar", CONTENT[::-1])
    for other in (file, RemoteFile(url, len(CONTENT) + 1)):
        with pytest.raises(tc.FormatError, match="changed"):
            other.read(0, 10)
    write_server.delete("a.tar")
    for other in (file, RemoteFile("s3://bucket/none"), RemoteFile("s3://no-bucket/none")):
        with pytest.raises(tc.MissingShardError):
            other.read(0, 10)


@pytest.mark.parametrize("url", ["s3://bucket/../a", "s3://bucket/a//b", "s3://bucket"])
def test_impossible_urls(write_server: WriteServer, url: str) -> None:
    refused(tc.RemoteError, stat, url)


@pytest.mark.parametrize("call", [tc.open, tc.ShardWriter, RemoteFile, tc.write_index])
def test_credentials_in_urls_are_refused(write_server: WriteServer, call: object) -> None:
    """Never opened without them in silence."""
    for scheme in ("s3", "gs", "az"):
        with pytest.raises(ValueError, match="credentials in the url are not read; set the variables") as caught:
            call(f"{scheme}://me:{SECRET}@bucket/a.tar")  # type: ignore[operator]
        assert SECRET not in str(caught.value)


# --- forked processes


@pytest.mark.usefixtures("new_forkserver")
def test_forked_processes_are_refused_with_the_remedy(write_server: WriteServer, tmp_path: Path) -> None:
    for path in write_cache(tmp_path / "cache", [small(i) for i in range(12)]).iterdir():
        write_server.put(f"cache/{path.name}", path.read_bytes())
    cache = tc.open("s3://bucket/cache")
    assert_same(small(3), cache[3])

    def work() -> None:
        for read_it in (lambda: cache[4], lambda: tc.open("s3://bucket/cache")):
            with pytest.raises(tc.RemoteError, match=r"forked.*forkserver.*tc\.torch_loader"):
                read_it()

    assert run_in_child(work, 60) == 0
    with pytest.raises(tc.RemoteError, match=r"multiprocessing_context='forkserver'"):
        list(DataLoader(cache, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    expected = [batch["latent"] for batch in tc.torch_loader(cache.select("latent"), 4)]
    loader = tc.torch_loader(cache.select("latent"), 4, num_workers=1)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert all(map(torch.equal, expected, [batch["latent"] for batch in loader]))


# --- stores that fail


@pytest.fixture
def store(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A web server that answers reads as an S3 server does, and fails as it is told."""
    for name, value in environment(http_server.url).items():
        monkeypatch.setenv(name, value)
    forget_clients()
    return http_server


@pytest.fixture
def short(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 1 s."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")
    forget_clients()


@pytest.mark.parametrize("how", READS)
def test_a_connection_that_drops_at_every_byte(store: HttpServer, how: str) -> None:
    call, expected = READS[how]
    replace = {"replace": SHORT.decode("latin-1")}
    store.script_all({f"bucket/{at}": [{**replace, "drop_after": at}] for at in range(420)})
    assert outcomes([lambda at=at: call(f"s3://bucket/{at}") for at in range(420)]) == [expected] * 420
    assert len(store.log()) > 420 + 100


def test_endpoints_that_cannot_work(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(name, "localhost:9000", f"{name} is not a url") for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL")]
    for name, value, message in [*cases, ("AWS_ALLOW_HTTP", "", "AWS_ALLOW_HTTP=true")]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            forget_clients()
            for call in (tc.open, tc.ShardWriter):
                with pytest.raises(tc.RemoteError, match=f"s3://bucket.*: {message}|{message}"):
                    call("s3://bucket/cache")  # type: ignore[operator]


def test_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    error = refused(tc.RemoteError, stat, "az://container/a")
    assert "cannot be opened" in str(error)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(error)


def test_statuses_that_pass(store: HttpServer) -> None:
    store.put("bucket/a", SHORT)
    for status in (429, 500, 502, 503, 504):
        for call, expected in READS.values():
            store.script("bucket/a", {"status": status}, {"status": status, "retry_after": "0"})
            assert call("s3://bucket/a") == expected


@pytest.mark.parametrize("status", [400, 401, 403, 416, 500, 404])
def test_statuses_that_stay(store: HttpServer, short: None, status: int) -> None:
    store.put("bucket/a", SHORT)
    store.script("bucket/a", {"status": status, "times": -1})
    if status == 404:
        refused(FileNotFoundError, read, "s3://bucket/a")
        return
    error = refused(tc.RemoteError, read, "s3://bucket/a")
    assert (error.status, error.url, error.begin, error.end) == (status, "s3://bucket/a", 10, 140)
    assert SECRET not in str(error)


def test_a_store_that_is_not_there(
    store: HttpServer, short: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so while requests are repeated."""
    monkeypatch.setattr(retry, "_LATE_S", 0.1)
    monkeypatch.setattr(retry, "_warned_s", -math.inf)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        error = refused(tc.RemoteError, read, "s3://bucket/a")
    assert (error.url, error.begin, error.end) == ("s3://bucket/a", 10, 140)
    assert "check AWS_ENDPOINT" in str(error)
    assert "~/.aws/credentials are not read" in str(error)
    assert "trying again for up to" in caplog.messages[-1]
    assert SECRET not in repr(client_for("s3://bucket")) + str(error) + caplog.text


def test_wrong_answers(store: HttpServer, short: None) -> None:
    store.put("bucket/a", SHORT)
    for shown in ("bytes 11-140/150", "bytes 10-139/151", "bytes 0-149/150", "", None):
        store.script("bucket/a", {"content_range": shown, "times": -1})
        refused((tc.RemoteError, tc.FormatError), read, "s3://bucket/a")
    store.script("bucket/a", {"drip_s": 0.2, "times": -1})
    refused(tc.RemoteError, read, "s3://bucket/a")
    store.script("bucket/a", {"drop_body_after": 50}, {"replace": SHORT[::-1].decode("latin-1")})
    state = ObjectInfo(150, stat("s3://bucket/a").tag)
    store.script("bucket/a", {"drop_body_after": 50}, {"replace": SHORT[::-1].decode("latin-1")})
    assert "changed" in str(refused(tc.FormatError, read, "s3://bucket/a", 10, 140, state))


def test_stores_that_ignore_ranges(store: HttpServer, tmp_path: Path) -> None:
    """All of them, or those of the end, as s3rver does, whose answer obstore takes for a lost connection."""
    with tc.ShardWriter(tmp_path / "a-%d.tar", manifest=False) as sink:
        for i in range(6):
            sink.write(f"{i}", {"x": torch.full((100_000,), i)})  # longer than what is read of the end
    for name in "ab":
        store.put(f"bucket/{name}.tar", (tmp_path / "a-0.tar").read_bytes())
    store.set(suffix_ranges="first")
    assert [sample["x"][7].item() for sample in tc.open("s3://bucket/a.tar")] == list(range(6))
    store.log()
    assert len(tc.open("s3://bucket/b.tar")) == 6
    assert [request.range for request in store.log() if (request.range or "").startswith("bytes=-")] == []
    store.set(ranges=False)
    forget_clients()
    with pytest.raises(tc.RemoteError, match=r"s3://bucket/a\.tar: .*with other bytes; copy the cache") as caught:
        tc.open("s3://bucket/a.tar")[0]
    assert caught.value.status == 200
