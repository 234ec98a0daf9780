"""Tools that take the url of a cache: the command line, DALI's source, shared datasets; and those that refuse it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.cli.command import run, run_any
from tests.cli.commands import the_server
from tests.remote.caches import big, small, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same

SAMPLES = [small(i) for i in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_cache(root / "cache", SAMPLES, max_samples=3)
    write_cache(root / "big", list(map(big, range(4))))
    return root


@pytest.mark.long
def test_commands(server: HttpServer, folder: Path, tmp_path: Path) -> None:
    url, local = f"{server.url}/cache?signature=s3cret", folder / "cache"
    for command, *others in (
        ["ls", "-l", "--json"],
        ["schema", "--json"],
        ["show", "005", "--json"],
        ["stats", "--json"],
    ):
        assert run(command, url, *others).stdout == run(command, local, *others).stdout
    shown = the_server().run("cat", url, "003", "latent", cwd=tmp_path).stdout
    assert np.array_equal(np.load(io.BytesIO(shown)), SAMPLES[3]["latent"].numpy())
    pages = []
    for source in (local, f"{server.url}/cache", url):
        run("view", source, "-o", tmp_path / "page.html")
        pages.append((tmp_path / "page.html").read_text())
    assert pages[0] == pages[1]
    assert "s3cret" not in pages[2]
    run("export", url, tmp_path / "out")
    assert os.listdir(tmp_path / "out")


def test_statistics_take_few_requests(server: HttpServer) -> None:
    server.log()
    run("stats", f"{server.url}/cache")
    # the manifest, the indexes, values for the description, then for each sample its structure and all tensors
    assert len(server.log()) <= 1 + 3 + 3 * len(SAMPLES)


def test_a_shard_that_changes_while_a_command_reads(server: HttpServer, folder: Path, tmp_path: Path) -> None:
    """The page shows which samples cannot be read; statistics without them would be wrong."""
    for name in os.listdir(folder / "cache"):
        server.put(f"changed/{name}", (folder / "cache" / name).read_bytes())
    for command, *others in (["view", "-o", tmp_path / "page.html"], ["stats"]):
        server.script("changed/001.tar", {"headers": {}}, {"etag": '"another"', "times": -1})
        completed = run_any(command, f"{server.url}/changed", *others)
        assert completed.returncode == 1
        assert "001.tar: the shard was changed" in completed.stderr + (tmp_path / "page.html").read_text()


def test_commands_that_fail(server: HttpServer) -> None:
    failed = run("ls", f"{server.url}/nothing?signature=s3cret", status=2).stderr
    assert "nothing has no manifest.json" in failed
    server.script("cache/manifest.json", {"status": 403})
    failed += run("ls", f"{server.url}/cache?signature=s3cret", status=1).stderr
    assert "403" in failed
    for command in ("verify", "bench", "repair", "merge", "reshard", "drop", "import"):
        others = {"verify": [], "bench": [], "drop": ["new", "003"]}.get(command, ["new"])
        error = run(command, f"{server.url}/cache?signature=s3cret", *others, status=2).stderr
        assert "local" in error
        failed += error
    assert "s3cret" not in failed


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
