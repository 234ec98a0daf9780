"""`write_index` of shards at urls, next to the shard and in folders of indexes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import WriteServer
from tests.same import assert_same

URL = "s3://bucket/cache/a.tar"


@pytest.fixture
def stock(tmp_path: Path, write_shard: Any) -> bytes:
    """A shard of webdataset's own writer, which has no index."""
    samples = [{"__key__": f"{i:03d}", "tensorcache": diffusion_sample(i), "json": {"i": i}} for i in range(5)]
    return Path(write_shard(samples)).read_bytes()


def test_next_to_the_shard(write_server: WriteServer, tmp_path: Path, stock: bytes) -> None:
    write_server.put("cache/a.tar", stock)
    (tmp_path / "a.tar").write_bytes(stock)
    for _ in range(2):
        index, local = tc.write_index(URL), tc.write_index(tmp_path / "a.tar")
        assert list(index.keys) == list(local.keys)
        expected = {name: (tmp_path / name).read_bytes() for name in ("a.tar", "a.tar.index", "a.idx")}
        assert write_server.objects("cache/") == expected
    with tc.ShardWriter("s3://bucket/own.tar", fingerprint={"model": "a"}) as sink:
        sink.write("a", 1)
    for options in ({}, {"index_folder": tmp_path}):
        assert tc.write_index("s3://bucket/own.tar", **options).fingerprint == {"model": "a"}


@pytest.mark.parametrize("is_local", [False, True])
def test_in_a_folder_of_indexes(write_server: WriteServer, tmp_path: Path, stock: bytes, is_local: bool) -> None:
    folder = str(tmp_path / "indexes") if is_local else "s3://bucket/indexes"
    write_server.put("cache/a.tar", stock)
    tc.write_index(URL, index_folder=folder, dali_index=False)
    assert list(write_server.objects("cache/")) == ["a.tar"]
    with tc.open(URL, index_folder=folder) as cache:
        assert_same(diffusion_sample(3), tc.realize(cache["003"]))


def test_a_shard_on_a_web_server(http_server: HttpServer, tmp_path: Path, stock: bytes) -> None:
    url = http_server.put("cache/a b.tar", stock)
    with pytest.raises(ValueError, match="index_folder="):
        tc.write_index(url)
    tc.write_index(url, index_folder=tmp_path / "indexes")
    assert sorted(path.name for path in (tmp_path / "indexes").iterdir()) == ["a b.idx", "a b.tar.index"]
    with tc.open(url, index_folder=str(tmp_path / "indexes")) as cache:
        assert_same(diffusion_sample(3), tc.realize(cache["003"]))


def test_refusals(write_server: WriteServer, tmp_path: Path, stock: bytes) -> None:
    with pytest.raises(FileNotFoundError):
        tc.write_index(URL)
    write_server.put("cache/a.tar", stock[:5000])
    with pytest.raises(tc.FormatError, match=r"a\.tar"):
        tc.write_index(URL)
    (tmp_path / "a.tar").write_bytes(stock)
    with pytest.raises(ValueError, match="is local"):
        tc.write_index(tmp_path / "a.tar", index_folder=tmp_path)
    assert list(write_server.objects("cache/")) == ["a.tar"]


@pytest.mark.parametrize("has_content", [False, True])
def test_the_last_sample_lost_its_headers(write_server: WriteServer, tmp_path: Path, has_content: bool) -> None:
    """A new index without this sample would take the place of the footer, which lists it."""
    with tc.ShardWriter(tmp_path / "a.tar") as sink:
        for i in range(3):
            sink.write(f"{i}", {"x": torch.arange(4)})
    shard = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        lost = [member for member in tar if member.name.startswith("2.")]
    for member in lost:
        end = member.offset_data + (0 if has_content else member.size)
        shard[member.offset : end] = bytes(end - member.offset)
    write_server.put("cache/a.tar", bytes(shard))
    with pytest.raises(tc.FormatError, match="for a copy on a local disk, `tensorcache verify`"):
        tc.write_index(URL, index_folder=tmp_path / "indexes")
    with tc.open(URL, index_folder=tmp_path / "indexes") as cache:
        assert len(cache) == 3


def test_only_the_older_index_lists_the_last_sample(http_server: HttpServer, tmp_path: Path, stock: bytes) -> None:
    url, folder = http_server.put("a.tar", stock), tmp_path / "indexes"
    tc.write_index(url, index_folder=folder)
    before = (folder / "a.tar.index").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(stock)) as tar:
        begin = min(member.offset for member in tar if member.name.startswith("004"))
    http_server.put("a.tar", stock[:begin] + bytes(len(stock) - begin))
    with pytest.raises(tc.FormatError, match="zeros, although a.tar.index says that the archive ends at byte"):
        tc.write_index(url, index_folder=folder)
    assert (folder / "a.tar.index").read_bytes() == before
