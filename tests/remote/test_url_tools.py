"""Tools that take the url of a cache: the command line, DALI's source, shared datasets; and those that refuse it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.remote.caches import big, small, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same
from wds_tensorcache.inspecting.survey import Survey

SAMPLES = [small(i) for i in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_cache(root / "cache", SAMPLES, max_samples=3)
    write_cache(root / "big", list(map(big, range(4))))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    with HttpServer(folder) as server:
        yield server


def _run(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, str, str]:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from wds_tensorcache.cli.app import run

    status = run(list(arguments))
    out, err = capsysbinary.readouterr()
    return status, out.decode("latin-1"), err.decode()


def test_commands(server: HttpServer, folder: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    url, local = f"{server.url}/cache?signature=s3cret", str(folder / "cache")
    for arguments in (
        ["ls", "--json"],
        ["ls", "-l"],
        ["schema", "--json"],
        ["show", "005", "--json"],
        ["stats", "--json"],
        ["cat", "003", "latent"],
    ):
        command, *others = arguments
        expected = _run(capsysbinary, command, local, *others)
        status, out, err = _run(capsysbinary, command, url, *others)
        assert (status, out) == (0, expected[1]), err
    page = tmp_path / "page.html"
    assert _run(capsysbinary, "view", url, "-o", str(page))[0] == 0
    assert "s3cret" not in page.read_text()
    out = tmp_path / "out"
    assert _run(capsysbinary, "export", url, str(out))[0] == 0
    assert os.listdir(out)


def test_pages_and_statistics_of_urls(
    server: HttpServer, folder: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    pages = []
    for source in (str(folder / "cache"), f"{server.url}/cache"):
        page = tmp_path / f"{len(pages)}.html"
        assert _run(capsysbinary, "view", source, "-o", str(page))[0] == 0
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]
    server.log()
    with tc.open(f"{server.url}/cache") as cache:
        list(cache.keys())
        server.log()
        found = Survey(cache, range(len(cache))).tensors
        requests = server.log()
    # values for the description, then for each sample its structure and all tensors
    assert len(requests) <= 3 * len(SAMPLES)
    with tc.open(folder / "cache") as cache:
        assert Survey(cache, range(len(cache))).tensors == found
    for name in os.listdir(folder / "cache"):
        server.put(f"changed/{name}", (folder / "cache" / name).read_bytes())
    with tc.open(f"{server.url}/changed") as cache:
        list(cache.keys())
        server.put("changed/001.tar", (folder / "cache" / "001.tar").read_bytes()[::-1])
        survey = Survey(cache, range(len(cache)), for_page=True)
        assert set(survey.errors) == {3, 4, 5}
        assert set(survey.samples) == {0, 1, 2, 6}
        with pytest.raises(tc.FormatError, match="changed"):
            Survey(cache, range(len(cache)))


def test_commands_that_fail(server: HttpServer, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    status, _, err = _run(capsysbinary, "ls", f"{server.url}/nothing?signature=s3cret")
    assert (status, "s3cret" in err) == (2, False)
    assert "nothing has no manifest.json" in err
    server.script("cache/manifest.json", {"status": 403})
    status, _, err = _run(capsysbinary, "ls", f"{server.url}/cache?signature=s3cret")
    assert (status, "s3cret" in err, "403" in err) == (1, False, True)
    for command in ("verify", "bench", "repair", "merge", "reshard", "drop", "import"):
        others = {"verify": [], "bench": [], "drop": ["new", "003"]}.get(command, ["new"])
        status, _, err = _run(capsysbinary, command, f"{server.url}/cache?signature=s3cret", *others)
        assert (status, "local" in err, "s3cret" in err) == (2, True, False), err


def test_dali(server: HttpServer) -> None:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import pipeline_def

    from dali_plugin import fn

    cache = tc.open(f"{server.url}/big")

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def pipeline(reader: Any) -> Any:
        return reader(cache, ["small"])

    pipe = pipeline(fn.tensorcache)
    pipe.build()
    out = pipe.run()[0]
    assert_same(big(1)["small"].numpy(), out.at(1))
    with pytest.raises(
        ValueError, match=r"DALI's reader reads only local files, but shards are at urls; use fn.tensorcache"
    ):
        pipeline(fn.native_reader)


def _manifest(server: HttpServer) -> Any:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/cache/manifest.json") as response:
        return json.load(response)
