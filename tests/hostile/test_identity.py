"""Shards that are replaced, written to, cut short or deleted under lazy tensors: an error, never foreign bytes or a signal."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc

ROOT = Path(__file__).parent.parent.parent
SIZES = {"small": 64, "large": 100_000}


def write(path: Path, value: int, nbytes: int, count: int = 3) -> None:
    with tc.ShardWriter(path, overwrite=True, manifest=False, dali_index=False, fsync=False) as sink:
        for i in range(count):
            sink.write(f"k{i}", {"x": torch.full((nbytes,), value, dtype=torch.uint8)})


def replace(path: Path, nbytes: int) -> None:
    other = path.with_name("other.tar")
    write(other, 2, nbytes)
    os.replace(other, path)


def rewrite(path: Path, nbytes: int) -> None:
    other = path.with_name("other.tar")
    write(other, 2, nbytes)
    content = other.read_bytes()
    assert len(content) == path.stat().st_size
    time.sleep(0.02)  # time stamps count the system's ticks
    with path.open("r+b") as file:
        file.write(content)


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, 700)


def delete(path: Path, nbytes: int) -> None:
    path.unlink()


CHANGES: dict[str, Callable[[Path, int], None]] = {
    "replaced": replace,
    "rewritten": rewrite,
    "truncated": truncate,
    "deleted": delete,
}


def assert_refused_or_old(use: Callable[[], Any], path: Path, may_be_old: bool) -> None:
    """Assert that a shard that was changed is refused with its path, or comes as it was where that may be."""
    try:
        found = use()
    except (tc.TensorCacheError, FileNotFoundError) as exc:
        assert str(path) in str(exc)  # noqa: PT017
    else:
        assert may_be_old
        assert bool((found == 1).all())


def attempt(pickled: list[bytes], results: Any) -> None:
    """In another process: put what loading gives, or the error's type."""
    for each in pickled:
        try:
            results.put(int(pickle.loads(each).load()[0]))
        except Exception as exc:
            results.put(type(exc))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("loaded_before", [False, True])
def test_pickled_lazy_tensors(tmp_path: Path, what: str, size: str, loaded_before: bool) -> None:
    path = tmp_path / "x.tar"
    write(path, 1, SIZES[size])
    with tc.open(path) as cache:
        pickled = pickle.dumps(cache[1]["x"])
    lazy = pickle.loads(pickled)
    if loaded_before:
        assert int(lazy.load()[0]) == 1
    CHANGES[what](path, SIZES[size])
    for one in (lazy, pickle.loads(pickled)):
        uses = (
            one.load,
            lambda one=one: one[3:5],
            lambda one=one: one.load(out=torch.empty(SIZES[size], dtype=torch.uint8)),
        )
        for use in uses:
            assert_refused_or_old(
                use, path, loaded_before and what in ("replaced", "deleted")
            )  # its file is open still


def test_in_spawned_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pickled = []
    for what in ("replaced", "truncated"):
        path = tmp_path / f"{what}.tar"
        write(path, 1, 70_000)
        with tc.open(path) as cache:
            pickled.append(pickle.dumps(cache[0]["x"]))
        CHANGES[what](path, 70_000)
    results = context.Queue()
    process = context.Process(target=attempt, args=(pickled, results))
    process.start()
    assert [results.get(timeout=60) for _ in pickled] == [tc.FormatError, tc.FormatError]
    process.join()


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", CHANGES)
def test_while_a_cache_is_open(tmp_path: Path, what: str, size: str, io: str) -> None:
    path = tmp_path / "x.tar"
    write(path, 1, SIZES[size])
    with tc.open(path, io=io) as cache:
        lazy = cache[0]["x"]
        view = lazy.load(copy=False) if what not in ("truncated", "rewritten") else None
        assert bool((cache.read_batch([0, 1, 2])["x"] == 1).all())
        CHANGES[what](path, SIZES[size])
        uses = [
            lazy.load,
            lambda: lazy[1:3],
            lambda: lazy.load(copy=False).clone(),
            lambda: cache[1]["x"].load(),
            lambda: cache.read_batch([0, 1])["x"],
            lambda: cache.read_tensors([2, 1])["x"],
            lambda: pickle.loads(pickle.dumps(lazy)).load(),
            lambda: tc.decode_sample(*tc.encode_sample(lazy)).load(),
        ]
        for use in uses:
            assert_refused_or_old(
                use, path, what in ("replaced", "deleted")
            )  # the file that is open is the one that was
        assert view is None or bool((view == 1).all())


def test_closed_under_lazy_tensors_and_batches(tmp_path: Path) -> None:
    for nbytes in SIZES.values():
        write(tmp_path / "x.tar", 1, nbytes)
        cache = tc.open(tmp_path / "x.tar")
        lazy, batch = cache[0]["x"], cache.read_batch([0, 1])
        view, loaded = lazy.load(copy=False), lazy.load()
        cache.close()
        for use in (lazy.load, lambda lazy=lazy: pickle.dumps(lazy), lambda cache=cache: cache[0]):
            with pytest.raises(ValueError, match="closed"):
                use()
        del cache
        assert all(bool((found == 1).all()) for found in (view, loaded, batch["x"]))


def test_small_values_of_a_batch_behind_a_close(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar", fsync=False) as sink:
        for i in range(3):
            sink.write(f"k{i}", {"x": torch.ones(2), "i": i})
    for io in ("auto", "pread"):
        cache = tc.open(tmp_path / "x.tar", io=io)
        batch = cache.read_batch([0, 2])
        cache.close()
        with pytest.raises(ValueError, match="closed"):
            batch["i"].tolist()


def test_closed_while_threads_load(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", 1, 70_000)
    cache = tc.open(tmp_path / "x.tar", max_open_files=1)
    lazy = [cache[i]["x"] for i in range(3)]
    found: list[Any] = []

    def load(number: int) -> None:
        try:
            while True:
                assert bool((lazy[number % 3].load() == 1).all())
        except Exception as exc:
            found.append(exc)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    cache.close()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 6
    assert all(type(exc) is ValueError and "closed" in str(exc) for exc in found), found


NAMES = [
    "new\nline",
    "100%",
    "é",
    "two words",
    "[ab]",
    "{1..2}",
    "a*b?",
    os.fsdecode(b"\xff\xe9"),
    "%06d",
    "-rf",
    "a:b",
    "'\"",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_of_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write(tmp_path / "x.tar", 1, 100)
    path = folder / f"{name}.tar"
    os.replace(tmp_path / "x.tar", path)
    os.mkdir(folder / "sub")
    for source in (path, str(path), folder, [path]):
        with tc.open(source) as cache:
            assert int(cache.read_batch(["k1"])["x"][0, 0]) == 1
            lazy = pickle.loads(pickle.dumps(cache[2]["x"]))
            assert int(lazy.load()[0]) == 1
            assert int(pickle.loads(pickle.dumps(cache))[0]["x"].load()[0]) == 1
    tc.write_index(path)
    os.truncate(path, 700)
    with pytest.raises(tc.FormatError) as caught:
        tc.open(path)
    assert str(path) in str(caught.value)
    caught.value.at("again")
    os.remove(path)
    if "%" in name:
        with pytest.raises(ValueError, match="expected at most one number"):
            tc.ShardWriter(path, resume=True)
        return
    for i in range(2):
        with tc.ShardWriter(folder / f"{name}-%d.tar", max_samples=1, resume=True, fsync=False) as sink:
            sink.write(f"k{i}", {"x": torch.full((3,), i)})
    with tc.open(folder) as cache:
        assert cache.read_batch(["k0", "k1"])["x"][:, 0].tolist() == [0, 1]


def test_shards_are_opened_for_reading_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.tar", 1, 100)
    flags: list[int] = []
    opened = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flag, *rest, **named: flags.append(flag) or opened(path, flag, *rest, **named)
    )
    with tc.open(tmp_path) as cache:
        cache.read_batch([0, 1])
        cache[0]["x"].load(copy=False)
        pickle.loads(pickle.dumps(cache[0]["x"])).load()
    assert flags
    assert not any(flag & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flag in flags)
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@FORK
def test_fork_with_a_shard_that_changes(tmp_path: Path) -> None:
    """In a separate process: pytest's may have threads."""
    script = textwrap.dedent("""
        import os, sys
        import torch
        import wds_tensorcache as tc
        torch.set_num_threads(1)
        path = sys.argv[1]
        with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as sink:
            for i in range(4):
                sink.write(f"{i}", {"x": torch.full((64,), i), "i": i})
        cache = tc.open(path)
        lazy = cache[3]["x"]
        cache.read_batch(range(4))
        pid = os.fork()
        if not pid:
            assert cache.read_batch(range(4))["x"][:, 0].tolist() == [0, 1, 2, 3]
            os.truncate(path, 1000)
            for use in (lazy.load, lambda: cache.read_batch(range(4))):
                try:
                    use()
                except tc.FormatError:
                    continue
                os._exit(1)
            os._exit(9)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.tar")], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 9, done.stderr[-500:]
