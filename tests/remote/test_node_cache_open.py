"""`tc.open(url, cache_dir=…)`: batches, lazy tensors and samples through a node's cache, against a web server."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests import children, same
from tests.reading.batches import write as write_samples
from tests.remote.servers.http_server import HttpServer, Request
from wds_tensorcache.storage.node_cache.block_file import BLOCK, SUFFIX

NUM_SAMPLES, NUM_SHARDS = 60, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of shards."""
    write(tmp_path / "shards", seed=0)
    return tmp_path / "shards"


def write(folder: Path, seed: int) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(seed)
    samples = [{"latent": draw(4, 16, 16), "text": draw(5 + i % 3, 9), "n": i} for i in range(NUM_SAMPLES)]
    write_samples(folder / "train-%06d.tar", samples, max_samples=NUM_SAMPLES // NUM_SHARDS, overwrite=True)


@pytest.fixture
def server(http_server: HttpServer, folder: Path) -> HttpServer:
    http_server.set(folder=folder)
    return http_server


def read(cache: tc.TensorCache, indices: Any) -> Any:
    return cache.read_batch(indices, collate={"text": "list"})


def assert_same(cache: tc.TensorCache, local: tc.TensorCache, indices: Any) -> None:
    same.assert_same(read(local, indices), read(cache, indices))


def epoch(cache: tc.TensorCache, local: tc.TensorCache, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(NUM_SAMPLES)
    for begin in range(0, NUM_SAMPLES, 10):
        assert_same(cache, local, order[begin : begin + 10])


def blocks(log: list[Request]) -> Counter[tuple[str, int]]:
    """Return how often each block of each shard was sent."""
    counts: Counter[tuple[str, int]] = Counter()
    for request in log:
        if request.path.endswith(".tar") and request.range is not None and not request.range.startswith("bytes=-"):
            begin, last = map(int, request.range.removeprefix("bytes=").split("-"))
            counts.update((request.path, block) for block in range(begin // BLOCK, last // BLOCK + 1))
    return counts


def test_the_second_epoch_makes_no_request(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    local = tc.open(folder)
    with tc.open(server.url, cache_dir=tmp_path / "cache", cache_nbytes=1 << 30) as cache:
        epoch(cache, local, 0)
        assert set(blocks(server.log()).values()) == {1}
        epoch(cache, local, 1)
        # all bytes of the samples are there, though not the index that follows them; nothing is left to check
        assert set(cache._store.whole_copies) == set(range(NUM_SHARDS))
        loader = tc.Loader(cache.select("latent"), 7, num_threads=3, seed=3)
        assert sorted(n for batch in loader for n in batch["n"]) == list(range(NUM_SAMPLES))
        assert loader._ahead.count == 2  # no more than from a local disk
        assert server.log() == []
        for i in (0, 17, 59):
            assert torch.equal(cache[i]["latent"].load(), local[i]["latent"].load())
            assert cache[i]["n"] == i
            assert cache[i]["text"][:0].numel() == 0
        assert server.log() == []
        copy = pickle.loads(pickle.dumps(cache))
        epoch(copy, local, 1)
        assert not blocks(server.log())
    with tc.open(server.url, cache_dir=tmp_path / "cache") as again:
        epoch(again, local, 2)
    log = server.log()
    assert not blocks(log)  # the manifest, and one request for each index
    assert len(log) <= 1 + NUM_SHARDS
    # no other user may read them, and they do not show the address
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "cache").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.host.encode() not in path.name.encode() + path.read_bytes()


def test_batches_are_right_while_another_process_evicts_their_shards(
    folder: Path, server: HttpServer, tmp_path: Path
) -> None:
    nbytes = sum(file.stat().st_size for file in folder.glob("*.tar"))
    limit = nbytes // 2

    def work(seed: int) -> None:
        # from a slow server, larger gaps are fetched, and one read may need more than the limit
        warnings.simplefilter("ignore")
        with tc.open(server.url, cache_dir=tmp_path / "cache", cache_nbytes=limit) as cache, tc.open(folder) as local:
            for number in range(8):
                epoch(cache, local, 100 * seed + number)

    started = [children.start(lambda seed=seed: work(seed)) for seed in range(3)]
    assert children.finish(started) == [0] * 3
    assert max(blocks(server.log()).values()) > 1
    assert sum(512 * file.stat().st_blocks for file in (tmp_path / "cache").iterdir()) <= limit


def test_the_bytes_of_a_mapped_shard_outlive_its_eviction(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    nbytes = max(file.stat().st_size for file in folder.glob("*.tar"))
    with tc.open(folder) as local, tc.open(server.url, cache_dir=place) as cache:
        for _ in range(3):  # by requests, then from the disk, then out of a map
            assert_same(cache, local, range(15))
        ((begin, end, line),) = maps(place)
        assert "(deleted)" not in line
        with tc.open(server.url, cache_dir=place, cache_nbytes=nbytes * 3 // 2) as other:
            for first in (15, 30, 45):
                assert_same(other, local, range(first, first + 15))
        assert [line for *_, line in maps(place) if "(deleted)" in line]
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(begin)
            assert len(memory.read(end - begin)) == end - begin  # of a truncated file: an error, or SIGBUS for a copy
        assert_same(cache, local, range(15))
        assert not [line for *_, line in maps(place) if "(deleted)" in line]


def test_shards_that_this_process_evicts_take_no_space(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    place, nbytes = tmp_path / "cache", max(file.stat().st_size for file in folder.glob("*.tar"))
    with tc.open(folder) as local, tc.open(server.url, cache_dir=place, cache_nbytes=nbytes * 3 // 2) as cache:
        for first in [*range(0, 60, 15), 0]:
            for _ in range(3):
                assert_same(cache, local, range(first, first + 15))
        assert len([line for *_, line in maps(place) if "(deleted)" in line]) <= 1


def maps(folder: Path) -> list[tuple[int, int, str]]:
    """Return the addresses `[begin, end)` of each map of a file in a folder, and its line in `/proc/self/maps`."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [(*(int(address, 16) for address in line.split()[0].split("-")), line) for line in lines]  # type: ignore[misc]


def test_evicted_between_two_reads(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        for number in range(4):
            epoch(cache, local, number)
            for file in (tmp_path / "cache").glob(f"*{SUFFIX}"):
                # as the eviction by another process
                fd = os.open(file, os.O_RDWR)
                file.unlink()
                os.ftruncate(fd, 0)
                os.close(fd)
        assert set(blocks(server.log()).values()) == {4}


def test_files_that_become_read_only_after_they_were_filled(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    """As after a fault of the disk, when the system makes it read-only: their blocks are still read."""
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        epoch(cache, local, 0)
        files = list((tmp_path / "cache").glob(f"*{SUFFIX}"))
        changed = subprocess.run(["chattr", "+i", *files], check=False, capture_output=True, text=True)
        try:
            if changed.returncode:
                pytest.skip(f"needs the right to make files immutable: {changed.stderr.strip()}")
            server.log()
            time.sleep(1)  # uses of a file are noted once a second
            epoch(cache, local, 1)
            assert not server.log()
        finally:
            subprocess.run(["chattr", "-i", *files], check=False, capture_output=True)


def test_a_changed_shard_is_refused_and_never_mixed(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        assert_same(cache, local, range(10))
        expected = read(local, range(10))["latent"]
        write(folder, seed=1)
        assert torch.equal(read(cache, range(10))["latent"], expected)  # from the cache
        with pytest.raises(tc.FormatError, match="changed"):
            read(cache, range(NUM_SAMPLES))
    with tc.open(server.url, cache_dir=tmp_path / "cache") as again, tc.open(folder) as local:
        epoch(again, local, 0)
        assert not torch.equal(read(again, range(10))["latent"], expected)


def test_without_etag_and_date_nothing_is_cached(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    server.set(etag=None, last_modified=False)
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        with pytest.warns(UserWarning, match="neither an ETag nor a date") as caught:
            read(cache, range(10))
        assert [each.filename for each in caught] == [__file__]
        assert_same(cache, local, range(10))
    assert not list((tmp_path / "cache").iterdir())


def test_errors_of_the_server_reach_the_caller(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        assert_same(cache, local, [0])
        server.script("train-000000.tar", {"status": 403, "times": -1})
        with pytest.raises(tc.RemoteError, match="403"):
            read(cache, range(12))
        server.script("train-000000.tar")
        epoch(cache, local, 0)


def test_arguments(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_nbytes=5 needs cache_dir="):
        tc.open(server.url, cache_nbytes=5)
    with pytest.raises(ValueError, match="cache_nbytes=0"):
        tc.open(server.url, cache_dir=tmp_path / "cache", cache_nbytes=0)
    with pytest.raises(TypeError, match="cache_nbytes="):
        tc.open(server.url, cache_dir=tmp_path / "cache", cache_nbytes="5GB")  # type: ignore[arg-type]
    tc.open(folder, cache_dir=tmp_path / "unused")
    assert not (tmp_path / "unused").exists()


def test_a_server_without_ranges(folder: Path, server: HttpServer, tmp_path: Path) -> None:
    server.set(ranges=False)
    with tc.open(server.url, cache_dir=tmp_path / "cache") as cache, tc.open(folder) as local:
        for number in range(3):
            epoch(cache, local, number)
            assert bool(server.log()) == (number == 0)
