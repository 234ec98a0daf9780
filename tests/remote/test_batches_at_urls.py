"""Batches, samples and loaders over remote shards: equal to local ones bit for bit, with few requests and bytes."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.caches import big, small, total_nbytes, write_cache
from tests.remote.servers.http_server import HttpServer
from tests.same import assert_same, tensor_bytes

SMALL = [small(i) for i in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_cache(root / "small", SMALL)
    write_cache(root / "big", list(map(big, range(60))), max_samples=20)
    return root


@pytest.fixture
def cache(server: HttpServer) -> Iterator[tc.TensorCache]:
    with tc.open(f"{server.url}/small") as cache:
        server.log()
        yield cache


@pytest.fixture
def local(folder: Path) -> Iterator[tc.TensorCache]:
    with tc.open(folder / "small") as cache:
        yield cache


INDICES = [[3], list(range(23)), [22, 0, 22, 7, 7], ["004", "011"]]


@pytest.mark.parametrize("indices", INDICES, ids=str)
def test_batches(cache: tc.TensorCache, local: tc.TensorCache, indices: list[Any]) -> None:
    collates: list[Any] = ["list", {"text": "pad"}, list]
    for collate in collates:
        assert_same(local.read_batch(indices, collate=collate), cache.read_batch(indices, collate=collate))
    for collate in ("auto", *collates[:2]):
        assert_same(local.read_tensors(indices, collate=collate), cache.read_tensors(indices, collate=collate))
    names = ["latent", "bits.*", "array", "when"]
    assert_same(local.select(names).read_batch(indices), cache.select(names).read_batch(indices))
    with pytest.raises(tc.BatchError, match="'text'"):
        cache.read_batch([0, 1])


def test_samples(server: HttpServer, cache: tc.TensorCache) -> None:
    for i, sample in enumerate(cache):
        assert_same(SMALL[i], sample)
    lazy = cache[5]["latent"]
    assert_same(SMALL[5]["latent"][1:], lazy[1:])
    assert_same(SMALL[5]["latent"], lazy.load(copy=False))
    assert bytes(lazy.view_bytes()) == tensor_bytes(SMALL[5]["latent"])
    sample = cache["005"]
    server.log()
    assert_same(SMALL[5], tc.realize(sample))
    assert len(server.log()) == 1  # for all tensors


def test_a_slice_is_one_range(server: HttpServer) -> None:
    sample = tc.open(f"{server.url}/big")[30]
    server.log()
    part = sample["latent"][3:5]
    (request,) = server.log()
    assert request.nbytes == 2 * 70 * 200 * 2
    assert_same(big(30)["latent"][3:5], part)


def test_one_small_tensor_of_each_sample(server: HttpServer, folder: Path) -> None:
    """At most one request for each sample, and less than 2% of the bytes; indexes and the manifest included."""
    server.log()
    cache = tc.open(f"{server.url}/big").select("small")
    tensors = cache.read_tensors(range(60))
    requests = server.log()
    assert torch.equal(tensors["small"], torch.stack([big(i)["small"] for i in range(60)]))
    assert len(requests) <= 1 + 3 + 60 + 1  # the manifest; three indexes; the structure, from one sample
    assert sum(request.nbytes for request in requests) < 0.02 * total_nbytes(folder / "big")
    batch = cache.read_batch(range(60))
    requests = server.log()
    assert len(requests) <= 61  # the first sample's skeleton tells the structure of the batch
    assert sum(request.nbytes for request in requests) < 60 * 2500 + 2000
    # the values of the batch are in the skeletons
    assert batch["prompt"][3] == "photo 3"
    assert len(server.log()) <= 60
    # from now on, they are fetched together with the tensors
    batch = cache.read_batch(range(0, 60, 2))
    assert 59 <= len(server.log()) <= 60
    assert batch["prompt"][3] == "photo 6"
    assert not server.log()


def test_values_that_are_not_used_are_not_fetched_for_ever(server: HttpServer) -> None:
    cache = tc.open(f"{server.url}/big").select("small")
    cache.read_batch([1])["prompt"][0]
    for _ in range(20):
        server.log()
        cache.read_batch([2, 31])
    assert len(server.log()) == 2


def test_select_looks_at_one_shard(server: HttpServer, cache: tc.TensorCache) -> None:
    cache.select(["latent", "bits.*"])
    assert len(server.log()) == 1
    with pytest.raises(KeyError, match="unknown tensor 'nothing'"):
        cache.select("nothing")
    assert len(server.log()) == 5  # the other indexes, and a skeleton, which may show names that an old index lacks


def test_neighbors_share_requests(server: HttpServer, cache: tc.TensorCache) -> None:
    for _ in range(3):  # until this process knows the template of the samples, each batch also requests a skeleton
        cache.read_tensors(range(23), collate="list")
    server.log()
    cache.read_tensors(range(23), collate="list")
    assert len(server.log()) == 5  # one for each shard
    cache.read_batch(range(23), collate="list")
    server.log()
    cache.read_batch(range(23), collate="list")["prompt"][0]
    assert len(server.log()) <= 10
    with tc.open(f"{server.url}/big") as far:
        far.select("small").read_tensors([0, 19])
        assert [request.nbytes for request in server.log()][-2:] == [2500, 2500]


def test_members(server: HttpServer, cache: tc.TensorCache, local: tc.TensorCache) -> None:
    assert cache.members == local.members == {"json": 23}
    server.log()
    assert cache.read_members(range(23), "json") == local.read_members(range(23), "json")
    assert len(server.log()) == 5
    with pytest.raises(KeyError, match="no member 'txt'"):
        cache.read_members([0], "txt")


def test_mixed_places(server: HttpServer, folder: Path, local: tc.TensorCache) -> None:
    """Samples of local and of remote shards in one batch."""
    sources: list[Any] = [folder / "small" / f"00{i}.tar" for i in range(5)]
    sources[1], sources[3] = f"{server.url}/small/001.tar", f"{server.url}/small/003.tar"
    with tc.open(sources) as mixed:
        for indices in INDICES:
            assert_same(local.read_batch(indices, collate="list"), mixed.read_batch(indices, collate="list"))
        server.log()
        mixed.read_batch([0, 1, 12], collate="list")["prompt"].tolist()
        assert not server.log()


@pytest.mark.parametrize("change", ["same_length", "longer"])
def test_a_changed_shard(server: HttpServer, folder: Path, change: str) -> None:
    path, url = folder / change, f"{server.url}/{change}"
    shutil.copytree(folder / "small", path)
    cache = tc.open(url)
    before = cache.read_tensors(range(5), collate="list")
    lazy = cache[3]["latent"]
    shard = path / "000.tar"
    content = bytearray(shard.read_bytes())
    if change == "longer":
        content += bytes(10240)
    else:
        content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for read in (
        lambda: cache.read_tensors(range(5), collate="list"),
        lambda: cache.read_batch([7, 3], collate="list"),
        lambda: cache[2],
        lazy.load,
        lambda: pickle.loads(pickle.dumps(lazy)).load(),
        lambda: pickle.loads(pickle.dumps(cache))[0],
        lambda: cache.read_members([0], "json"),
    ):
        with pytest.raises(tc.FormatError, match=rf"{change}/000.tar: .*the shard was changed.*open it again"):
            read()
    assert_same(before["latent"], [SMALL[i]["latent"] for i in range(5)])
    assert_same(SMALL[7], cache[7])


# --- processes


def test_pickles(server: HttpServer, cache: tc.TensorCache) -> None:
    copy = pickle.loads(pickle.dumps(cache))
    assert_same(SMALL, list(copy))
    lazy = pickle.loads(pickle.dumps(cache[9]["text"]))
    server.log()
    assert_same(SMALL[9]["text"], lazy)
    (request,) = server.log()
    assert request.headers["if-match"]


def test_forked_children(cache: tc.TensorCache, local: tc.TensorCache) -> None:
    expected = local.read_batch([3, 9, 20], collate="list")

    def work() -> None:
        assert_same(expected, cache.read_batch([3, 9, 20], collate="list"))

    work()  # with threads and connections of the parent
    for _ in range(3):
        assert run_in_child(work, kill_after_s=60) == 0
    work()


# --- loaders


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_torch_loader(cache: tc.TensorCache, local: tc.TensorCache, method: str) -> None:
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 3, "collate": "list"}
    cache.read_batch([0], collate="list")
    found = list(tc.torch_loader(cache, num_workers=1, multiprocessing_context=method, **options))
    for one, other in zip(tc.torch_loader(local, **options), found, strict=True):
        assert_same(one, other)
