"""Shards written to an object store: the same objects as a local writer's files, resumed, overwritten, refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.remote.servers.write_server import WriteServer
from tests.remote.written import read_folder, sample, write

URL = "s3://bucket/cache"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("", {}),
        ("train-%03d.tar", {"fingerprint": {"model": "a"}, "max_samples": 7}),
        ("one.tar", {"manifest": False}),
        ("b #?%d &+é.tar", {"dali_index": False, "max_nbytes": 20_000}),
    ],
)
def test_the_objects_equal_the_files_of_a_local_writer(
    write_server: WriteServer, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    write(tmp_path / "cache" / name, **options)
    sink = write(f"{URL}/{name}", **options)
    assert sink.num_finished == 23
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")


def test_a_shard_is_stored_before_its_index_and_that_before_the_manifest(write_server: WriteServer) -> None:
    write(URL, 10)
    puts = [
        key.removeprefix("cache/") for method, key, status in write_server.log() if (method, status) == ("PUT", 200)
    ]
    assert set(puts[:2]) == {".tensorcache-conditions"}
    assert puts[2:] == ["000000.tar", "000000.idx", "manifest.json", "000001.tar", "000001.idx", "manifest.json"]


def test_existing_shards_are_refused_resumed_or_overwritten(write_server: WriteServer, tmp_path: Path) -> None:
    write(URL, 13)
    with pytest.raises(FileExistsError, match=r"000000\.tar exists"):
        write(URL, 13)
    with tc.ShardWriter(URL, max_samples=5, resume=True) as sink:
        assert "003" in sink
        assert "013" not in sink
        assert sink.num_finished == 13
        for i in range(23):
            sink.write(f"{i:03d}", sample(i), json={"i": i})
    write(tmp_path / "resumed", 13)
    write(tmp_path / "resumed", 23, resume=True)
    assert write_server.objects("cache/") == read_folder(tmp_path / "resumed")

    write_server.put("cache/other.txt", b"kept")
    write(URL, 6, begin=50, overwrite=True)
    write(tmp_path / "new", 6, begin=50)
    assert write_server.objects("cache/") == {**read_folder(tmp_path / "new"), "other.txt": b"kept"}


def test_resuming_adds_what_a_killed_writer_had_not_written(write_server: WriteServer, tmp_path: Path) -> None:
    write(URL, 13)
    whole = write_server.objects("cache/")
    write_server.clear()
    for name in ("000000.tar", "000001.tar", "000002.tar"):
        write_server.put(f"cache/{name}", whole[name])
    write(URL, 13, resume=True)
    assert write_server.objects("cache/") == whole

    del whole["000002.tar"]
    write_server.clear()
    for name, content in whole.items():
        write_server.put(f"cache/{name}", content)
    with pytest.warns(UserWarning, match="000002.tar no longer exists"):
        tc.ShardWriter(URL, resume=True).close()
    listed = json.loads(write_server.objects("cache/")["manifest.json"])["shardlist"]
    assert [each["url"] for each in listed] == ["000000.tar", "000001.tar"]


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r"pip install 'wds-tensorcache\[remote\]'"):
        tc.ShardWriter(URL)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tc.ShardWriter(URL, footer=False), "footer=False"),
        (lambda: tc.ShardWriter(URL, max_nbytes=1 << 40), "5 GB"),
        (lambda: tc.ShardWriter("s3://bucket/%d/%d.tar"), "at most one number"),
        (lambda: tc.ShardWriter("s3://bucket/a*/%d.tar"), "readers expand"),
        (lambda: tc.ShardWriter("s3://bucket/a?/%d.tar"), "readers expand"),
        (lambda: tc.ShardWriter("s3://bucket/[a]/%d.tar"), "readers expand"),
        (lambda: tc.ShardWriter("s3://bucket/{a,b}/%d.tar"), "readers expand"),
        # pathlib changes urls
        (lambda: tc.ShardWriter(Path(URL) / "%03d.tar"), "pass a str"),
        (lambda: tc.open(Path(URL)), "pass a str"),
        (lambda: tc.ShardWriter("https://host/cache/%03d.tar"), "s3://, gs:// or az://"),
        (lambda: tc.ShardWriter("hf://datasets/a/b"), "s3://, gs:// or az://"),
    ],
)
def test_wrong_urls_and_options(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_urls_of_unknown_schemes_are_not_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("cache", 1)
    url = "file:///tmp/cache"
    for call in (
        lambda: tc.ShardWriter(url),
        lambda: tc.export_cache("cache", url, "pt"),
        lambda: tc.reshard("cache", url),
    ):
        with pytest.raises(ValueError, match=f"{url}: expected a local path"):
            call()
    assert os.listdir() == ["cache"]
