"""A manifest at a url lists the digest of each shard's index: another shard of the same length is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write as write_samples
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import WriteServer

OTHER = r"000001\.tar: another shard has replaced the one that was listed: its index has the digest [0-9a-f]{16}, but "


def write(folder: Path | str, first: int) -> Any:
    samples = {f"{i:03d}": {"v": torch.full((4,), i)} for i in range(first, first + 10)}
    write_samples(f"{folder}/%06d.tar", samples, max_samples=5)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "served" / "a", 0)


@pytest.fixture
def server(http_server: HttpServer, folder: Path) -> HttpServer:
    http_server.set(folder=folder.parent)
    return http_server


def refused(cache: tc.TensorCache) -> None:
    assert int(cache[0]["v"][0]) == 0
    with pytest.raises(tc.FormatError, match=f"{OTHER}.*manifest.json lists [0-9a-f]{{16}}; .*upload its own manifest"):
        cache[5]


def change_digest(folder: Path) -> None:
    """Let the manifest list another digest of the second shard's index."""
    document = json.loads((folder / "manifest.json").read_text())
    document["shardlist"][1]["index"] = "0123456789abcdef"
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("is_kept", [False, True])
def test_another_shard(folder: Path, server: HttpServer, tmp_path: Path, is_kept: bool) -> None:
    """The kept index of a shard is compared with a new manifest, too."""
    options: dict[str, Any] = {"keep_indexes": tmp_path / "kept"} if is_kept else {}
    for _ in range(2):
        with tc.open(f"{server.url}/a", **options) as cache:
            assert [int(sample["v"][0]) for sample in cache] == list(range(10))
    if is_kept:
        change_digest(folder)
    else:
        shutil.copy(write(tmp_path / "b", 500) / "000001.tar", folder)
    with tc.open(f"{server.url}/a", **options) as cache:
        refused(cache)


def test_an_index_from_elsewhere(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    """An index of another tool may have another digest: it is compared with the shard alone."""
    for number in (0, 1):
        tc.write_index(f"{server.url}/a/00000{number}.tar", index_folder=tmp_path / "indexes")
    change_digest(folder)
    with tc.open(f"{server.url}/a", index_folder=tmp_path / "indexes") as cache:
        assert [int(sample["v"][0]) for sample in cache] == list(range(10))


def test_a_writer_does_not_resume_with_it(write_server: WriteServer, tmp_path: Path) -> None:
    """The manifest of an object store has digests, too."""
    url = "s3://bucket/cache"
    write(url, 0)
    write_server.put("cache/000001.tar", (write(tmp_path / "b", 500) / "000001.tar").read_bytes())
    with tc.open(url) as cache:
        refused(cache)
    with pytest.raises(tc.FormatError, match=OTHER):
        tc.ShardWriter(url, max_samples=5, resume=True)
