"""Writers in several processes at once, killed writers, interrupts, forks, and a full disk."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.conftest import wait
from tests.remote.servers.write_server import WriteServer
from tests.remote.written import read_folder, sample, write

URL = "s3://bucket/cache"
Start = Callable[..., BaseProcess]


def _check(write_server: WriteServer, prefix: str) -> None:
    """Assert that the manifest lists shards that exist, and that each shard is whole."""
    objects = write_server.objects(prefix)
    listed = json.loads(objects.get("manifest.json", b'{"shardlist": []}'))["shardlist"]
    for each in listed:
        assert len(objects[each["url"]]) == each["filesize"]
        assert each["url"].replace(".tar", ".idx") in objects
    numbers = sorted(int(name[:6]) for name in objects if name.endswith(".tar"))
    assert numbers == list(range(len(numbers)))


def test_four_writers_add_to_one_manifest_at_once(write_server: WriteServer, start: Start, tmp_path: Path) -> None:
    assert wait([start(write, f"{URL}/w{number}-%03d.tar", 6, max_samples=2) for number in range(4)]) == [0] * 4
    for number in range(4):
        write(tmp_path / "cache" / f"w{number}-%03d.tar", 6, max_samples=2)
    assert write_server.objects("cache/") == read_folder(tmp_path / "cache")
    swaps = [status for method, key, status in write_server.log() if (method, key) == ("PUT", "cache/manifest.json")]
    assert swaps.count(200) == 12


def test_a_rank_that_resumes_keeps_the_entries_of_a_rank_that_writes(write_server: WriteServer) -> None:
    """Another rank stores a shard and lists it between the two requests with which this one looks at the folder."""
    write(f"{URL}/r1of2-%06d.tar", 5)
    write_server.script({"method": "GET", "suffix": "manifest.json", "hold": True})
    resumes = threading.Thread(target=partial(write, f"{URL}/r0of2-%06d.tar", 0, resume=True))
    resumes.start()
    write_server.wait_until_held()
    write(f"{URL}/r1of2-%06d.tar", 12, resume=True)
    write_server.script()
    resumes.join()
    listed = json.loads(write_server.objects("cache/")["manifest.json"])["shardlist"]
    assert [each["nsamples"] for each in listed] == [5, 5, 2]


@pytest.mark.filterwarnings("ignore:.*r1of2-000000.tar no longer exists")
def test_a_rank_that_resumes_keeps_the_entries_of_a_rank_that_replaces_its_shards(write_server: WriteServer) -> None:
    """Another rank has deleted a shard when this one lists the folder, and has written it anew when this one lists it."""
    write(f"{URL}/r0of2-%06d.tar", 5)
    write(f"{URL}/r1of2-%06d.tar", 5)
    write_server.script({"method": "GET", "suffix": "manifest.json"}, {"method": "GET", "hold": True})
    resumes = threading.Thread(target=partial(write, f"{URL}/r0of2-%06d.tar", 0, resume=True))
    resumes.start()
    write_server.wait_until_held()
    with tc.ShardWriter(f"{URL}/r1of2-%06d.tar", max_samples=5, overwrite=True) as replaces:
        write_server.script({"method": "GET", "suffix": "manifest.json", "hold": True})
        write_server.wait_until_held()
        replaces.write("new", sample(1))
        replaces.write("newer", sample(2))
    write_server.script()
    resumes.join()
    with tc.open(URL) as cache:
        assert list(cache.keys()) == [*(f"{i:03d}" for i in range(5)), "new", "newer"]


def test_killed_writers_leave_whole_shards_and_the_next_one_resumes(
    write_server: WriteServer, start: Start, tmp_path: Path
) -> None:
    url = "s3://bucket/killed"
    write(tmp_path / "cache", 60)
    chance, num_killed = random.Random(7), 0
    for attempt in range(8):
        writer = start(write, url, 60, resume=True)
        time.sleep(chance.uniform(0, 0.1 * 1.4**attempt))
        writer.kill()
        num_killed += wait([writer]) == [-signal.SIGKILL]
        _check(write_server, "killed/")
        write_server.wait_until_idle()
    assert num_killed
    write(url, 60, resume=True)
    objects = write_server.objects("killed/")
    objects.pop(".tensorcache-conditions", None)  # of a writer that was killed while it checked the store
    assert objects == read_folder(tmp_path / "cache")


def test_a_writer_killed_during_an_upload(write_server: WriteServer, start: Start) -> None:
    """Neither before nor after the body is stored is there a half shard; here, the answer is late."""
    write_server.script({"method": "PUT", "suffix": "1.tar", "hold": True})
    url = "s3://bucket/late"
    writer = start(write, url, 23)
    write_server.wait_until_held()
    writer.kill()
    writer.join()
    write_server.script()
    write_server.wait_until_idle()
    _check(write_server, "late/")
    write(url, 23, resume=True)
    _check(write_server, "late/")


def test_an_interrupt_waits_for_finished_shards(write_server: WriteServer) -> None:
    write_server.script({"method": "PUT", "suffix": ".tar", "hold": True})
    is_sent = threading.Event()

    def interrupt() -> None:
        write_server.wait_until_held()
        os.kill(os.getpid(), signal.SIGINT)
        is_sent.set()
        write_server.script()

    def write_three() -> None:
        with tc.ShardWriter(URL, max_samples=2) as sink:
            for i in range(3):
                sink.write(f"{i}", sample(i))
            is_sent.wait()
            time.sleep(60)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        write_three()
    sender.join()
    assert sorted(write_server.objects("cache/")) == ["000000.idx", "000000.tar", "manifest.json"]


def test_a_forked_child_does_not_upload_its_parent_s_shards(write_server: WriteServer) -> None:
    with tc.ShardWriter(URL, max_samples=2) as sink:
        sink.write("a", sample(0))

        def leave() -> None:
            sink.__exit__(ValueError, ValueError(), None)

        def use() -> None:
            with pytest.raises((RuntimeError, OSError)):
                sink.write("b", sample(1))
            with pytest.raises(tc.RemoteError, match="fork"):
                tc.ShardWriter("s3://bucket/another")

        assert run_in_child(leave, 60) == 0
        assert run_in_child(use, 60) == 0
        sink.write("c", sample(2))
        sink.write("d", sample(3))
    found = json.loads(write_server.objects("cache/")["manifest.json"])["shardlist"]
    assert [each["nsamples"] for each in found] == [2, 1]


def test_a_full_disk_for_spools(write_server: WriteServer, start: Start, tmp_path: Path) -> None:
    """A limit on the length of files has the same effect as a full disk."""
    assert wait([start(fill_spools, str(tmp_path))]) == [0]
    assert write_server.objects("cache/") == {}
    assert os.listdir(tmp_path) == []


def fill_spools(folder: str) -> None:
    tempfile.tempdir = folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(OSError, match=f"{folder}.*TMPDIR"):
        write(URL, 200, max_samples=1000)


def test_spools_have_no_names(write_server: WriteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with tc.ShardWriter(URL, max_samples=2) as sink:
        for i in range(5):
            sink.write(f"{i}", sample(i))
            assert os.listdir(tmp_path) == []
