"""Caches in an S3 store, through obstore: folders, right bytes or a clear error, and forked processes, which are refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import write
from tests.remote.caches import small, write_cache
from tests.remote.reads import KINDS, PASS, outcomes, refused, write_shard
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import SECRET, WriteServer, environment
from tests.same import assert_same

SAMPLES = [small(i) for i in range(12)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return write_shard(tmp_path / "c")


def test_long_objects(write_server: WriteServer, tmp_path: Path) -> None:
    """Of a tensor in several requests, and of a manifest that is longer than the first request for it."""
    write(tmp_path / "a.tar", [{"x": torch.arange(1_200_000)}])
    write_server.put("cache/a.tar", (tmp_path / "a.tar").read_bytes())
    write_server.put("cache/manifest.json", (tmp_path / "manifest.json").read_bytes() + b" " * (5 << 20))
    with tc.open("s3://bucket/cache") as cache:
        assert torch.equal(cache[0]["x"].load(), torch.arange(1_200_000))


@pytest.fixture
def url(write_server: WriteServer, tmp_path: Path) -> str:
    folder = write_cache(tmp_path / "cache", SAMPLES)
    for path in folder.iterdir():
        write_server.put(f"a cache/{path.name}", path.read_bytes())
    return "s3://bucket/a cache"


def test_sources(url: str, write_server: WriteServer) -> None:
    shards = [f"{url}/00{i}.tar" for i in range(3)]
    for source in (url, f"{url}/", f"{url}/manifest.json", f"{url}/*.tar", f"{url}/0?[0-2].tar", shards):
        with tc.open(source) as cache:
            assert list(cache.keys()) == [f"{i:03d}" for i in range(12)]
            assert_same(SAMPLES[7], cache[7])
    write_server.delete("a cache/manifest.json")
    with tc.open(url) as cache:
        assert_same(SAMPLES, list(cache))
        assert [each["size"] for each in cache.__getitems__([3, 11])] == [(3, 2), (11, 2)]
    for source, message in (
        (f"{url}/x*.tar", r"x\*.tar matches no object"),
        ("s3://bucket/nothing", r"nothing has neither manifest.json nor any \*.tar"),
        (f"{url}/manifest.jsn", r"jsn has neither .*; a url that ends in neither .* a folder$"),
        (f"{url}/manifes.json", r"manifes.json does not exist$"),
        (f"{url}/003.tar", "a cache/003.tar: the shard does not exist"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            tc.open(source)


@pytest.mark.parametrize("name", ["a b", "a#1", "a?b", "50%", "é+&=", "[x]", "{y}"])
def test_keys(write_server: WriteServer, tmp_path: Path, name: str) -> None:
    content = (write_cache(tmp_path / "cache", SAMPLES[:2]) / "000.tar").read_bytes()
    write_server.put(f"{name}.tar", content)
    if name == "[x]":
        source = "s3://bucket/[[]x].tar"
    else:
        source = f"s3://bucket/{name}.tar".replace("{", "\\{").replace("}", "\\}").replace("?", "[?]")
    assert_same(SAMPLES[1], tc.open(source)[1])


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
        for read in (lazy.load, lambda: cache[0]):
            with pytest.raises(tc.MissingShardError):
                read()
        write_server.script({"method": "GET", "suffix": "a.tar", "status": 412})  # as Azurite answers
        with pytest.raises(tc.MissingShardError):
            lazy.load()


@pytest.mark.parametrize(
    ("use", "path"),
    [
        (tc.open, "a.tar"),
        (tc.open, "c"),
        (tc.ShardWriter, "%06d.tar"),
        (tc.ResumablePipeline, "a.tar"),
        (tc.ResumablePipeline, "c/*.tar"),
    ],
)
def test_a_missing_bucket(write_server: WriteServer, use: Any, path: str) -> None:
    message = (
        "no such object, or no bucket 'no-bucket'; check both names, and the endpoint, region or account"
        if (use, path) == (tc.ResumablePipeline, "a.tar")
        else "no bucket or container 'no-bucket'; "
    )
    with pytest.raises(FileNotFoundError, match=message):
        next(iter(use(f"s3://no-bucket/{path}")))


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


@pytest.mark.long
@pytest.mark.usefixtures("new_forkserver")
def test_forked_processes_are_refused_and_the_remedy_works(url: str) -> None:
    cache = tc.open(url)
    assert_same(SAMPLES[3], cache[3])

    def work() -> None:
        for read_it in (lambda: cache[4], lambda: tc.open(url)):
            with pytest.raises(tc.RemoteError, match=r"forked.*forkserver.*tc\.torch_loader"):
                read_it()

    assert run_in_child(work, 60) == 0
    with pytest.raises(tc.RemoteError, match=r"multiprocessing_context='forkserver'"):
        list(DataLoader(cache, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    expected = [batch["latent"] for batch in tc.torch_loader(cache.select("latent"), 4)]
    loader = tc.torch_loader(cache.select("latent"), 4, num_workers=1)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert all(map(torch.equal, expected, [batch["latent"] for batch in loader]))
    stream = tc.ResumablePipeline(f"{url}/", tc.decode(lazy=False))
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver", "collate_fn": dict}
    workers = DataLoader(stream, batch_size=None, **options)
    samples = {int(sample["__key__"]): sample["tensorcache"] for sample in workers}
    assert len(samples) == 12
    assert_same(SAMPLES[3], samples[3])


# --- stores that fail


@pytest.fixture
def store(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A web server that answers reads as an S3 server does, and fails as it is told."""
    for name, value in environment(http_server.url).items():
        monkeypatch.setenv(name, value)
    return http_server


@pytest.fixture
def bucket(store: HttpServer) -> str:
    """The name of a bucket of this test alone: the client of a bucket keeps the server's address."""
    return "b" + store.host.replace(".", "-")


@pytest.fixture
def publish(store: HttpServer, bucket: str, files: dict[str, bytes]) -> Callable[[object], str]:
    """Put a cache into a folder of the bucket; return its url."""

    def publish(folder: object) -> str:
        for name, content in files.items():
            store.put(f"{bucket}/{folder}/{name}", content)
        return f"s3://{bucket}/{folder}"

    return publish


@pytest.fixture
def short(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 1 s."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.long
def test_a_connection_that_drops_at_every_byte(
    store: HttpServer, bucket: str, publish: Callable[[object], str], tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    expected = kind.read(str(tmp_path / "c"))
    urls = [publish(at) for at in range(420)]
    store.script_all(
        {f"{bucket}/{at}/{kind.file}": [*[PASS] * kind.num_before, {"drop_after": at}] for at in range(420)}
    )
    store.log()
    assert outcomes([lambda url=url: kind.read(url) for url in urls]) == [expected] * 420
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


def test_statuses_that_pass(
    store: HttpServer, bucket: str, publish: Callable[[object], str], tmp_path: Path, files: dict[str, bytes]
) -> None:
    cases = [(name, status) for name in KINDS for status in (429, 500, 502, 503, 504)]
    for name, status in cases:
        publish(f"{name}{status}")
        faults = [{"status": status}, {"status": status, "retry_after": "0"}]
        store.script(f"{bucket}/{name}{status}/{KINDS[name].file}", *[PASS] * KINDS[name].num_before, *faults)
    expected = [KINDS[name].read(str(tmp_path / "c")) for name, _ in cases]
    reads = [
        lambda name=name, status=status: KINDS[name].read(f"s3://{bucket}/{name}{status}") for name, status in cases
    ]
    assert outcomes(reads) == expected


def test_statuses_that_stay(store: HttpServer, short: None, bucket: str, publish: Callable[[object], str]) -> None:
    with tc.open(publish("c")) as cache:
        lazy = cache[0]["x"]
        for status in (400, 401, 403, 416, 500, 404):
            store.script(f"{bucket}/c/a.tar", {"status": status, "times": -1})
            error = refused(FileNotFoundError if status == 404 else tc.RemoteError, lazy.load)
            if status != 404:
                assert (error.status, error.url, error.end - error.begin) == (status, f"s3://{bucket}/c/a.tar", 130)


def test_a_store_that_is_not_there(short: None, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        error = refused(tc.RemoteError, tc.open, f"s3://{bucket}/c/a.tar")
    assert error.url == f"s3://{bucket}/c/a.tar"
    assert "check AWS_ENDPOINT" in str(error)
    assert "~/.aws/credentials are not read" in str(error)


def test_wrong_answers(
    store: HttpServer, short: None, bucket: str, publish: Callable[[object], str], files: dict[str, bytes]
) -> None:
    total = len(files["a.tar"])
    shown = (f"bytes 1-130/{total}", f"bytes 0-9/{total + 1}", f"bytes 0-{total - 1}/{total}", "", None)
    faults = [*({"content_range": text} for text in shown), {"drip_s": 0.2}]
    lazies = [tc.open(publish(number))[0]["x"] for number in range(len(faults))]
    store.script_all({f"{bucket}/{number}/a.tar": [fault | {"times": -1}] for number, fault in enumerate(faults)})
    errors = (tc.RemoteError, tc.FormatError)
    found = outcomes([lambda lazy=lazy: refused(errors, lazy.load) for lazy in lazies])
    assert all(isinstance(error, errors) for error in found), found
    changed = files["a.tar"][::-1].decode("latin-1")
    store.script(f"{bucket}/0/a.tar", {"drop_body_after": 50}, {"replace": changed})
    assert "changed" in str(refused(tc.FormatError, lazies[0].load))


def test_stores_that_ignore_ranges(store: HttpServer, bucket: str, tmp_path: Path) -> None:
    """All of them, or those of the end, as s3rver does, whose answer obstore takes for a lost connection."""
    write(
        tmp_path / "a.tar", [{"x": torch.full((100_000,), i)} for i in range(6)]
    )  # longer than what is read of the end
    for name in ("b/a.tar", "b/b.tar", "n/a.tar"):
        store.put(f"{bucket}{name}", (tmp_path / "a.tar").read_bytes())
    store.set(suffix_ranges="first")
    url = f"s3://{bucket}b"
    assert [sample["x"][7].item() for sample in tc.open(f"{url}/a.tar")] == list(range(6))
    store.log()
    assert len(tc.open(f"{url}/b.tar")) == 6
    assert [request.range for request in store.log() if (request.range or "").startswith("bytes=-")] == []
    store.set(ranges=False)
    with pytest.raises(tc.RemoteError, match=r"n/a\.tar: .*with other bytes; copy the cache") as caught:
        tc.open(f"s3://{bucket}n/a.tar")[0]
    assert caught.value.status == 200
