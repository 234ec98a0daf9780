"""Caches in an S3 store: folders, patterns and listings through obstore."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.caches import small, write_cache
from tests.remote.servers.s3 import S3Server
from tests.same import assert_same

SAMPLES = [small(i) for i in range(12)]


@pytest.fixture
def url(s3_server: S3Server, tmp_path: Path) -> str:
    folder = write_cache(tmp_path / "cache", SAMPLES)
    for path in folder.iterdir():
        s3_server.put("data", f"a cache/{path.name}", path.read_bytes())
    return "s3://data/a cache"


def test_sources(url: str, s3_server: S3Server) -> None:
    shards = [f"{url}/00{i}.tar" for i in range(3)]
    for source in (url, f"{url}/", f"{url}/manifest.json", f"{url}/*.tar", f"{url}/0?[0-2].tar", shards):
        with tc.open(source) as cache:
            assert list(cache.keys()) == [f"{i:03d}" for i in range(12)]
            assert_same(SAMPLES[7], cache[7])
    s3_server.delete("data", "a cache/manifest.json")
    with tc.open(url) as cache:
        assert_same(SAMPLES, list(cache))
        assert [each["size"] for each in cache.__getitems__([3, 11])] == [(3, 2), (11, 2)]
    for source, message in (
        (f"{url}/x*.tar", r"x\*.tar matches no object"),
        ("s3://data/nothing", r"nothing has neither manifest.json nor any \*.tar"),
        (
            f"{url}/manifest.jsn",
            r"jsn has neither .*; a url that ends in neither .* a folder; did you mean 'manifest.json'\?$",
        ),
        (f"{url}/manifes.json", r"manifes.json does not exist; did you mean 'manifest.json'\?$"),
        (f"{url}/003.tar", "a cache/003.tar: the shard does not exist"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            tc.open(source)


def test_a_changed_object(url: str, s3_server: S3Server) -> None:
    cache = tc.open(url)
    lazy = cache[3]["latent"]
    content = bytearray(s3_server.get("data", "a cache/000.tar") or b"")
    content[len(content) // 2] ^= 1
    s3_server.put("data", "a cache/000.tar", bytes(content))
    for read in (lambda: cache.read_batch([0, 7], collate="list"), lazy.load):
        with pytest.raises(tc.FormatError, match="s3://data/a cache/000.tar: the shard was changed"):
            read()


@pytest.mark.parametrize("name", ["a b", "a#1", "a?b", "50%", "é+&=", "[x]", "{y}"])
def test_keys(s3_server: S3Server, tmp_path: Path, name: str) -> None:
    content = (write_cache(tmp_path / "cache", SAMPLES[:2]) / "000.tar").read_bytes()
    s3_server.put("data", f"{name}.tar", content)
    if name == "[x]":
        source = "s3://data/[[]x].tar"
    else:
        source = f"s3://data/{name}.tar".replace("{", "\\{").replace("}", "\\}").replace("?", "[?]")
    assert_same(SAMPLES[1], tc.open(source)[1])
