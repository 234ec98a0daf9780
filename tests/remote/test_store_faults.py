"""Object stores that fail: the right bytes after another attempt, or a clear error."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.remote.servers.cutting_proxy import CuttingProxy
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.s3 import SECRET_KEY, S3Server, environment
from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import run_all

CONTENT = random.Random(12).randbytes(150)
ANY = ObjectInfo(len(CONTENT), None)


def read(url: str) -> bytes:
    memory = bytearray(130)
    client_for(url).read_into(url, [memoryview(memory)[:7], memoryview(memory)[7:]], 10, ANY)
    return bytes(memory)


READS: dict[str, tuple[Callable[[str], bytes], bytes]] = {
    "read": (read, CONTENT[10:140]),
    "tail": (lambda url: client_for(url).read_tail(url, 100)[1], CONTENT[-100:]),
    "whole": (lambda url: client_for(url).read_whole(url, 1000)[1], CONTENT),
    "stat": (lambda url: str(client_for(url).stat(url).nbytes).encode(), b"150"),
}


@pytest.fixture
def store(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A web server that answers reads as an S3 server does, and fails as it is told."""
    for name, value in environment(http_server.url).items():
        monkeypatch.setenv(name, value)
    forget_clients()
    return http_server


@pytest.mark.parametrize("how", READS)
def test_a_connection_that_drops_at_every_byte(store: HttpServer, how: str) -> None:
    call, expected = READS[how]
    replace = {"replace": CONTENT.decode("latin-1")}
    store.script_all({f"bucket/{at}": [{**replace, "drop_after": at}] for at in range(420)})
    found = run_all([lambda at=at: call(f"s3://bucket/{at}") for at in range(420)])
    assert found == [expected] * 420
    assert len(store.log()) > 420 + 100


def test_endpoints_that_cannot_work(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("bucket/a", CONTENT)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        for value in ("", "127.0.0.1:9000", "localhost:9000"):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                forget_clients()
                with pytest.raises(tc.RemoteError, match=f"s3://bucket: {name} is not a url that begins with"):
                    client_for("s3://bucket/a").stat("s3://bucket/a")
                with pytest.raises(tc.RemoteError, match=f"s3://bucket: {name} is not a url that begins with"):
                    tc.ShardWriter("s3://bucket/cache")
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ALLOW_HTTP")
        forget_clients()
        with pytest.raises(tc.RemoteError, match="AWS_ALLOW_HTTP=true"):
            client_for("s3://bucket/a").stat("s3://bucket/a")
        with pytest.raises(tc.RemoteError, match="AWS_ALLOW_HTTP=true"):
            tc.ShardWriter("s3://bucket/cache")
    forget_clients()
    assert client_for("s3://bucket/a").stat("s3://bucket/a").nbytes == len(CONTENT)


def test_statuses(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("bucket/a", CONTENT)
    for status in (500, 502, 503, 504):
        store.script("bucket/a", {"status": status}, {"status": status, "retry_after": "0"})
        for call, expected in READS.values():
            assert call("s3://bucket/a") == expected
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "2")
    forget_clients()
    for status in (400, 401, 403, 416, 500):
        store.script("bucket/a", {"status": status, "times": -1})
        with pytest.raises(tc.RemoteError) as caught:
            read("s3://bucket/a")
        assert caught.value.status == (status if status in (401, 403) else None)
        assert (caught.value.url, caught.value.begin, caught.value.end) == ("s3://bucket/a", 10, 140)
        assert not any(secret in str(caught.value) for secret in (SECRET_KEY, "Signature", "test-access-key"))
    store.script("bucket/a", {"status": 404, "times": -1})
    with pytest.raises(FileNotFoundError):
        read("s3://bucket/a")


def test_probable_causes(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """obstore has one error for all of these; it repeats some requests in silence, of which a warning tells."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")
    monkeypatch.setattr(retry, "_LATE_S", 0.1)
    forget_clients()
    with pytest.raises(FileNotFoundError, match="the bucket may not exist"):
        tc.open("s3://no-bucket/cache")
    with socket.socket() as closed, monkeypatch.context() as patch:
        closed.bind(("127.0.0.1", 0))
        patch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        forget_clients()
        monkeypatch.setattr(retry, "_warned_s", -math.inf)
        with pytest.raises(
            tc.RemoteError, match=r"nothing answers at the address in AWS_ENDPOINT \(Connection refused\)"
        ):
            read("s3://bucket/a")
    assert caplog.messages[-1] == "s3://bucket/a: bytes [10, 140): no response yet; trying for up to 1 s"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    # where obstore asks for the credentials of a machine's role; nothing listens there
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    forget_clients()
    with pytest.raises(
        tc.RemoteError, match="the environment has no credentials, and files such as ~/.aws/credentials"
    ):
        read("s3://bucket/a")


def test_wrong_answers(store: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "2")
    forget_clients()
    store.put("bucket/a", CONTENT)
    for shown in ("bytes 11-140/150", "bytes 10-139/151", "bytes 0-149/150", "", None):
        store.script("bucket/a", {"content_range": shown, "times": -1})
        with pytest.raises((tc.RemoteError, tc.FormatError)):
            read("s3://bucket/a")
    store.script("bucket/a")
    store.set(ranges=False)
    with pytest.raises((tc.RemoteError, tc.FormatError)):
        read("s3://bucket/a")
    store.set(ranges=True)
    store.script("bucket/a", {"drip_s": 0.2, "times": -1})
    with pytest.raises(tc.RemoteError):
        read("s3://bucket/a")


def test_an_object_that_changes_on_the_way(store: HttpServer) -> None:
    store.put("bucket/a", CONTENT)
    store.script("bucket/a", {"drop_body_after": 50}, {"replace": CONTENT[::-1].decode("latin-1")})
    with pytest.raises(tc.FormatError, match="changed"):
        read("s3://bucket/a")


def test_a_real_server_whose_connections_drop(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_server.put("bucket", "a.tar", CONTENT)
    with CuttingProxy(s3_server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT", proxy.url)
        forget_clients()
        for number, at in enumerate(range(0, 900, 29)):
            proxy.cut(at)
            call, expected = list(READS.values())[number % 3]
            assert call(url) == expected
        assert proxy.num_cut > 10


@pytest.fixture
def shard(tmp_path: Path) -> bytes:
    """A shard that is longer than what is read of its end."""
    with tc.ShardWriter(tmp_path / "a-%d.tar", manifest=False) as sink:
        for i in range(6):
            sink.write(f"{i}", {"x": torch.full((100_000,), i)})
    return (tmp_path / "a-0.tar").read_bytes()


def test_a_store_that_answers_suffix_ranges_with_the_beginning(store: HttpServer, shard: bytes) -> None:
    """As s3rver does. obstore refuses the answer by an error that looks like a lost connection."""
    for name in "ab":
        store.put(f"bucket/{name}.tar", shard)
    store.set(suffix_ranges="first")
    assert [sample["x"][7].item() for sample in tc.open("s3://bucket/a.tar")] == list(range(6))
    store.log()
    assert len(tc.open("s3://bucket/b.tar")) == 6
    assert [request.range for request in store.log() if (request.range or "").startswith("bytes=-")] == []


def test_a_store_without_ranges(store: HttpServer, shard: bytes) -> None:
    store.put("bucket/a.tar", shard)
    store.set(ranges=False)
    with pytest.raises(tc.RemoteError, match=r"s3://bucket/a\.tar: .*with other bytes; copy the cache") as caught:
        tc.open("s3://bucket/a.tar")[0]
    assert caught.value.status == 200
