"""Positioned reads that stop early, a bound on open files, and nothing left open after them."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from wds_tensorcache.storage import files as storage
from wds_tensorcache.storage import system as systems


@pytest.fixture(autouse=True)
def own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the limit that a test passes from the other tests."""
    monkeypatch.setattr(storage, "_max_open", None)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc, of Linux")


@pytest.fixture(params=["as it is", "short", "would block"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A system whose calls stop early, or on which no byte is in memory."""
    preadv, pread = os.preadv, os.pread
    rng = random.Random(1)

    def short(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        left = rng.randint(1, 700)
        for at, buffer in enumerate(buffers):
            if len(buffer) >= left:
                return preadv(fd, [*buffers[:at], memoryview(buffer)[:left]], offset)
            left -= len(buffer)
        return preadv(fd, buffers, offset)

    def refuse(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EAGAIN, "the byte is not in memory")
        return preadv(fd, buffers, offset)

    if request.param == "short":
        monkeypatch.setattr(os, "preadv", short)
        monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 1000), offset))
    elif request.param == "would block":
        monkeypatch.setattr(os, "preadv", refuse)
    return str(request.param)


def test_a_batch_on_every_system(tmp_path: Path, system: str) -> None:
    write(
        tmp_path, [{"x": torch.full((1000,), i), "y": [torch.tensor(i)] * 3, "i": i} for i in range(30)], max_samples=10
    )
    for io in ("auto", "pread"):
        with tc.open(tmp_path, io=io) as cache:
            batch = cache.read_batch([29, 3, 3, 17])
            assert batch["x"][:, 999].tolist() == [29, 3, 3, 17]
            assert (batch["i"].tolist(), batch["y"][2].tolist()) == ([29, 3, 3, 17], [29, 3, 3, 17])
            assert [int(sample["x"][7]) for sample in cache] == list(range(30))


def test_files_on_a_network_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of such a file waits for the network at each page."""
    many_shards(tmp_path, 3)
    for kind in ("nfs4", "ext4"):
        monkeypatch.setattr(systems, "_DEVICES", {})
        monkeypatch.setattr(systems, "file_system", lambda path, kind=kind: (kind, kind == "nfs4"))
        with tc.open(tmp_path) as cache:
            assert cache.read_batch(range(6))["x"][:, 0].tolist() == list(range(6))
            assert len(maps(tmp_path)) == (0 if kind == "nfs4" else 3)


def many_shards(folder: Path, count: int) -> None:
    samples = {f"{i}": {"x": torch.full((10,), i), "large": torch.full((2_000,), i)} for i in range(2 * count)}
    write(folder / "%04d.tar", samples, max_samples=2, dali_index=False, manifest=False)


def descriptors() -> set[str]:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(path) for path in paths if os.path.lexists(path)}


def maps(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


USE = """
    import os, random, sys
    import torch
    import wds_tensorcache as tc

    def num_open():
        return sum(os.path.realpath(f"/proc/self/fd/{fd}").endswith(".tar") for fd in os.listdir("/proc/self/fd"))

    order = random.Random(0).sample(range(300), 120)
    opened = []
    for options in ({}, {"io": "pread"}, {"max_open_files": 16}, {"io": "pread"}):
        opened.append(cache := tc.open(sys.argv[1], **options))  # four caches, open together
        for i in order:
            assert int(cache[i]["x"].load()[9]) == i
        assert int(cache[7]["large"].load(copy=False)[9]) == 7
        for names in (["x"], ["*"]):
            for at in range(0, 120, 40):
                batch = cache.select(names).read_batch(order[at : at + 40])
                assert batch["x"][:, 3].tolist() == order[at : at + 40]
                assert batch["x"][:, 9].tolist() == order[at : at + 40]
        assert [key for key in cache.keys()] == [str(i) for i in range(300)]
        assert cache.read_batch(["299", "0"])["x"][:, 0].tolist() == [299, 0]
        print(num_open())
"""


@pytest.fixture(scope="module")
def shards150(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    many_shards(folder, 150)
    return folder


def under_limit(limit: int, code: str, *arguments: Any) -> list[str]:
    """Run code in a process that may open so many files; return the lines that it prints."""
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_shard_that_is_cut_short_under_an_open_cache(tmp_path: Path) -> None:
    many_shards(tmp_path, 1)
    with tc.open(tmp_path, io="pread") as cache:
        lazy = cache[1]["large"]
        os.truncate(tmp_path / "0000.tar", 1000)
        for read in (lambda: cache[1], lazy.load):
            with pytest.raises(tc.FormatError, match=r"0000\.tar: the file was cut short and ends at byte 1000; copy"):
                read()


@pytest.mark.long
@linux
def test_one_limit_for_all_caches(shards150: Path) -> None:
    """A quarter of the limit; a cache that is opened with another number changes it for all."""
    assert under_limit(128, USE, shards150) == ["32", "32", "16", "16"]


@linux
def test_maps_have_a_bound(shards150: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards beyond it are read."""
    count, nbytes = storage._Map.count, storage._Map.total_nbytes
    for name, bound in (("_MAX_MAPS", count + 7), ("_MAX_MAPPED_NBYTES", nbytes + 300_000)):
        with monkeypatch.context() as patch:
            patch.setattr(storage, name, bound)
            with tc.open(shards150) as cache:
                order = random.Random(1).sample(range(300), 100)
                assert cache.read_batch(order)["x"][:, 9].tolist() == order
                assert 0 < len(maps(shards150)) < 30
    assert maps(shards150) == []


@linux
def test_close_leaves_nothing_open(shards150: Path) -> None:
    before, threads = descriptors(), threading.active_count()
    cache = tc.open(shards150, num_threads=4, max_open_files=50)
    views = [cache[i]["large"].load(copy=False) for i in range(0, 100, 7)]
    cache.read_batch(range(60))
    cache.close()
    assert maps(shards150)
    assert [int(view[5]) for view in views] == list(range(0, 100, 7))  # as long as they live
    del views
    assert maps(shards150) == []
    assert descriptors() - before == set()
    assert threading.active_count() == threads


def test_a_file_that_is_read_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_shards(tmp_path, 3)
    cache = tc.open(tmp_path, max_open_files=1, io="pread")
    lazy = cache[0]["large"]
    lazy.load()
    reading, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(fd: int, *args: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            go_on.wait(10)
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", slow)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(lazy.load()))
    thread.start()
    assert reading.wait(10)
    for i in range(2, 6):  # the file is evicted, and its descriptor would be another's
        assert int(cache[i]["large"].load()[0]) == i
    cache.close()
    go_on.set()
    thread.join(10)
    assert int(found[0][1_999]) == 0
