"""A node's cache in one process and in several: right bytes, each block fetched once, whatever is killed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import children
from tests.remote.objects import Objects, cached, nbytes_on_disk
from wds_tensorcache.storage.node_cache import folder
from wds_tensorcache.storage.node_cache.block_file import BLOCK
from wds_tensorcache.storage.node_cache.cache import NodeCache, open_node_cache
from wds_tensorcache.storage.node_cache.identity import digest_of
from wds_tensorcache.storage.remote.remote_file import RemoteFile
from wds_tensorcache.storage.remote.retry import ObjectInfo

MB = 1 << 20


def read_random(cache: NodeCache, objects: Objects, files: list[RemoteFile], seed: int, rounds: int) -> None:
    """Read random ranges of random objects, several at a time, and compare them."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        ranges = []
        for _ in range(random.integers(1, 8)):
            file = files[random.integers(len(files))]
            begin, end = sorted(random.integers(0, file.nbytes + 1, 2).tolist())
            end = min(end, begin + 20_000)
            cut = int(random.integers(0, end - begin + 1))
            ranges.append((file, begin, [bytearray(cut), bytearray(end - begin - cut)]))
        cache.read_many(ranges)
        for file, begin, buffers in ranges:
            found = b"".join(buffers)
            assert found == objects.content(file.url)[begin : begin + len(found)]


def blocks_requested(requests: list[tuple[str, int, int]]) -> Counter[tuple[str, int]]:
    return Counter(
        (url, block)
        for url, begin, nbytes in requests
        for block in range(begin // BLOCK, -(-(begin + nbytes) // BLOCK))
    )


def test_a_read_of_no_bytes_makes_no_request(objects: Objects, path: Path) -> None:
    file = cached(open_node_cache(path), objects.add("a.tar", BLOCK))
    assert file.read(5, 5) == b""
    assert objects.requests() == []


def test_processes_and_threads_request_each_block_once(objects: Objects, path: Path) -> None:
    """Four processes open the cache, four are forked from a reader, and six threads share it."""
    objects.server.set(latency_s=0.002)
    added = [objects.add(f"{number}.tar", 64 * BLOCK + 1 + number) for number in range(3)]
    inherited = open_node_cache(path)
    of_parent = [cached(inherited, each) for each in added]
    read_random(inherited, objects, of_parent, 99, 3)

    def work(seed: int) -> None:
        cache = open_node_cache(path) if seed % 2 else inherited
        files = [cached(cache, each) for each in added] if seed % 2 else of_parent
        read_random(cache, objects, files, seed, 20)
        cache.read_many([(file, 0, [bytearray(file.nbytes)]) for file in files])

    started = [children.start(lambda seed=seed: work(seed)) for seed in range(8)]
    with ThreadPoolExecutor(6, "readers") as pool:
        list(pool.map(lambda seed: read_random(inherited, objects, of_parent, seed, 20), range(10, 16)))
    assert children.finish(started) == [0] * 8
    counts = blocks_requested(objects.requests())
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * 65


@pytest.mark.long
def test_killed_processes_leave_nothing_wrong(objects: Objects, path: Path) -> None:
    objects.server.set(latency_s=0.001)
    added = [objects.add(f"{number}.tar", 40 * BLOCK + 5) for number in range(3)]
    random = np.random.default_rng(7)

    def work(seed: int) -> None:
        cache = open_node_cache(path, 60 * BLOCK)
        read_random(cache, objects, [cached(cache, each) for each in added], seed, 1000)

    for kill in range(40):
        started = [children.start(lambda seed=3 * kill + number: work(seed)) for number in range(3)]
        time.sleep(float(random.uniform(0, 0.06)))
        for child in started:
            os.kill(child, signal.SIGKILL)
        assert children.finish(started) == [-signal.SIGKILL] * 3
        cache = open_node_cache(path, 60 * BLOCK)
        # no lock remains, and all bytes are right
        read_random(cache, objects, [cached(cache, each) for each in added], kill, 3)
    cache = open_node_cache(path)
    for each in added:
        assert cached(cache, each).read(0, each[1]) == objects.content(each[0])


def test_the_limit_holds_over_all_processes(objects: Objects, path: Path) -> None:
    limit = 100 * BLOCK
    added = [objects.add(f"{number}.tar", 40 * BLOCK) for number in range(8)]

    def work(seed: int) -> None:
        cache = open_node_cache(path, limit)
        read_random(cache, objects, [cached(cache, each) for each in added], seed, 60)

    space = open_node_cache(path, limit).folder
    started = [children.start(lambda seed=seed: work(seed)) for seed in range(4)]
    most, codes = 0, []
    while len(codes) < len(started):
        with space._lock_space():  # else a file could be seen before it is evicted, and another one after it has grown
            most = max(most, nbytes_on_disk(path))
        done, status = os.waitpid(started[len(codes)], os.WNOHANG)
        codes += [os.waitstatus_to_exitcode(status)] if done else []
        time.sleep(0.001)
    assert codes == [0] * 4
    assert 0 < most <= limit
    requested = sum(blocks_requested(objects.requests()).values())
    assert requested > 8 * 40  # blocks were evicted and fetched again


def test_a_stopped_process_does_not_stop_others(objects: Objects, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = objects.add("a.tar", 8 * BLOCK)
    objects.server.script("a.tar", {"stall_s": 600})
    child = children.start(lambda: cached(open_node_cache(path), added).read(0, 8 * BLOCK))
    try:
        while not objects.requests():  # the child has locked the blocks, and fetches them
            time.sleep(0.005)
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(folder, "_WAIT_S", 0.05)
        cache = open_node_cache(path)
        with pytest.warns(UserWarning, match="a process was stopped"):
            assert cached(cache, added).read(0, 8 * BLOCK) == objects.content(added[0])
        assert cached(cache, added).read(5, 80) == objects.content(added[0])[5:80]
    finally:
        os.kill(child, signal.SIGKILL)
        children.finish([child])
    read = cached(open_node_cache(path), added).read
    assert read(0, 8 * BLOCK) == objects.content(added[0])
    objects.requests()
    assert read(0, 8 * BLOCK) == objects.content(added[0])
    assert objects.requests() == []


def test_a_bound_on_open_files(objects: Objects, path: Path) -> None:
    added = [objects.add(f"{number}.tar", 2 * BLOCK) for number in range(40)]
    cache = open_node_cache(path, max_open=8)
    files = [cached(cache, each) for each in added]
    for _ in range(2):
        ranges = [(file, 0, [bytearray(file.nbytes)]) for file in files]
        cache.read_many(ranges)
        assert all(bytes(buffer) == objects.content(file.url) for file, _, (buffer,) in ranges)
        assert sum(path in each.resolve().parents for each in Path("/proc/self/fd").iterdir()) <= 8
    assert len(objects.requests()) == 40


def test_names_of_objects() -> None:
    one = ObjectInfo(5, '"a"')

    def name(url: str, info: ObjectInfo = one) -> bytes:
        return digest_of(url, info)

    assert name("https://h/a.tar") == name("https://user:secret@h/a.tar") == name("https://h/a.tar?X-Amz-Signature=1")
    assert name("https://h/a.tar?id=1&Signature=x&Expires=7") == name("https://h/a.tar?id=1&Signature=y&Expires=8")
    date = ObjectInfo(5, "Wed, 21 Oct 2015 07:28:00 GMT")  # two revisions may have the same
    distinct = [
        name("https://h/a.tar", date),
        name("https://h/a.tar?Signature=x", date),
        name("https://h/a.tar?Signature=y", date),
        name("https://user:secret@h/a.tar", date),
        name("https://other:secret@h/a.tar", date),
        name("https://h/a.tar"),
        name("https://h/a.tar?id=1"),
        name("https://h/a.tar?id=2"),
        name("https://h:8000/a.tar"),
        name("s3://h/a.tar"),
        name("s3://h/a.tar#1"),
        name("s3://h/a.tar?id=1"),
        name("https://h/a.tar", ObjectInfo(6, '"a"')),
        name("https://h/a.tar", ObjectInfo(5, '"b"')),
    ]
    assert len(set(distinct)) == len(distinct)
