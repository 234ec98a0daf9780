"""Objects of an S3 server, through obstore: right bytes or a clear error, and forked processes, which are refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.caches import small, write_cache
from tests.remote.reads import KINDS, PASS, outcomes, refused, write_shard
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import SECRET, WriteServer, environment
from tests.same import assert_same

RANGE = KINDS["range"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return write_shard(tmp_path / "c")


def test_long_objects(write_server: WriteServer, tmp_path: Path) -> None:
    """Of a tensor in several requests, and of a manifest that is longer than the first request for it."""
    with tc.ShardWriter(tmp_path / "a.tar", fsync=False) as sink:
        sink.write("0", {"x": torch.arange(1_200_000)})
    write_server.put("cache/a.tar", (tmp_path / "a.tar").read_bytes())
    write_server.put("cache/manifest.json", (tmp_path / "manifest.json").read_bytes() + b" " * (5 << 20))
    with tc.open("s3://bucket/cache") as cache:
        assert torch.equal(cache[0]["x"].load(), torch.arange(1_200_000))


def test_listing(write_server: WriteServer, files: dict[str, bytes]) -> None:
    for name in ("b.tar", "a.tar", "c d#?%.tar", "sub/x.tar"):
        write_server.put(f"cache/{name}", files["a.tar"])
    write_server.put("cached.tar", files["a.tar"])
    for url, count in (("s3://bucket/cache/", 3), ("s3://bucket/cache", 3), ("s3://bucket", 1)):
        with tc.open(url) as cache:
            assert (len(cache), cache.num_shards) == (count, count)
    write_server.put("cache/none.tar", b"")
    with pytest.raises(tc.TarFormatError, match="none.tar: .*the file is empty"):
        tc.open("s3://bucket/cache/none.tar")


def test_changed_and_missing_objects(write_server: WriteServer, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        write_server.put(f"cache/{name}", content)
    with tc.open("s3://bucket/cache") as cache:
        lazy = cache[0]["x"]
        write_server.put("cache/a.tar", files["a.tar"][::-1])
        for read in (lazy.load, lambda: cache[0]):
            with pytest.raises(tc.FormatError, match="changed"):
                read()
        write_server.delete("cache/a.tar")
        for read in (lazy.load, lambda: cache[0], lambda: tc.open("s3://no-bucket/a.tar")):
            with pytest.raises(tc.MissingShardError):
                read()


@pytest.mark.parametrize("use", [tc.open, tc.ShardWriter, tc.ResumablePipeline])
@pytest.mark.parametrize("path", ["a.tar", "c", "c/*.tar"])
def test_a_missing_bucket(write_server: WriteServer, use: Any, path: str) -> None:
    url = f"s3://no-bucket/{'%06d.tar' if use is tc.ShardWriter else path}"
    message = (
        "no such object, or no bucket 'no-bucket'; check both names, and the endpoint, region or account"
        if (use, path) == (tc.ResumablePipeline, "a.tar")
        else "no bucket or container 'no-bucket'; "
    )
    with pytest.raises(FileNotFoundError, match=message):
        next(iter(use(url)))


@pytest.mark.parametrize("url", ["s3://bucket/../a.tar", "s3://bucket/a//b.tar"])
def test_impossible_urls(write_server: WriteServer, url: str) -> None:
    refused(tc.RemoteError, tc.open, url)
    refused(tc.RemoteError, lambda: list(tc.tarfile_to_samples()([{"url": "s3://bucket"}])))


@pytest.mark.parametrize("call", [tc.open, tc.ShardWriter, tc.write_index])
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
def store(http_server: HttpServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A web server that answers reads as an S3 server does, and fails as it is told."""
    for name, value in environment(http_server.url).items():
        monkeypatch.setenv(name, value)
    for name, content in files.items():
        http_server.put(f"b{http_server.port}/c/{name}", content)
    return http_server


@pytest.fixture
def url(store: HttpServer) -> str:
    """The url of a cache, in a bucket of this test alone."""
    return f"s3://b{store.port}/c"


@pytest.fixture
def short(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 1 s."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.long
def test_a_connection_that_drops_at_every_byte(
    store: HttpServer, url: str, files: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    kind, folder = KINDS[name], f"b{store.port}"
    expected = kind.read(str(tmp_path / "c"))
    for at in range(420):
        for file, content in files.items():
            store.put(f"{folder}/{at}/{file}", content)
    store.script_all(
        {f"{folder}/{at}/{kind.file}": [*[PASS] * kind.num_before, {"drop_after": at}] for at in range(420)}
    )
    store.log()
    assert outcomes([lambda at=at: kind.read(f"s3://{folder}/{at}") for at in range(420)]) == [expected] * 420
    assert sum(one.path.endswith(kind.file) for one in store.log()) > 420 * (kind.num_before + 1) + 100


def test_endpoints_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    cases = [(name, "localhost:9000", f"{name} is not a url") for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL")]
    for name, value, message in [*cases, ("AWS_ALLOW_HTTP", "", "AWS_ALLOW_HTTP=true")]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            for call in (tc.open, tc.ShardWriter):
                with pytest.raises(tc.RemoteError, match=f"s3://unused.*: {message}|{message}"):
                    call("s3://unused/cache")  # type: ignore[operator]


def test_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    error = refused(tc.RemoteError, tc.open, "az://container/a.tar")
    assert "cannot be opened" in str(error)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(error)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_statuses_that_pass(store: HttpServer, url: str, status: int) -> None:
    for kind in KINDS.values():
        faults = [{"status": status}, {"status": status, "retry_after": "0"}]
        store.script(f"b{store.port}/c/{kind.file}", *[PASS] * kind.num_before, *faults)
        assert kind.read(url)


@pytest.mark.parametrize("status", [400, 401, 403, 416, 500, 404])
def test_statuses_that_stay(store: HttpServer, short: None, url: str, status: int) -> None:
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        store.script(f"b{store.port}/c/a.tar", {"status": status, "times": -1})
        error = refused(FileNotFoundError if status == 404 else tc.RemoteError, lazy.load)
        assert SECRET not in str(error)
        if status != 404:
            assert (error.status, error.url, error.end - error.begin) == (status, f"{url}/a.tar", 130)


def test_a_store_that_is_not_there(store: HttpServer, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        error = refused(tc.RemoteError, tc.open, f"s3://b{store.port}/c/a.tar")
    assert error.url == f"s3://b{store.port}/c/a.tar"
    assert "check AWS_ENDPOINT" in str(error)
    assert "~/.aws/credentials are not read" in str(error)
    assert SECRET not in str(error)


def test_wrong_answers(store: HttpServer, short: None, url: str, files: dict[str, bytes]) -> None:
    path, total = f"b{store.port}/c/a.tar", len(files["a.tar"])
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        last = str(store.log()[-1].range).partition("-")[2]
        for shown in (f"bytes 1-{last}/{total}", f"bytes 0-9/{total + 1}", f"bytes 0-{total - 1}/{total}", "", None):
            store.script(path, {"content_range": shown, "times": -1})
            refused((tc.RemoteError, tc.FormatError), lazy.load)
        store.script(path, {"drip_s": 0.2, "times": -1})
        refused(tc.RemoteError, lazy.load)
        store.script(path, {"drop_body_after": 50}, {"replace": files["a.tar"][::-1].decode("latin-1")})
        assert "changed" in str(refused(tc.FormatError, lazy.load))


def test_stores_that_ignore_ranges(store: HttpServer, tmp_path: Path) -> None:
    """All of them, or those of the end, as s3rver does, whose answer obstore takes for a lost connection."""
    with tc.ShardWriter(tmp_path / "a-%d.tar", manifest=False) as sink:
        for i in range(6):
            sink.write(f"{i}", {"x": torch.full((100_000,), i)})  # longer than what is read of the end
    for bucket in (f"b{store.port}", f"n{store.port}"):
        for name in "ab":
            store.put(f"{bucket}/{name}.tar", (tmp_path / "a-0.tar").read_bytes())
    store.set(suffix_ranges="first")
    url = f"s3://b{store.port}"
    assert [sample["x"][7].item() for sample in tc.open(f"{url}/a.tar")] == list(range(6))
    store.log()
    assert len(tc.open(f"{url}/b.tar")) == 6
    assert [request.range for request in store.log() if (request.range or "").startswith("bytes=-")] == []
    store.set(ranges=False)
    with pytest.raises(tc.RemoteError, match=r"s3://n\d+/a\.tar: .*with other bytes; copy the cache") as caught:
        tc.open(f"s3://n{store.port}/a.tar")[0]
    assert caught.value.status == 200
