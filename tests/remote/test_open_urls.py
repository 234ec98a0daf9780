"""`tc.open` of urls: what is found, with which requests, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.remote.caches import listing, small, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same

SAMPLES = [small(i) for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_cache(root / "cache", SAMPLES)
    return root


@pytest.fixture(autouse=True)
def _new_log(server: HttpServer) -> None:
    server.log()


def _requests(server: HttpServer) -> list[tuple[str, str]]:
    return [(request.method, request.path) for request in server.log()]


def test_a_thousand_shards_need_the_manifest_alone(server: HttpServer) -> None:
    server.put("many/manifest.json", listing(*(f"train-{i:06d}.tar" for i in range(1000))))
    cache = tc.open(f"{server.url}/many")
    assert (len(cache), cache.num_shards) == (10_000, 1000)
    with tc.Loader(cache, 32, shuffle=True) as loader:
        assert len(loader) == 313
    assert _requests(server) == [("GET", "/many/manifest.json")]
    with pytest.raises(tc.MissingShardError, match=rf"{server.url}/many/train-000123.tar: .*manifest.json lists it"):
        cache[1234]
    assert {path for _, path in _requests(server)} == {"/many/train-000123.tar"}


@pytest.mark.parametrize(
    "source",
    [
        "cache",
        "cache/",
        "cache/manifest.json",
        "cache/00{0..2}.tar",
        ["cache/000.tar", "cache/001.tar", "cache/002.tar"],
        ["cache/00{0..1}.tar", ["cache/002.tar"]],
    ],
    ids=str,
)
def test_sources(server: HttpServer, source: Any) -> None:
    def at_server(path: Any) -> Any:
        return f"{server.url}/{path}" if isinstance(path, str) else list(map(at_server, path))

    with tc.open(at_server(source)) as cache:
        assert list(cache.keys()) == [f"{i:03d}" for i in range(12)]
        for i in (0, 5, 11):
            assert_same(SAMPLES[i], cache[i])


def test_a_folder_without_a_manifest(server: HttpServer) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"nothing has no manifest.json, and its server cannot list.*check the url.*000099}.tar'",
    ):
        tc.open(f"{server.url}/nothing")
    with pytest.raises(FileNotFoundError, match="no-such-manifest.json"):
        tc.open(f"{server.url}/no-such-manifest.json")
    for name in ("manifest.jsn", "manifest", "manifes.json"):
        with pytest.raises(FileNotFoundError, match=rf"cache/{name} .*"):
            tc.open(f"{server.url}/cache/{name}")
    with pytest.raises(tc.RemoteError, match="web servers have no listings"):
        tc.open(f"{server.url}/cache/*.tar")
    with pytest.raises(ValueError, match="wildcards only in the last part"):
        tc.open(f"{server.url}/*/000.tar")
    with pytest.raises(FileNotFoundError, match="lists no shards; if a writer with overwrite=True was killed, write"):
        tc.open(server.put("empty/manifest.json", listing()))
    with pytest.raises(
        tc.MissingShardError, match=f"{server.url}/cache/003.tar: the shard does not exist; check the url"
    ):
        tc.open(f"{server.url}/cache/00{{2..3}}.tar")


@pytest.mark.parametrize(
    ("more_nbytes", "num_samples", "kind", "message"),
    [
        (512, 5, "index", r"stale/000.tar: the shard has .* bytes, but .*manifest.json says"),
        (0, 7, "format", "5 samples with cache '', but the manifest lists 7"),
    ],
)
def test_another_shard(
    server: HttpServer, folder: Path, more_nbytes: int, num_samples: int, kind: str, message: str
) -> None:
    content = (folder / "cache" / "000.tar").read_bytes()
    server.put("stale/manifest.json", listing("000.tar", nbytes=len(content) + more_nbytes, num_samples=num_samples))
    server.put("stale/000.tar", content)
    with pytest.raises(tc.FormatError, match=message) as raised:
        tc.open(f"{server.url}/stale")[0]
    assert raised.value.kind == kind


def test_other_members(server: HttpServer, folder: Path) -> None:
    """Without numbers of samples of each cache in the manifest, opening reads the indexes."""
    content = (folder / "cache" / "000.tar").read_bytes()
    manifest = listing("000.tar", nbytes=len(content), num_samples=5, caches=False)
    server.put("plain/manifest.json", manifest)
    server.put("plain/000.tar", content)
    with tc.open(f"{server.url}/plain") as cache:
        assert len(cache) == 5
        assert [json.loads(each) for each in cache.read_members([4, 2], "json")] == [{"label": 4}, {"label": 2}]
    with pytest.raises(KeyError, match="no cache 'other'"):
        tc.open(f"{server.url}/plain", cache="other")


# --- hostile manifests

HOSTILE = """
../other.tar a/../../other.tar ./../other.tar .. a/.. /etc/passwd.tar //evil.example/a.tar
http://169.254.169.254/latest/a.tar https://evil.example/data/cache/a.tar SERVER/other/a.tar
SERVER/evil SERVER/evil/../a.tar SERVER/evil/%2e%2E/a.tar
SERVER/evil/a.tar?signature=secret SERVER/evil/a.tar#b
http://user:secret@127.0.0.1/evil/a.tar HTTP://127.0.0.1/evil/a.tar s3://bucket/a.tar file:///etc/passwd
file:a.tar pipe:cat PIPE:cat data:,a a\\..\\b.tar C:\\a.tar a//b.tar a/ . ././.
"""


@pytest.mark.parametrize("listed", [*HOSTILE.split(), "pipe:cat /etc/passwd"])
def test_hostile_entries(server: HttpServer, listed: str) -> None:
    server.put("evil/manifest.json", listing("a.tar", listed.replace("SERVER", server.url)))
    with pytest.raises(tc.FormatError) as raised:
        tc.open(f"{server.url}/evil")
    assert raised.value.kind == "index"
    assert "secret" not in str(raised.value)
    assert [path for _, path in _requests(server)] == ["/evil/manifest.json"]


@pytest.mark.parametrize(
    ("listed", "path"),
    [
        ("./b/./a.tar", "b/a.tar"),
        ("12:30.tar", "12:30.tar"),
        ("...tar", "...tar"),
        ("%2e%2e.tar", "%252e%252e.tar"),
        ("SERVER/names/b/a%20b.tar", "b/a%20b.tar"),
    ],
)
def test_entries(server: HttpServer, listed: str, path: str) -> None:
    server.put("names/manifest.json", listing(listed.replace("SERVER", server.url)))
    with pytest.raises(tc.MissingShardError):
        tc.open(f"{server.url}/names")[0]
    assert _requests(server)[1] == ("GET", f"/names/{path}")


def test_one_shard_that_is_listed_twice(server: HttpServer) -> None:
    with pytest.raises(tc.FormatError, match="is the same file as 'a.tar'; list it once"):
        tc.open(server.put("evil/manifest.json", listing("a.tar", "./a.tar")))
    signed = f"{server.url}/evil/a.tar?signature=secret"
    with pytest.raises(tc.FormatError, match="occurs twice") as raised:
        tc.open(server.put("evil/manifest.json", listing(signed, signed)))
    assert "secret" not in str(raised.value)


def test_a_local_manifest_lists_no_urls(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(listing(f"{server.url}/cache/000.tar"))
    with pytest.raises(tc.FormatError, match="is a url in a local manifest; pass the urls to tc.open, in a list"):
        tc.open(tmp_path)
    assert not _requests(server)


# --- secret parts of urls


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///x?q=s3cret", "s3://", "s3:///x", "http://h/a\nb?q=s3cret", "http://[::1/x", "s3://b/\x00"],
)
def test_urls_that_are_not_valid(url: str) -> None:
    with pytest.raises(ValueError, match="after '://'|not printable|Invalid IPv6") as raised:
        tc.open(url)
    assert "s3cret" not in str(raised.value)
