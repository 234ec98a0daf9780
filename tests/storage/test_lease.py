"""Read leases: taken for a copy, gone after it, and no writer waits longer than one chunk takes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.storage import lease, maps
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.lease import Leases
from wds_tensorcache.storage.maps import Maps
from wds_tensorcache.storage.system import file_system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")

NUM_SAMPLES = 256
ORDER = random.Random(0).choices(range(NUM_SAMPLES), k=2000)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    if file_system(str(tmp_path))[0] not in lease.LOCAL:
        pytest.skip("the temporary folder is not on a file system whose leases can be trusted")
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fsync=False, dali_index=False) as sink:
        for i in range(NUM_SAMPLES):
            # a tensor name that no other test uses: other tests may have used up the attempts at a template
            sink.write(f"{i:06d}", {"leased": torch.full((300,), float(i)), "i": i})
    return path


def num_leases(path: Path) -> int:
    """Return how many leases all processes hold on a file."""
    inode = f":{path.stat().st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum("LEASE" in line and any(word.endswith(inode) for word in line) for line in lines)


def open_for_writing(path: Path) -> None:
    """Raises BlockingIOError if a lease is held, where an ordinary open waits."""
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def read(cache: Any) -> None:
    batch = cache.read_batch(ORDER)
    assert batch["leased"][:, 299].tolist() == ORDER
    assert batch["i"].tolist() == ORDER


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leases each batch took."""
    taken: list[int] = []
    take = Leases.take

    def counting(leases: Leases, files: Any) -> bool:
        are_taken = take(leases, files)
        taken.append(len(leases._taken))
        return are_taken

    monkeypatch.setattr(Leases, "take", counting)
    return taken


def test_no_lease_is_left_after_a_batch(shard: Path, counted: list[int]) -> None:
    with tc.open(shard) as cache:
        read(cache)  # its samples are decoded one by one: there is no template yet
        counted.clear()
        read(cache)
        assert counted == [1, 1]  # for the tensors, and when the numbers are looked at
        assert num_leases(shard) == 0
        open_for_writing(shard)
        with pytest.raises(tc.BatchError):
            cache.read_batch([0, 1], collate="pad", pad_value={"z": 1})
        assert num_leases(shard) == 0
        read(cache)


def test_a_lease_is_held_for_the_copy(shard: Path) -> None:
    file = ShardFile(str(shard))
    with Maps([file], 100, "auto") as held:
        assert num_leases(shard) == 1
        with pytest.raises(BlockingIOError):
            open_for_writing(shard)
        with pytest.raises(maps.MapLost):  # a writer waits: the rest is read
            held.gather(torch.arange(10).numpy(), 4)
        os.rename(shard, shard.with_name("y.tar"))  # waits for no process
        shard.with_name("y.tar").read_bytes()
    assert num_leases(shard.with_name("y.tar")) == 0


def test_errors_give_leases_back(shard: Path) -> None:
    file = ShardFile(str(shard))
    with pytest.raises(KeyError), Maps([file], 100, "auto"):
        raise KeyError
    assert num_leases(shard) == 0
    os.utime(shard, (1, 1))
    with pytest.raises(tc.FormatError, match="changed while it was open"), Maps([file], 100, "auto"):
        pass
    assert num_leases(shard) == 0


def test_no_lease_on_what_somebody_writes_to(shard: Path, counted: list[int]) -> None:
    with tc.open(shard) as cache:
        with open(shard, "r+b"):
            read(cache)
            assert set(counted) == {0}
        counted.clear()
        read(cache)
        assert set(counted) == {1}


def test_few_samples_of_many_shards_take_none(tmp_path: Path, counted: list[int]) -> None:
    with tc.ShardWriter(tmp_path / "%03d.tar", max_samples=10, fsync=False, dali_index=False) as sink:
        for i in range(200):
            sink.write(str(i), {"x": torch.full((300,), float(i))})
    with tc.open(tmp_path) as cache:
        for order in (range(0, 200, 10), random.Random(1).choices(range(200), k=500)):
            assert cache.read_batch(list(order))["x"][:, 0].tolist() == list(order)
    assert counted == [20] if file_system(str(tmp_path))[0] in lease.LOCAL else [0]


def test_leases_are_bounded(shard: Path) -> None:
    before = len(lease.LEASE_FDS)
    files = [ShardFile(str(shard)) for _ in range(lease._MAX_OPEN - before)]
    for _ in range(3):
        leases = Leases()
        assert leases.take(files)
        assert not Leases().take([ShardFile(str(shard))])
        leases.release()
        assert num_leases(shard) == 0
        assert len(lease.LEASE_FDS) == lease._MAX_OPEN // 2
    del files
    assert len(lease.LEASE_FDS) == before


def test_descriptors_close_with_the_cache(shard: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with tc.open(shard) as cache:
        for _ in range(3):
            read(cache)
        assert len(lease.LEASE_FDS) >= 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_file_without_a_lease_gives_the_others_back(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(b"1")
    with open(other, "r+b"):
        assert not Leases().take([ShardFile(str(shard)), ShardFile(str(other))])
    assert num_leases(shard) == 0


def test_an_interrupt_anywhere_leaves_no_lease(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the system that end in a KeyboardInterrupt, each in turn, before or after they are made."""
    call, left = fcntl.fcntl, [0]

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        found = call(*args)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return found

    with tc.open(shard) as cache:
        read(cache)
        monkeypatch.setattr(fcntl, "fcntl", interrupted)
        num_interrupts = 0
        for moment in range(1, 24):
            left[0] = moment
            with contextlib.suppress(KeyboardInterrupt):
                read(cache)
                num_interrupts -= 1
            num_interrupts += 1
            gc.collect()
            left[0] = -1
            assert num_leases(shard) == 0, moment
        assert num_interrupts >= 8
        read(cache)


def test_a_file_system_that_could_not_be_asked_is_not_trusted(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile(str(shard))
    with monkeypatch.context() as patch:
        patch.setattr(lease, "file_system", lambda path: os.open("/dev/null" * 9999, os.O_RDONLY))
        assert not Leases().take([file])
        assert file.may_lease is None
    with monkeypatch.context() as patch:
        patch.setattr(lease, "LOCAL", frozenset())
        assert not Leases().take([file])
        assert file.may_lease is False


def test_only_local_file_systems_are_trusted(shard: Path) -> None:
    with open("/proc/self/maps", "rb") as there:
        file = ShardFile.__new__(ShardFile)
        file.fd = there.fileno()
        assert not lease._is_trusted(file)


def test_threads_do_not_end_the_leases_of_others(shard: Path) -> None:
    file = ShardFile(str(shard))
    with tc.open(shard, num_threads=2) as cache, Maps([file], 100, "auto") as held:
        threads = [threading.Thread(target=read, args=(cache,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held._leases is not None
        assert held._leases.are_held()
        assert num_leases(shard) == 1
    assert num_leases(shard) == 0


def test_forked_children_have_their_own(shard: Path) -> None:
    with tc.open(shard) as cache:
        read(cache)
        file = cache._store.shards[0].file
        with Maps([file], 100, "auto") as held:
            child = os.fork()
            if not child:
                status = 1
                try:
                    torch.set_num_threads(1)
                    read(cache)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert held._leases is not None
            assert held._leases.are_held()
    assert num_leases(shard) == 0


KILLED = """
    import os, sys, threading
    import wds_tensorcache as tc

    cache = tc.open(sys.argv[1])

    def loop():
        while True:
            cache.read_batch(list(range(256)) * 40)

    for _ in range(3):
        threading.Thread(target=loop, daemon=True).start()
    for _ in range(40):
        if not os.fork():
            os.write(1, b"go\\n")
            sys.stdin.read()
            os._exit(0)
    threading.Event().wait()
"""


def test_a_killed_reader_leaves_no_lease_to_its_children(shard: Path) -> None:
    process = start(KILLED, shard)
    try:
        assert [process.stdout.readline() for _ in range(40)] == ["go\n"] * 40
        process.kill()
        process.wait()
        open_for_writing(shard)
    finally:
        process.kill()
        process.communicate()  # the children end


READING = """
    import os, signal, sys
    import wds_tensorcache as tc

    heard = []
    if sys.argv[2] == "handler":
        for number in (signal.SIGIO, signal.SIGURG):
            signal.signal(number, lambda number, frame: heard.append(number))
    order = list(range(256)) * 40
    num_batches = 0
    with tc.open(sys.argv[1]) as cache:
        print("go", flush=True)
        while not os.path.exists(sys.argv[1] + ".stop"):
            assert cache.read_batch(order)["i"].tolist() == order
            num_batches += 1
    print(num_batches > 0, heard)
"""


def start(script: str, *arguments: object) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("signals", ["handler", "default"])
def test_writers_are_let_in_while_a_cache_reads(shard: Path, signals: str) -> None:
    process = start(READING, shard, signals)
    writer = "import os, sys\nfor _ in range(30): os.close(os.open(sys.argv[1], os.O_RDWR))"
    try:
        assert process.stdout.readline() == "go\n"
        # less than the 45 s after which the kernel takes a lease away: one that is kept is a failure
        subprocess.run([sys.executable, "-c", writer, str(shard)], check=True, timeout=40)
        Path(f"{shard}.stop").touch()
        assert process.communicate(timeout=60)[0] == "True []\n"
        assert process.returncode == 0
    finally:
        process.kill()


def test_a_broken_lease_stops_nobody_from_reading(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer comes between two chunks: what is left is read by preadv."""
    monkeypatch.setattr(maps, "_CHUNK_NBYTES", 1200)
    gather, blocked = maps.gather, []

    def interrupted(*args: Any) -> Any:
        try:
            open_for_writing(shard)
        except BlockingIOError as error:
            blocked.append(error.errno)
        return gather(*args)

    monkeypatch.setattr(maps, "gather", interrupted)
    with tc.open(shard) as cache:
        read(cache)
    assert blocked
    assert set(blocked) == {errno.EAGAIN}
    assert num_leases(shard) == 0
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
