"""Indexes of remote shards: with which requests they are found, where they are kept, and when they are fetched again."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.remote.caches import listing, small, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same

SAMPLES = [small(i) for i in range(6)]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (write_cache(tmp_path_factory.mktemp("cache"), SAMPLES, max_samples=100) / "000.tar").read_bytes()


@pytest.fixture(scope="module")
def folder_of_bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shard without a footer, and its index."""
    folder = write_cache(tmp_path_factory.mktemp("bare"), SAMPLES, max_samples=100, footer=False)
    tc.write_index(folder / "000.tar")
    return folder


@pytest.fixture(scope="module")
def bare(folder_of_bare: Path) -> bytes:
    return (folder_of_bare / "000.tar").read_bytes()


@pytest.fixture(scope="module")
def sidecar(folder_of_bare: Path) -> bytes:
    return (folder_of_bare / "000.tar.index").read_bytes()


def _log(http_server: HttpServer) -> list[tuple[str, str, str | None]]:
    return [(request.method, request.path, request.range) for request in http_server.log()]


def _gets(http_server: HttpServer) -> list[str]:
    """Return the paths of all requests but those for the state of an object."""
    return [path for _, path, nbytes in _log(http_server) if nbytes != "bytes=0-0"]


def test_one_request(http_server: HttpServer, shard: bytes) -> None:
    url = http_server.put("c/a.tar", shard)
    cache = tc.open(url)
    assert _log(http_server) == [("GET", "/c/a.tar", "bytes=-65536")]
    assert list(cache.keys()) == [f"{i:03d}" for i in range(6)]
    assert cache.schema
    assert not http_server.log()
    cache[3]["latent"].load()
    assert len(http_server.log()) == 2  # the skeleton; the tensor


def test_the_length_is_guessed_from_the_manifest(http_server: HttpServer, shard: bytes) -> None:
    http_server.put("c/a.tar", shard)
    url = http_server.put("c/manifest.json", listing("a.tar", nbytes=len(shard), num_samples=6))
    cache = tc.open(url)
    http_server.log()
    assert cache.schema
    assert _log(http_server) == [("GET", "/c/a.tar", f"bytes=-{(1 << 14) + 6 * 64}")]


def test_a_long_index(http_server: HttpServer, tmp_path: Path) -> None:
    """An index that is longer than the first request takes a second one."""
    path = write(tmp_path / "a.tar", {f"{i:04d}" + "k" * 80: {"x": i} for i in range(900)})
    content = Path(path).read_bytes()
    url = http_server.put("c/a.tar", content)
    cache = tc.open(url)
    (first, second) = _log(http_server)
    assert first == ("GET", "/c/a.tar", "bytes=-65536")
    assert str(second[2]).endswith(f"-{len(content) - 65536 - 1}")
    assert cache[899] == {"x": 899}


def test_a_hostile_length(http_server: HttpServer) -> None:
    """A trailer that claims almost all of a large shard as its index fetches nothing more."""
    nbytes = 80 << 20
    trailer = struct.pack("<QQQQ8s", nbytes - 40 - 2048, 1024, nbytes, 0, b"tcindex1")
    url = http_server.put("c/a.tar", bytes(nbytes - 40) + trailer)
    with pytest.raises(
        tc.FormatError, match=r"a.tar: byte 2048: the index has 83,.* bytes, expected at most a quarter"
    ):
        tc.open(url)
    assert sum(request.nbytes for request in http_server.log()) == 1 << 16


def test_a_sidecar(http_server: HttpServer, bare: bytes, sidecar: bytes, tmp_path: Path) -> None:
    """It is kept on disk, and not fetched again."""
    http_server.put("c/a.tar.index", sidecar)
    url = http_server.put("c/a.tar", bare)
    cache = tc.open(url, keep_indexes=tmp_path)
    assert list(dict.fromkeys(_gets(http_server))) == ["/c/a.tar", "/c/a.tar.index"]
    lazy = cache[3]["latent"]
    http_server.log()
    assert_same(SAMPLES[3]["latent"], lazy)
    assert len(http_server.log()) == 1
    with tc.open(url, keep_indexes=tmp_path) as cache:
        assert _gets(http_server) == []
        assert_same(SAMPLES, list(cache))


def test_a_sidecar_of_another_state(http_server: HttpServer, bare: bytes, sidecar: bytes) -> None:
    """A shard of the same length is told apart by its headers, since its tag tells nothing about the sidecar."""
    other = bare.replace(b"000.safetensors", b"00x.safetensors", 1)
    assert other != bare
    http_server.put("c/a.tar.index", sidecar)
    with pytest.raises(tc.FormatError, match=r"a.tar: .*'000.safetensors' of .* where the shard has '00x.safetensors'"):
        tc.open(http_server.put("c/a.tar", other))


@pytest.mark.parametrize("is_local", [True, False])
def test_an_index_folder(http_server: HttpServer, bare: bytes, sidecar: bytes, is_local: bool, tmp_path: Path) -> None:
    url = http_server.put("c/a.tar", bare)
    if is_local:
        (tmp_path / "a.tar.index").write_bytes(sidecar)
        indexes: str | Path = tmp_path
    else:
        indexes = http_server.put("elsewhere/indexes/a.tar.index", sidecar).rpartition("/")[0]
        http_server.log()
    with tc.open(url, index_folder=indexes) as cache:
        sidecar_gets = [] if is_local else ["/elsewhere/indexes/a.tar.index"]
        assert list(dict.fromkeys(_gets(http_server))) == [*sidecar_gets, "/c/a.tar"]  # headers
        assert_same(SAMPLES, list(cache))
        if is_local:
            os.truncate(tmp_path / "a.tar.index", 1 << 40)  # sparse: more than fits into memory
            with pytest.raises(tc.FormatError, match="more than the limit for such a file"):
                tc.open(url, index_folder=indexes)[0]
        # the index need not be in the folder
        http_server.put("c/b.tar", bare)
        assert_same(SAMPLES[1], tc.open(f"{http_server.url}/c/b.tar", index_folder=indexes)[1])


def test_no_suffix_ranges(http_server: HttpServer, shard: bytes) -> None:
    http_server.set(suffix_ranges=501)
    with tc.open(http_server.put("c/a.tar", shard)) as cache:
        assert_same(SAMPLES, list(cache))


def test_a_scan(http_server: HttpServer, bare: bytes, tmp_path: Path) -> None:
    """A shard without an index is read in large pieces."""
    path = write(tmp_path / "a.tar", [{"x": i, "bytes": bytes(70_000)} for i in range(400)], footer=False)
    content = Path(path).read_bytes()
    url = http_server.put("c/a.tar", content)
    cache = tc.open(url)
    requests = http_server.log()
    assert len(requests) <= 3 + 3 * len(content) // (1 << 22)
    assert sum(request.nbytes for request in requests) < 1.1 * len(content)
    assert cache[399]["x"] == 399
    with pytest.raises(tc.TarFormatError, match="c/b.tar: .*truncated"):
        tc.open(http_server.put("c/b.tar", bare[: len(bare) // 2 // 512 * 512]))
    with pytest.raises(tc.TarFormatError, match="c/b.tar"):
        tc.open(http_server.put("c/b.tar", b"something else" * 100))
    with pytest.raises(tc.TarFormatError, match="the file is empty"):
        tc.open(http_server.put("c/b.tar", b""))


def test_many_indexes(http_server: HttpServer, shard: bytes, bare: bytes) -> None:
    """With and without an index, more shards than there are threads."""
    for i in range(100):
        http_server.put(f"c/{i:03d}.tar", bare if i % 30 == 3 else shard)
    with tc.open(f"{http_server.url}/c/{{000..099}}.tar") as cache:
        assert len(cache) == 600
        assert_same(SAMPLES[3], cache[3 * 6 + 3])
    http_server.delete("c/050.tar")
    http_server.put("c/070.tar", b"something else" * 1000)
    with pytest.raises(tc.MissingShardError, match="c/050.tar: the shard does not exist"):
        tc.open(f"{http_server.url}/c/{{000..099}}.tar")
    http_server.put("c/050.tar", shard)
    with pytest.raises(tc.TarFormatError, match="c/070.tar: "):
        tc.open(f"{http_server.url}/c/{{000..099}}.tar")


# --- indexes that are kept on disk


def test_kept_indexes(http_server: HttpServer, shard: bytes, tmp_path: Path) -> None:
    kept, url = tmp_path / "kept", http_server.put("c/a.tar", shard)
    with tc.open(url, keep_indexes=kept) as cache:
        assert_same(SAMPLES, list(cache))
    (path,) = kept.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) & 0o077 == 0
    http_server.log()
    with tc.open(url, keep_indexes=kept) as cache:
        assert [nbytes for *_, nbytes in _log(http_server)] == ["bytes=0-0"]
        assert_same(SAMPLES[3], cache[3])
        assert all(request.method == "GET" for request in http_server.log())
    # another object under the same url, of the same length
    other = shard.replace(b"003.safetensors", b"004.safetensors", 1)
    http_server.put("c/a.tar", other)
    with tc.open(url, keep_indexes=kept):
        assert [nbytes for *_, nbytes in _log(http_server)] == ["bytes=0-0", "bytes=-65536"]
    assert [*kept.iterdir()] == [path]


@pytest.mark.parametrize("damage", [0, 10, 200, -1, -20, "cut", "empty", "other", "folder", "pickle", "long"], ids=str)
def test_damaged_kept_indexes(http_server: HttpServer, shard: bytes, tmp_path: Path, damage: int | str) -> None:
    kept, url = tmp_path / "kept", http_server.put("c/a.tar", shard)
    tc.open(url, keep_indexes=kept)
    (path,) = kept.iterdir()
    content = bytearray(path.read_bytes())
    if isinstance(damage, int):
        content[damage] ^= 1
        path.write_bytes(content)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "long":
        os.truncate(path, 1 << 40)  # sparse: more than fits into memory
    else:
        texts = {
            "cut": bytes(content[:-100]),
            "empty": b"",
            "other": b'{"is_own": []}\n',
            "pickle": b"cos\nsystem\n(S'false'\ntR.",
        }
        path.write_bytes(texts[str(damage)])
    http_server.log()
    with tc.open(url, keep_indexes=kept) as cache:
        assert _gets(http_server) == ["/c/a.tar"]
        assert_same(SAMPLES, list(cache))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "xdg", "TENSORCACHE_INDEXES": ""}, "xdg/wds_tensorcache/indexes"),
        ({"XDG_CACHE_HOME": "xdg", "TENSORCACHE_INDEXES": "here"}, "here"),
        ({"TENSORCACHE_INDEXES": "OFF"}, None),
        ({}, ".cache/wds_tensorcache/indexes"),
    ],
)
def test_where_indexes_are_kept(
    http_server: HttpServer,
    shard: bytes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    monkeypatch.delenv("TENSORCACHE_INDEXES")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # XDG's rules: ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value if value in ("", "off", "OFF") else str(tmp_path / value))
    tc.open(http_server.put("c/a.tar", shard)).close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in files] == ([] if expected is None else [tmp_path / expected])


def test_a_folder_that_cannot_be_written(http_server: HttpServer, shard: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with tc.open(http_server.put("c/a.tar", shard), keep_indexes=tmp_path / "file" / "kept") as cache:
        assert_same(SAMPLES[0], cache[0])
    with tc.open(http_server.put("c/a.tar", shard), keep_indexes=False) as cache:
        assert_same(SAMPLES[0], cache[0])


def test_a_bounded_folder(
    http_server: HttpServer, shard: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes that were not used for the longest time are removed first."""
    url, kept = http_server.put("c/a.tar", shard), tmp_path / "kept"
    with tc.open(f"{url}?0", keep_indexes=kept):
        (first,) = kept.iterdir()
    limit = 20 * first.stat().st_size
    monkeypatch.setattr("wds_tensorcache.shards.kept_indexes._MAX_NBYTES", limit)
    for i in range(1, 60):
        tc.open(f"{url}?{i}", keep_indexes=kept).close()
        tc.open(f"{url}?0", keep_indexes=kept).close()  # so it was used recently
    assert sum(path.stat().st_size for path in kept.iterdir()) <= 1.1 * limit
    assert first.exists()
