"""Shards that are cut short in place while another process copies out of their maps: an error or the right bytes, no SIGBUS."""

from __future__ import annotations

import errno
import os
import platform
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.storage import lease
from wds_tensorcache.storage.system import file_system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs leases and /proc, of Linux")

NUM_SAMPLES = 1000
WIDTH = 1500  # floats: 6,000 bytes, which are gathered
TIMEOUT_S = 60  # to catch a hang

READER = """
    import os, random, sys, threading
    import torch
    import wds_tensorcache as tc

    path, io, rounds, num_threads, setup = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    exec(setup)
    order = random.Random(0).choices(range({num_samples}), k=4000)

    def read(cache):
        try:
            for _ in range(2):
                batch = cache.read_batch(order)
                assert torch.equal(batch["x"][:, 0], torch.tensor(order, dtype=torch.float32)), "other bytes"
                assert torch.equal(batch["x"][:, -1], torch.tensor(order, dtype=torch.float32)), "other bytes"
                assert batch["i"].tolist() == order
            said.append("whole")
        except tc.FormatError as error:
            assert path in str(error), error
            said.append("refused")

    for _ in range(rounds):
        said = []
        with tc.open(path, io=io) as cache:
            cache.read_batch(range(64))
            print("go", flush=True)
            threads = [threading.Thread(target=read, args=(cache,)) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(*said, cache._store.shards[0].file.may_lease, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("cut") / "x.tar"
    with tc.ShardWriter(path, fsync=False, dali_index=False) as sink:
        for i in range(NUM_SAMPLES):
            sink.write(f"{i:06d}", {"x": torch.full((WIDTH,), float(i)), "i": i})
    return path.read_bytes()


@contextmanager
def reader(
    path: Path, io: str, rounds: int, num_threads: int = 1, setup: str = "", prefix: Sequence[str] = ()
) -> Iterator[Any]:
    """Another process that reads batches in rounds: says "go" in each, and then what came of it, and waits for a line."""
    script = textwrap.dedent(READER.replace("{num_samples}", str(NUM_SAMPLES)))
    command = [*prefix, sys.executable, "-c", script, str(path), io, str(rounds), str(num_threads), setup]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(process: Any) -> list[str]:
    line = process.stdout.readline().split()
    if not line:
        process.wait(TIMEOUT_S)
        pytest.fail(f"the reader ended with {process.returncode}: {process.stderr.read()}")
    return line


def cut(path: Path, way: str, kept: int, rng: random.Random) -> None:
    nbytes = rng.choice([0, 4096, 100_000, path.stat().st_size // 2])
    if way == "held":
        os.ftruncate(kept, nbytes)
    elif way == "truncate":
        os.truncate(path, nbytes)
    elif way == "grown again":
        size = path.stat().st_size
        os.truncate(path, nbytes)
        os.truncate(path, size)
    else:
        with open(path, "wb") as file:
            file.write(bytes(nbytes))


def race(
    path: Path, content: bytes, way: str, io: str = "auto", seen: Path | None = None, **options: Any
) -> tuple[set[str], set[str]]:
    """Cut the shard in each round while it is read, at `seen` if that is elsewhere.

    Returns:
        The output of the reader, and whether it takes leases on the shard.
    """
    rounds = 12
    path.write_bytes(content)
    rng = random.Random(way)
    kept = os.open(path, os.O_WRONLY) if way == "held" else -1
    said, trusted = set(), set()
    try:
        with reader(seen or path, io, rounds, **options) as process:
            for _ in range(rounds):
                assert answer(process) == ["go"]
                time.sleep(rng.uniform(0, 0.02))
                cut(path, way, kept, rng)
                *found, may_lease = answer(process)
                said |= set(found)
                trusted.add(may_lease)
                with open(path, "r+b") as file:
                    file.write(content)
                    file.truncate()
                with suppress(BrokenPipeError):  # it has ended
                    process.stdin.write("\n")
                    process.stdin.flush()
            assert process.wait(TIMEOUT_S) == 0, process.stderr.read()
    finally:
        if kept >= 0:
            os.close(kept)
    return said, trusted


WAYS = ["truncate", "open for writing", "grown again", "held"]


@pytest.mark.parametrize(("way", "io"), [*((way, "auto") for way in WAYS), ("truncate", "pread")])
def test_a_shard_that_is_cut_short_while_it_is_read(tmp_path: Path, content: bytes, way: str, io: str) -> None:
    said, trusted = race(tmp_path / "x.tar", content, way, io)
    assert said <= {"refused", "whole"}
    assert "refused" in said
    assert trusted == {"None" if io == "pread" else str(is_local(tmp_path))}


def is_local(folder: Path) -> bool:
    return file_system(str(folder))[0] in lease.LOCAL


def test_many_threads(tmp_path: Path, content: bytes) -> None:
    said, _ = race(tmp_path / "x.tar", content, "truncate", num_threads=4)
    assert "refused" in said
    assert said <= {"refused", "whole"}


SECCOMP = """
import ctypes, platform, struct
number = {{"x86_64": 310, "aarch64": 270}}[platform.machine()]
program = b"".join(
    struct.pack("HBBI", *step) for step in ((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | {error}), (6, 0, 0, 0x7FFF0000))
)
kept = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
filter = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(kept)))
assert libc.prctl(22, 2, filter) == 0
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="needs the number of a system call")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_sandbox_without_process_vm_readv(tmp_path: Path, content: bytes, error: int) -> None:
    said, _ = race(tmp_path / "x.tar", content, "held", setup=SECCOMP.format(error=error))
    assert "refused" in said
    assert said <= {"refused", "whole"}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


WITHOUT_CAP_LEASE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
head, caps = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
assert libc.capget(head, caps) == 0
effective, *rest = struct.unpack("6I", caps.raw[:24])
assert libc.capset(head, ctypes.create_string_buffer(struct.pack("6I", effective & ~(1 << 28), *rest))) == 0
"""


@needs_root
def test_a_shard_of_another_owner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").touch()
    os.chown(tmp_path / "x.tar", 65534, 65534)
    said, trusted = race(tmp_path / "x.tar", content, "truncate", setup=WITHOUT_CAP_LEASE)
    assert "refused" in said
    assert said <= {"refused", "whole"}
    assert trusted == {"False"}


@needs_root
def test_a_layer_below_an_overlay(tmp_path: Path, content: bytes) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    mount = "mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work merged"
    prefix = ["unshare", "-m", "sh", "-c", f'cd {tmp_path} && {mount} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("overlays cannot be mounted here")
    seen = tmp_path / "merged" / "x.tar"
    said, trusted = race(tmp_path / "lower" / "x.tar", content, "truncate", seen=seen, prefix=prefix)
    assert "refused" in said
    assert said <= {"refused", "whole"}
    assert "True" not in trusted  # None: nothing is read through maps where nothing is known to be in memory


COPIER = """
    import sys
    import wds_tensorcache as tc

    for _ in range(12):
        with tc.open(sys.argv[1]) as cache:
            sample = cache[0]
            print("go", flush=True)
            try:
                for _ in range(2):
                    skeleton, tensors = tc.encode_sample(sample)
                    assert tensors[-1] == tensors[-2] == 7
                print("whole", flush=True)
            except tc.EncodeError as error:
                assert isinstance(error.__cause__, tc.FormatError)
                print("refused", flush=True)
        sys.stdin.readline()
"""


def test_lazy_tensors_of_a_shard_that_are_written_to_another(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fsync=False, dali_index=False) as sink:
        sink.write("0", {"x": torch.full((24_000_000,), 7, dtype=torch.uint8)})
    content = path.read_bytes()
    command = [sys.executable, "-c", textwrap.dedent(COPIER), str(path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    rng, said = random.Random(0), set()
    try:
        for _ in range(12):
            assert answer(process) == ["go"]
            time.sleep(rng.uniform(0, 0.02))
            os.truncate(path, 8192)
            said |= set(answer(process))
            path.write_bytes(content)
            process.stdin.write("\n")
            process.stdin.flush()
    finally:
        process.kill()
        process.communicate()
    assert "refused" in said
    assert said <= {"refused", "whole"}
