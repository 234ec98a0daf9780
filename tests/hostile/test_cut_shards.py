"""Shards that are cut short in place while another process copies out of their maps: an error or the right bytes, no SIGBUS."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
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
PATIENCE_S = 30  # a reader ends after this if its shard is never cut

# each reader is a fork of a process that has only imported torch and webdataset; the reader imports the package itself
READERS = multiprocessing.get_context("forkserver")
READERS.set_forkserver_preload(["torch", "webdataset"])


def read_batches(told: Connection, path: str, io: Any, rounds: int, num_threads: int, setup: str) -> None:
    """Read batches in rounds: send "go" in each, read until an error, send the result, and wait for an answer."""
    kept: dict[str, Any] = {}
    exec(setup, kept)
    order = random.Random(0).choices(range(NUM_SAMPLES), k=4000)
    said: list[str] = []

    def read(cache: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < deadline:
                batch = cache.read_batch(order)
                assert torch.equal(batch["x"][:, 0], torch.tensor(order, dtype=torch.float32)), "other bytes"
                assert torch.equal(batch["x"][:, -1], torch.tensor(order, dtype=torch.float32)), "other bytes"
                assert batch["i"].tolist() == order
            said.append("whole")
        except tc.FormatError as error:
            said.append("refused" if path in str(error) else f"{error}")
        except BaseException as error:
            said.append(repr(error))
            raise

    for _ in range(rounds):
        said.clear()
        with tc.open(path, io=io) as cache:
            cache.read_batch(range(64))
            told.send(["go"])
            threads = [threading.Thread(target=read, args=(cache,)) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            told.send([*said, str(cache._store.shards[0].file.may_lease)])
        told.recv()


def copy_samples(told: Connection, path: str, rounds: int) -> None:
    """Encode a sample of lazy tensors in rounds, as `read_batches` does."""
    for _ in range(rounds):
        with tc.open(path) as cache:
            sample = cache[0]
            told.send(["go"])
            deadline = time.monotonic() + PATIENCE_S
            try:
                while time.monotonic() < deadline:
                    _, tensors = tc.encode_sample(sample)
                    assert tensors[-1] == tensors[-2] == 7
                told.send(["whole"])
            except tc.EncodeError as error:
                told.send(["refused" if isinstance(error.__cause__, tc.FormatError) else repr(error.__cause__)])
        told.recv()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("cut") / "x.tar"
    with tc.ShardWriter(path, fsync=False, dali_index=False) as sink:
        for i in range(NUM_SAMPLES):
            sink.write(f"{i:06d}", {"x": torch.full((WIDTH,), float(i)), "i": i})
    return path.read_bytes()


class Reader:
    """Another process, and the connection to it."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._told, its_end = READERS.Pipe()
        self._process = READERS.Process(target=work, args=(its_end, *arguments), daemon=True)
        self._process.start()
        its_end.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._told.close()

    def answer(self) -> list[str]:
        try:
            assert self._told.poll(TIMEOUT_S), "the reader hangs"
            answer: list[str] = self._told.recv()
        except EOFError:
            pytest.fail(f"the reader ended with {self.end()}")
        return answer

    def go_on(self) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self._told.send("next")

    def end(self) -> int | None:
        """Wait for it, and return its exit code."""
        self._process.join(TIMEOUT_S)
        return self._process.exitcode


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
    path: Path,
    content: bytes,
    way: str,
    io: str = "auto",
    seen: Path | None = None,
    num_threads: int = 1,
    setup: str = "",
) -> tuple[set[str], set[str]]:
    """Cut the shard in each round while it is read, at `seen` if that is elsewhere.

    Returns:
        Answers of the reader, and whether it takes leases on the shard.
    """
    rounds = 12
    path.write_bytes(content)
    rng = random.Random(way)
    kept = os.open(path, os.O_WRONLY) if way == "held" else -1
    said, trusted = set(), set()
    try:
        with Reader(read_batches, str(seen or path), io, rounds, num_threads, setup) as reader:
            for _ in range(rounds):
                assert reader.answer() == ["go"]
                time.sleep(rng.uniform(0, 0.02))
                cut(path, way, kept, rng)
                *found, may_lease = reader.answer()
                said |= set(found)
                trusted.add(may_lease)
                with open(path, "r+b") as file:
                    file.write(content)
                    file.truncate()
                reader.go_on()
            assert reader.end() == 0
    finally:
        if kept >= 0:
            os.close(kept)
    return said, trusted


WAYS = ["truncate", "open for writing", "grown again", "held"]


@pytest.mark.parametrize(("way", "io"), [*((way, "auto") for way in WAYS), ("truncate", "pread")])
def test_a_shard_that_is_cut_short_while_it_is_read(tmp_path: Path, content: bytes, way: str, io: str) -> None:
    said, trusted = race(tmp_path / "x.tar", content, way, io)
    assert said == {"refused"}
    assert trusted == {"None" if io == "pread" else str(is_local(tmp_path))}


def is_local(folder: Path) -> bool:
    return file_system(str(folder))[0] in lease.LOCAL


def test_many_threads(tmp_path: Path, content: bytes) -> None:
    said, _ = race(tmp_path / "x.tar", content, "truncate", num_threads=4)
    assert said == {"refused"}


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
    assert said == {"refused"}


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
    assert said == {"refused"}
    assert trusted == {"False"}


OVERLAY = """
import ctypes, subprocess
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0  # a mount namespace
assert libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None) == 0  # which no other process sees
subprocess.run({mount!r}.split(), cwd={folder!r}, check=True)
"""


@needs_root
def test_a_layer_below_an_overlay(tmp_path: Path, content: bytes) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    mount = "mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work merged"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("overlays cannot be mounted here")
    seen = tmp_path / "merged" / "x.tar"
    said, trusted = race(
        tmp_path / "lower" / "x.tar",
        content,
        "truncate",
        seen=seen,
        setup=OVERLAY.format(folder=str(tmp_path), mount=mount),
    )
    assert said == {"refused"}
    assert "True" not in trusted  # None: nothing is read through maps where nothing is known to be in memory


def test_lazy_tensors_of_a_shard_that_are_written_to_another(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fsync=False, dali_index=False) as sink:
        sink.write("0", {"x": torch.full((24_000_000,), 7, dtype=torch.uint8)})
    content = path.read_bytes()
    rng, said = random.Random(0), set()
    with Reader(copy_samples, str(path), 12) as reader:
        for _ in range(12):
            assert reader.answer() == ["go"]
            time.sleep(rng.uniform(0, 0.02))
            os.truncate(path, 8192)
            said |= set(reader.answer())
            path.write_bytes(content)
            reader.go_on()
        assert reader.end() == 0
    assert said == {"refused"}
