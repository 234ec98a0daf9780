"""Objects of an S3 server, through obstore."""

from __future__ import annotations

import random

import pytest

import wds_tensorcache as tc
from tests.remote.servers.s3 import SECRET_KEY, S3Server
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.urls import join_url, name_of

CONTENT = random.Random(5).randbytes(300_000)


@pytest.mark.parametrize("name", ["a.tar", "odd name #1?%41%.tar", "deep/er/ü.tar"])
def test_reads(s3_server: S3Server, name: str) -> None:
    url = s3_server.put("bucket", f"cache/{name}", CONTENT)
    assert url == join_url("s3://bucket/cache/", name)
    assert name_of(url) == name.rpartition("/")[2]
    client = client_for(url)
    state = client.stat(url)
    assert state.nbytes == len(CONTENT)
    assert state.tag
    assert client.read_tail(url, 1000) == (state, CONTENT[-1000:])
    assert client.read_tail(url, 1_000_000) == (state, CONTENT)
    assert client.read_whole(url, len(CONTENT)) == (state, CONTENT)
    with pytest.raises(tc.RemoteError, match="more than"):
        client.read_whole(url, len(CONTENT) - 1)
    file = RemoteFile(url, len(CONTENT))
    buffers = [[memoryview(bytearray(nbytes)) for nbytes in (100, 0, 3000)] for _ in range(10)]
    fetch_many([(file, 29_000 * i, buffers[i]) for i in range(10)])
    for i in range(10):
        assert b"".join(buffers[i]) == CONTENT[29_000 * i : 29_000 * i + 3100]
    assert file.state == state


def test_an_empty_object(s3_server: S3Server) -> None:
    url = s3_server.put("bucket", "empty", b"")
    assert client_for(url).read_tail(url, 10)[1] == b""
    assert client_for(url).read_whole(url, 10)[1] == b""
    assert RemoteFile(url).read(0, 0) == b""


def test_a_long_object(s3_server: S3Server) -> None:
    content = random.Random(6).randbytes(9_000_001)
    url = s3_server.put("bucket", "long", content)
    assert client_for(url).read_whole(url, 10_000_000)[1] == content
    assert RemoteFile(url).read(1, 9_000_000) == content[1:-1]


def test_listing(s3_server: S3Server) -> None:
    names = ["b.tar", "a.tar", "c d#?%.tar", "sub/x.tar"]
    for name in names:
        s3_server.put("bucket", f"cache/{name}", name.encode())
    s3_server.put("bucket", "cached", b"x")
    found = list(client_for("s3://bucket").list_objects("s3://bucket/cache/"))
    assert [url for url, _ in found] == [f"s3://bucket/cache/{name}" for name in sorted(names[:3])]
    for url, state in found:
        assert state == client_for(url).stat(url)
    assert list(client_for("s3://bucket").list_objects("s3://bucket/none")) == []


def test_a_changed_object_is_refused(s3_server: S3Server) -> None:
    url = s3_server.put("bucket", "a.tar", CONTENT)
    file = RemoteFile(url)
    file.ask()
    s3_server.put("bucket", "a.tar", CONTENT[::-1])
    with pytest.raises(tc.FormatError, match="changed"):
        file.read(0, 10)
    with pytest.raises(tc.FormatError, match="changed"):
        RemoteFile(url, len(CONTENT) + 1).read(0, 10)
    s3_server.delete("bucket", "a.tar")
    with pytest.raises(FileNotFoundError):
        file.read(0, 10)
    with pytest.raises(FileNotFoundError):
        RemoteFile("s3://bucket/none").ask()
    with pytest.raises(FileNotFoundError):
        RemoteFile("s3://no-bucket/none").ask()


@pytest.mark.parametrize(
    "url", ["s3://bucket/../a", "s3://bucket/a//b", "s3://bucket", f"s3://me:{SECRET_KEY}@bucket/a"]
)
def test_impossible_urls(s3_server: S3Server, url: str) -> None:
    with pytest.raises(tc.RemoteError) as caught:
        client_for(url).stat(url)
    assert SECRET_KEY not in str(caught.value)


def test_errors_have_no_secrets(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    forget_clients()
    url = "s3://bucket/a.tar"
    with pytest.raises(tc.RemoteError) as caught:
        client_for(url).read_into(url, [memoryview(bytearray(10))], 5, ObjectInfo(100, None))
    error: BaseException | None = caught.value
    assert (caught.value.url, caught.value.begin, caught.value.end) == (url, 5, 15)
    while error is not None:
        assert not any(secret in str(error) for secret in (SECRET_KEY, "Signature", "127.0.0.1"))
        error = error.__cause__ or error.__context__
    assert SECRET_KEY not in repr(client_for(url))
