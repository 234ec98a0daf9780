"""Caches in an S3 store: folders, patterns and listings through obstore."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.caches import small, write_cache
from tests.remote.servers.write_server import WriteServer
from tests.same import assert_same

SAMPLES = [small(i) for i in range(12)]


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
