"""Requests for many ranges at once: the bytes of each, near ranges in one request, large ranges in several."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.remote.servers.http_server import HttpServer

PART_NBYTES = 4 << 20


def serve(server: HttpServer, folder: Path, lengths: list[int], max_samples: int = 1000) -> str:
    """Write samples with a tensor of so many bytes each; return the url of their cache."""
    write(folder / "c", [{"x": tensor(i, nbytes)} for i, nbytes in enumerate(lengths)], max_samples=max_samples)
    for path in (folder / "c").iterdir():
        server.put(f"c/{path.name}", path.read_bytes())
    return f"{server.url}/c"


def tensor(i: int, nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))


def test_random_ranges(http_server: HttpServer, tmp_path: Path) -> None:
    chance = random.Random(3)
    lengths = [chance.choice((0, 1, 100, 9000)) for _ in range(300)]
    with tc.open(serve(http_server, tmp_path, lengths, max_samples=100)) as cache:
        cache.read_tensors([0, 100, 200], collate="list")
        http_server.log()
        indices = [chance.randrange(300) for _ in range(300)]
        tensors = cache.read_tensors(indices, collate="list")["x"]
        assert all(torch.equal(tensor(i, lengths[i]), part) for i, part in zip(indices, tensors, strict=True))
        assert 1 < len(http_server.log()) < 150


@pytest.mark.parametrize("begin", [0, 1])
def test_large_ranges_are_split(http_server: HttpServer, tmp_path: Path, begin: int) -> None:
    nbytes = 2 * PART_NBYTES + 5
    with tc.open(serve(http_server, tmp_path, [nbytes])) as cache:
        lazy = cache[0]["x"]
        http_server.log()
        assert torch.equal(lazy[1:] if begin else lazy.load(), tensor(0, nbytes)[begin:])
        assert sorted(one.nbytes for one in http_server.log()) == [5 - begin, PART_NBYTES, PART_NBYTES]


def test_a_long_manifest(http_server: HttpServer, tmp_path: Path) -> None:
    """It is fetched by several requests, all of one version; beyond a limit it is refused."""
    serve(http_server, tmp_path, [7])
    manifest = (tmp_path / "c" / "manifest.json").read_bytes()
    http_server.put("c/manifest.json", manifest + b" " * (2 * PART_NBYTES))
    http_server.log()
    with tc.open(f"{http_server.url}/c") as cache:
        assert torch.equal(cache[0]["x"].load(), tensor(0, 7))
    assert [one.path for one in http_server.log()][:3] == ["/c/manifest.json"] * 3
    http_server.script("c/manifest.json", {"headers": {}}, {"replace": manifest.decode()})
    with pytest.raises(tc.FormatError, match="changed"):
        tc.open(f"{http_server.url}/c")
    os.truncate(tmp_path / "c" / "manifest.json", 1 << 40)  # sparse: more than fits into memory
    http_server.reset()
    http_server.set(folder=tmp_path)
    with pytest.raises(tc.RemoteError, match="more than"):
        tc.open(f"{http_server.url}/c")
