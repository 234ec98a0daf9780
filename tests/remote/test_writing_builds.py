"""Caches built and imported at urls, on one and on several ranks; acts that need local folders refuse urls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.cli.commands import the_server
from tests.remote.conftest import wait
from tests.remote.servers.write_server import WriteServer
from tests.remote.written import read_folder, write

URL = "s3://bucket/cache"


def build(out: str | Path, count: int = 23, stop: int | None = None, **options: Any) -> tc.TensorCache:
    """Build a cache of numbers; raise in the batch with the number `stop`."""

    def fn(items: list[int]) -> dict[str, torch.Tensor]:
        if stop in items:
            raise RuntimeError("stop")
        return {"x": torch.tensor(items)[:, None].expand(-1, 8).half()}

    return tc.build(list(range(count)), fn, out, fingerprint={"model": "a"}, batch_size=4, max_samples=7, **options)


def test_a_build_equals_a_local_one_and_resumes(write_server: WriteServer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        build(URL, stop=13)
    write_server.log()
    with build(URL) as cache:
        assert len(cache) == 23
        assert cache[17]["x"][0] == 17
    assert [key for method, key, _ in write_server.log() if method == "PUT" and key.endswith("000.tar")] == []
    with pytest.raises(RuntimeError, match="stop"):
        build(tmp_path / "cache", stop=13)
    build(tmp_path / "cache")
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")
    with pytest.raises(tc.StaleCacheError, match="digest"):
        build(URL, digest=str)


def test_digests_are_compared_in_the_store(write_server: WriteServer) -> None:
    build(URL, digest=str).close()
    write_server.log()
    build(URL, digest=str).close()
    assert len([key for method, key, _ in write_server.log() if method == "GET" and key.endswith(".tar")]) <= 8
    with pytest.raises(tc.StaleCacheError, match="23 of 23 items have changed"):
        build(URL, digest=lambda item: f"{item}a")


def test_two_ranks_build_one_cache(write_server: WriteServer, start: Any, tmp_path: Path) -> None:
    assert wait([start(build, URL, rank=rank, world_size=2) for rank in range(2)]) == [0, 0]
    for rank in range(2):
        build(tmp_path / "cache", rank=rank, world_size=2).close()
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")
    with build(URL, rank=0, world_size=2) as cache:
        assert sorted(int(sample["x"][0]) for sample in cache) == list(range(23))


def test_a_rank_of_another_world_size_at_the_same_time(write_server: WriteServer) -> None:
    def fn(items: list[int]) -> dict[str, torch.Tensor]:
        if 0 in items:
            build(URL, rank=0, world_size=2).close()
        return {"x": torch.tensor(items)}

    with pytest.raises(ValueError, match="r0of2-000000.tar contains .* samples of items of this rank"):
        tc.build(list(range(23)), fn, URL, fingerprint={"model": "a"}, batch_size=4)


@pytest.mark.filterwarnings(
    "ignore:tc.build. 1 item failed, listed in s3.//bucket/cache/failures-r.of2.jsonl:UserWarning"
)
def test_items_that_fail(write_server: WriteServer, tmp_path: Path) -> None:
    """Their list is an object of the folder; another number of ranks takes it over."""
    for rank in range(2):
        build(URL, stop=13, rank=rank, world_size=2, on_error="record", allow_failures=True).close()
    assert len([name for name in write_server.objects("cache/") if "failures-r" in name]) == 1
    with pytest.raises(tc.BuildError, match=r"listed in s3://bucket/cache/failures\.jsonl; the first is item 13 "):
        build(URL, stop=13, on_error="record")
    assert [name for name in write_server.objects("cache/") if "failures" in name] == ["failures.jsonl"]
    listed = the_server().run("ls", URL, "--failed", "--json", cwd=tmp_path, **write_server.environment)
    assert [(record["item"], record["text"]) for record in listed.json] == [(13, "stop")]
    with build(URL) as cache:
        assert sorted(int(sample["x"][0]) for sample in cache) == list(range(23))
    assert [name for name in write_server.objects("cache/") if "failures" in name] == []


def test_imports(write_server: WriteServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(11):
        safetensors.torch.save_file({"x": torch.full((300, 8), i).half()}, str(source / f"{i:02d}.safetensors"))
    for out in (URL, tmp_path / "cache"):
        report = tc.import_cache(source, out, format="files", max_samples=4, num_workers=2)
        assert report.num_written == 11
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")
    with pytest.raises(FileExistsError):
        tc.import_cache(source, URL, format="files")
    assert tc.import_cache(source, URL, format="files", resume=True).num_present == 11


def test_acts_that_need_local_folders_refuse_urls(write_server: WriteServer, tmp_path: Path) -> None:
    write(URL, 5)
    write(tmp_path / "cache", 5)
    local, url = str(tmp_path / "cache"), f"{URL}/new"
    acts = [
        lambda: tc.reshard(local, url),
        lambda: tc.merge([local], url),
        lambda: tc.reshard(URL, tmp_path / "new"),
        lambda: tc.drop(local, url, ["000"]),
        lambda: tc.drop(URL, tmp_path / "new", ["000"]),
        lambda: tc.repair(local, url),
        lambda: tc.verify(URL),
        lambda: build(url, reuse=local),
        lambda: build(tmp_path / "new", reuse=URL),
    ]
    for act in acts:
        with pytest.raises(
            ValueError, match=r"must be on a local disk; .*, as in docs/remote_writing\.md|only local shards"
        ):
            act()
    assert [name for name in write_server.objects("cache/") if name.startswith("new")] == []
    assert json.loads(write_server.objects("cache/")["manifest.json"])["shardlist"][0]["url"] == "000000.tar"
