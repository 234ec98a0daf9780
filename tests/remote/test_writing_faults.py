"""Faults of a store while shards are uploaded: the right objects, or an error that says where and what, without secrets."""

from __future__ import annotations

import re
import traceback
from functools import partial
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.reads import refused
from tests.remote.servers.write_server import SECRET, WriteServer
from tests.remote.written import read_folder, sample, write

URL = "s3://bucket/cache"


def _error_of(count: int = 12, **options: object) -> tc.RemoteError:
    """Return the error of a writer, after a check that it has no secrets, also not in what it was raised from."""
    error: tc.RemoteError = refused(tc.RemoteError, partial(write, URL, count, **options))
    assert SECRET not in "".join(traceback.format_exception(error))
    return error


@pytest.mark.parametrize(
    "faults",
    [
        [
            {"suffix": ".tar", "status": 500},
            {"suffix": ".tar", "status": 503, "times": 2},
            {"suffix": ".idx", "status": 503},
            {"suffix": ".json", "status": 429},
        ],
        [{"method": "GET", "status": 500}, {"suffix": "manifest.json", "lost": True, "times": 2}],
        [{"method": "PUT", "suffix": "1.tar", "cut": True}, {"method": "PUT", "suffix": ".idx", "cut": True}],
        [{"method": "PUT", "suffix": ".tar", "lost": True}, {"method": "PUT", "suffix": "manifest.json", "lost": True}],
        [{"method": "PUT", "suffix": "1.tar", "lost": True}, {"method": "PUT", "suffix": "1.tar", "status": 500}],
        [
            {"method": "PUT", "suffix": ".tar", "status": 409},
            {"method": "PUT", "suffix": ".tar", "status": 400, "code": "RequestTimeout"},
            {"method": "PUT", "suffix": ".idx", "status": 409},
            {"method": "PUT", "suffix": "manifest.json", "status": 409},
        ],
    ],
)
def test_faults_that_pass(write_server: WriteServer, tmp_path: Path, faults: list[dict[str, object]]) -> None:
    write_server.script(*faults)
    write(URL, 12)
    write(tmp_path / "cache", 12)
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ({"status": 403}, "permit"),
        ({"status": 401}, "permit"),
        ({"status": 400}, "refuses"),
        ({"status": 400, "code": "ExpiredToken"}, "have expired"),
        ({"status": 301}, "region"),
    ],
)
def test_faults_that_stay(write_server: WriteServer, fault: dict[str, object], word: str) -> None:
    write_server.script({"method": "PUT", "suffix": "1.tar", "times": -1, **fault})
    error = _error_of()
    assert error.status in (fault["status"], None)
    assert error.url == f"{URL}/000001.tar"
    assert word in str(error)
    assert sorted(write_server.objects("cache/")) == ["000000.idx", "000000.tar", "manifest.json"]


def test_a_store_that_stays_down(write_server: WriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.7")
    write_server.script({"method": "PUT", "suffix": ".tar", "status": 503, "times": -1})
    assert _error_of().status == 503
    assert write_server.objects("cache/") == {}


def test_a_manifest_that_many_writers_change(write_server: WriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google accepts one change of an object each second, so that a writer may have to wait longer than for a fault."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")
    write_server.script({"method": "PUT", "suffix": "manifest.json", "status": 429, "times": 12})
    write(URL, 5)
    assert sorted(write_server.objects("cache/")) == ["000000.idx", "000000.tar", "manifest.json"]


def test_credentials_that_may_not_delete(write_server: WriteServer) -> None:
    """S3 answers with status 200, and one error for each object."""
    write(URL, 5)
    key = "cache/000000.tar"
    # the first request to delete is that of the check of the store
    write_server.script({"method": "POST"}, {"method": "POST", "status": 200, "denied": key, "times": -1})
    assert _error_of(overwrite=True).status == 403


def test_a_store_without_conditional_writes(write_server: WriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    write_server.script({"method": "PUT", "status": 501, "times": -1})
    error = _error_of()
    assert error.status == 501
    assert "conditional" in str(error)
    write_server.script()
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    assert "conditional" in str(_error_of())


@pytest.mark.parametrize("options", [{}, {"manifest": False}])
@pytest.mark.parametrize("ignored", ["IF_NONE_MATCH", "IF_MATCH", True])
def test_a_store_that_ignores_conditions(
    write_server: WriteServer, options: dict[str, bool], ignored: str | bool
) -> None:
    """It is found out before a shard is uploaded, and nothing stays in the store."""
    write_server.script({"method": "PUT", "ignore": ignored, "times": -1})
    error = _error_of(**options)
    assert "conditional" in str(error)
    assert "write to a local folder, and copy it" in str(error)
    assert write_server.objects() == {}
    puts = [key for method, key, _ in write_server.log() if method == "PUT"]
    assert not [key for key in puts if key.endswith((".tar", ".idx", "manifest.json"))]


def test_a_folder_in_a_store_that_ignores_conditions_stays_as_it_was(write_server: WriteServer) -> None:
    write(URL, 7)
    write_server.put("cache/manifest.json", b'{"wids_version": 1, "shardlist": []}')
    before = write_server.objects()
    write_server.script({"method": "PUT", "ignore": True, "times": -1})
    assert "conditional" in str(_error_of(overwrite=True))
    assert write_server.objects() == before


def test_credentials_that_may_not_delete_the_object_of_the_check(write_server: WriteServer) -> None:
    write_server.script(
        {"method": "POST", "status": 403, "times": -1}, {"method": "DELETE", "status": 403, "times": -1}
    )
    for name in ("a", "b"):
        write(URL + "/%06d.tar", 5, resume=True)
        write(f"{URL}/{name}-%06d.tar", 5)
    left = [key for key in write_server.objects("cache/") if not key.endswith((".tar", ".idx", "manifest.json"))]
    assert left == [".tensorcache-conditions"]
    assert len(tc.open(URL)) == 15


@pytest.mark.parametrize("fault", [{"tags": "none"}, {"tags": "weak"}, {"tags": "none", "method": "GET"}])
def test_a_store_without_strong_tags(write_server: WriteServer, fault: dict[str, object]) -> None:
    """As a proxy that compresses answers makes them weak. No attempt is repeated, since no later one can succeed."""
    write(URL, 5)
    before = write_server.objects()
    write_server.script(fault | {"times": -1})
    write_server.log()
    error = _error_of(count=20, resume=True)
    assert write_server.objects() == before
    assert "strong ETags" in str(error)
    assert "other writers have changed" not in str(error)
    assert len([key for method, key, _ in write_server.log() if method == "PUT"]) <= 5


def test_a_failed_upload_is_the_error_of_the_next_write_and_of_close(write_server: WriteServer) -> None:
    write_server.script({"method": "PUT", "suffix": ".tar", "status": 403, "times": -1})
    sink = tc.ShardWriter(URL, max_samples=1)

    def write_all() -> None:
        for i in range(10):
            sink.write(f"{i}", sample(i))

    for _ in range(2):
        with pytest.raises(tc.RemoteError):
            write_all()
    with pytest.raises(tc.RemoteError):
        sink.close()
    assert write_server.objects("cache/") == {}


def test_another_writer_of_the_same_names(write_server: WriteServer) -> None:
    first, second = tc.ShardWriter(URL), tc.ShardWriter(URL)
    first.write("a", sample(1))
    second.write("a", sample(1))
    first.close()
    before = write_server.objects("cache/")
    with pytest.raises(FileExistsError, match="another writer"):
        second.close()
    assert write_server.objects("cache/") == before


def test_the_error_in_the_block_stays_and_that_of_an_upload_is_its_note(write_server: WriteServer) -> None:
    write_server.script({"method": "PUT", "suffix": ".tar", "hold": True, "status": 403})

    def write_twice() -> None:
        with tc.ShardWriter(URL, max_samples=2) as sink:
            try:
                for key in "abcc":
                    sink.write(key, sample(0))
            finally:
                write_server.wait_until_held()
                write_server.script()

    with pytest.raises(tc.InvalidKeyError) as caught:
        write_twice()
    assert "403" in "".join(getattr(caught.value, "__notes__", ["403"]))
    assert write_server.objects("cache/") == {}


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///a", "https://user:v3ry-s3cret-k3y@host/%d%d", "s3://a:v3ry-s3cret-k3y@b/%d", "s3://bucket/a//b"],
)
def test_urls_that_cannot_be(write_server: WriteServer, url: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        write(url, 2)
    assert re.search("bucket|name|credentials|s3://", str(caught.value))
    assert SECRET not in str(caught.value)
